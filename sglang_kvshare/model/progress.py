"""What the user sees while a model is made: bars on a terminal, a few plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

Advance = Callable[[int], None]
"""Called with how much was done since the last call."""


class Reporter:
    """Prints steps to one console; standard error unless told otherwise."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)

    def say(self, text: str) -> None:
        """One line, printed as it is: paths may hold brackets and must not be wrapped."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(
        self, label: str, total: int, unit: Literal["bytes", "items"] = "bytes"
    ) -> Iterator[Advance]:
        """A step of known length; the caller advances what this yields."""
        if not self._console.is_terminal:
            self.say(label)
            yield _ignore
            return
        counter: ProgressColumn = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn())
        with Progress(*columns, console=self._console) as bars:
            # Markup is escaped for the same reason as in `say`.
            task = bars.add_task(label.replace("[", "\\["), total=total)
            yield lambda amount: bars.advance(task, amount)


def _ignore(amount: int) -> None:
    """Progress without a terminal: the label was all."""
