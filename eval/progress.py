"""How far a run is and how long it takes: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Seconds between two lines where there is no terminal.
_LINE_EVERY_S = 30.0
#: Seconds of the past that the time left is estimated from.
_ESTIMATE_FROM_S = 600.0


def bar(console: Console) -> Progress:
    """Drawn on a terminal alone, and once a second: drawing must not delay a request."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=1,
        speed_estimate_period=_ESTIMATE_FROM_S,
        disable=not console.is_terminal,
    )


class Counting:
    """Counts what is done of several parts. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = bar(console)
        self._tasks = {"all": self._progress.add_task("all", total=0)}
        self._total = 0
        self._done = self._before = 0
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def add(self, label: str, total: int, *, before: int = 0) -> None:
        """A part of ``total`` steps, some of them done before: those say nothing of the speed."""
        self._total += total
        self._before += before
        self._tasks[label] = self._progress.add_task(label, total=total, completed=before)
        # A total that changes forgets the speed, and nothing has been done yet.
        self._progress.reset(self._tasks["all"], total=self._total, completed=self._before)

    def advance(self, label: str) -> None:
        """One step of a part is done."""
        self._done += 1
        self._progress.advance(self._tasks[label])
        self._progress.advance(self._tasks["all"])
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told >= _LINE_EVERY_S:
            self._told = now
            done = self._before + self._done
            left = (now - self._began) / self._done * (self._total - done)
            self._console.print(f"{label}: {done} of {self._total}, about {left / 60:.0f} min left")
