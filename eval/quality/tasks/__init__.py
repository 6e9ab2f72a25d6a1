"""The tasks, each a file of its own in this folder, found by name.

A task is a function that makes groups of cases from data::

    @register_task("squad", metric="f1", max_new_tokens=24)
    def squad(data: DataSource, seed: int, *, passages: int = 4, questions: int = 4) -> Groups: ...

Its keyword parameters are the task's options, which a command line sets as
``squad:passages=5,questions=3``; their types are read from the defaults (int, float, str, bool).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvshare_eval.loaders import DataSource
from kvshare_eval.options import Registry, defaults_of, first_line_of_doc
from kvshare_eval.quality.cases import Group

Groups = Iterator[Group]
#: Metrics that a task may name as its own; see :mod:`kvshare_eval.metrics`.
METRICS = ("f1", "exact_match", "rouge_l", "contains", "avoids", "found_share", "last_number")


@dataclass(frozen=True)
class Task:
    """A registered task.

    Attributes:
        name: what command lines and records call it.
        make: the function that yields its groups, in the same order for the same seed.
        metric: the figure by which answers are judged, one of :data:`METRICS`.
        max_new_tokens: the longest answer.
        first_line: only the first line of an answer is judged.
        stop: texts that end an answer, where a model goes on with a question of its own.
        doc: one line that says what is repeated, and where.
        by_default: it is measured when no task is named.
    """

    name: str
    make: Callable[..., Groups]
    metric: str
    max_new_tokens: int
    first_line: bool
    stop: tuple[str, ...]
    doc: str
    by_default: bool = True

    def defaults(self) -> dict[str, Any]:
        """The options and what they are when nobody sets them."""
        return defaults_of(self.make)

    def groups(self, data: DataSource, seed: int, options: dict[str, Any] | None = None) -> Groups:
        """The groups, without an end where the task generates them."""
        return self.make(data, seed, **{**self.defaults(), **(options or {})})


_TASKS: Registry[Task] = Registry("task", __name__, __path__, lambda task: task.make)


def register_task(
    name: str,
    *,
    metric: str,
    max_new_tokens: int,
    first_line: bool = False,
    stop: tuple[str, ...] = (),
    by_default: bool = True,
) -> Callable[[Callable[..., Groups]], Callable[..., Groups]]:
    """Add a task; the arguments are those of :class:`Task`."""
    if metric not in METRICS:
        raise ValueError(f"task {name!r}: metric={metric!r}: allowed are {', '.join(METRICS)}")

    def add(make: Callable[..., Groups]) -> Callable[..., Groups]:
        doc = first_line_of_doc(make)
        _TASKS.add(
            name, Task(name, make, metric, max_new_tokens, first_line, stop, doc, by_default)
        )
        return make

    return add


def tasks() -> dict[str, Task]:
    """All tasks by name."""
    return _TASKS.all()


def find_task(text: str) -> tuple[Task, dict[str, Any]]:
    """Read ``name`` or ``name:option=value,...``.

    Raises:
        EvalError: unknown task or option, or a value of the wrong type; names what is allowed.
    """
    return _TASKS.find(text)
