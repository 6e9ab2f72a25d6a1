"""A quality run over all its tasks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvshare_eval.report.quality import (
    BASE,
    FULL,
    NO_CONTEXT,
    Figure,
    TaskCases,
    computed_tokens,
    kl,
    prompt_tokens,
    score,
)
from kvshare_eval.stats.bootstrap import (
    Array,
    Interval,
    Sample,
    bootstrap_ci,
    mean,
    mean_over,
    ratio_of_means,
)
from kvshare_eval.stats.paired import KL_FLOOR


@dataclass(frozen=True)
class OverTasks:
    """One method over all tasks of a run, each task with the same weight.

    ``fraction_tasks`` and ``kl_tasks`` say how many tasks the two figures come from.
    """

    method: str
    fraction: Interval | None
    fraction_tasks: int
    kl_ratio: Interval | None
    kl_tasks: int
    kl_wins: tuple[int, int, int] | None
    computed: Interval | None


def over_tasks(tasks: Sequence[TaskCases]) -> list[OverTasks]:
    """Groups are drawn within their task, so that a resample has every task."""
    methods = dict.fromkeys(method for task in tasks for method in task.by_method)
    return [_over(tasks, method) for method in methods if method not in (FULL, NO_CONTEXT)]


def _over(tasks: Sequence[TaskCases], method: str) -> OverTasks:
    scored = _stack(tasks, [(method, score), (FULL, score)], needs=1)
    work = _stack(tasks, [(method, computed_tokens), (method, prompt_tokens)], needs=1)
    diverged = None if method == BASE else _stack(tasks, [(method, kl), (BASE, kl)], needs=None)
    wins = None
    if diverged is not None:
        gain = diverged.values[:, 1] - diverged.values[:, 0]
        wins = (int((gain > 1e-9).sum()), int((abs(gain) <= 1e-9).sum()), int((gain < -1e-9).sum()))
    return OverTasks(
        method=method,
        fraction=None if scored is None else bootstrap_ci(scored, mean_over(2, ratio_of_means)),
        fraction_tasks=_count(scored),
        kl_ratio=None if diverged is None else bootstrap_ci(diverged, _geometric_over_tasks),
        kl_tasks=_count(diverged),
        kl_wins=wins,
        computed=None if work is None else bootstrap_ci(work, mean_over(2, ratio_of_means)),
    )


def _stack(
    tasks: Sequence[TaskCases], figures: Sequence[tuple[str, Figure]], *, needs: int | None
) -> Sample | None:
    """Cases of all tasks with the task's number as last column.

    ``needs``: column that must not be 0 throughout, else the task is left out.
    """
    rows: list[list[float]] = []
    groups: list[Hashable] = []
    strata: list[int] = []
    for number, task in enumerate(tasks):
        found, names = task.paired(figures)
        if not len(found) or (needs is not None and not found[:, needs].any()):
            continue
        rows += [[*row, number] for row in found.tolist()]
        groups += [(number, name) for name in names]
        strata += [number] * len(names)
    return Sample.of(rows, groups, strata) if rows else None


def _geometric_over_tasks(values: Array, weights: Array) -> Array:
    raised = np.maximum(values[:, :2], KL_FLOOR)
    logs = np.column_stack([np.log(raised[:, 0] / raised[:, 1]), values[:, 2]])
    return np.exp(mean_over(1, mean)(logs, weights))


def _count(sample: Sample | None) -> int:
    return 0 if sample is None else len(np.unique(sample.stratum))
