"""A quality run, summarised: for each task what every method scores, diverges and computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvshare_eval.errors import EvalError
from kvshare_eval.quality.record import QualityRecord, from_dict
from kvshare_eval.run_dir import Run
from kvshare_eval.stats.bootstrap import (
    Array,
    Interval,
    Sample,
    bootstrap_ci,
    mean,
    quantile,
    ratio_of_means,
)
from kvshare_eval.stats.paired import (
    Wins,
    fraction,
    geometric_mean_ratio,
    paired_difference,
    paired_wins,
    performance_gap_recovered,
)

FULL, NO_CONTEXT, BASE = "full", "no_context", "none"

Figure = Callable[[QualityRecord], float | None]


def score(record: QualityRecord) -> float | None:
    return record.scores.get(record.metric)


def kl(record: QualityRecord) -> float | None:
    return record.divergence.mean_kl if record.divergence and record.divergence.kl else None


def top1(record: QualityRecord) -> float | None:
    same = record.divergence.top1 if record.divergence else ()
    return sum(same) / len(same) if same else None


def prompt_tokens(record: QualityRecord) -> float:
    return float(record.prompt_tokens)


def computed_tokens(record: QualityRecord) -> float | None:
    report = record.report
    if not report:
        return None
    # Runs of before the server told it itself counted no probe pass and no check layer.
    counted = report["recomputed_tokens"] + report["new_tokens"]
    return float(report.get("computed_rows", counted))


def reused_tokens(record: QualityRecord) -> float | None:
    return float(record.report["reused_tokens"]) if record.report else None


@dataclass(frozen=True)
class TaskCases:
    """All records of one task, by method and case."""

    task: str
    by_method: Mapping[str, Mapping[tuple[str, str], QualityRecord]]

    def paired(self, figures: Sequence[tuple[str, Figure]]) -> tuple[Array, list[str]]:
        """One row a case that has every figure, one column a figure; and the case's group."""
        rows, groups = [], []
        for case in self.by_method.get(figures[0][0], {}):
            row = []
            for method, figure in figures:
                record = self.by_method.get(method, {}).get(case)
                value = None if record is None else figure(record)
                if value is None:
                    break
                row.append(value)
            else:
                rows.append(row)
                groups.append(case[0])
        return np.array(rows, dtype=float).reshape(-1, len(figures)), groups

    @cached_property
    def metric(self) -> str:
        return next(r.metric for records in self.by_method.values() for r in records.values())

    @cached_property
    def summaries(self) -> list[MethodSummary]:
        return [_summary(self, method) for method in self.by_method]


@dataclass(frozen=True)
class MethodSummary:
    """One method on one task; a figure is ``None`` where the records do not give it.

    ``first_divergence``: median index of the first token that differs, infinite where most answers
    never do; ``never``: share of answers that never do.
    """

    method: str
    cases: int
    groups: int
    score: Interval | None = None
    minus_full: Interval | None = None
    fraction: Interval | None = None
    pgr: Interval | None = None
    score_wins: Wins | None = None
    kl_ratio: Interval | None = None
    kl_median: Interval | None = None
    kl_p90: Interval | None = None
    kl_mean: Interval | None = None
    kl_wins: Wins | None = None
    top1: Interval | None = None
    first_divergence: float | None = None
    never: float | None = None
    reused: Interval | None = None
    computed: Interval | None = None


def task_cases(run: Run) -> list[TaskCases]:
    """The records of a run, in the order of its settings.

    Raises:
        EvalError: a record that is none of a quality run.
    """
    found: dict[str, dict[str, dict[tuple[str, str], QualityRecord]]] = {}
    for raw in run.records:
        if raw.get("type") == "server":
            continue
        record = _read(run, raw)
        methods = found.setdefault(record.task, {})
        methods.setdefault(record.method, {})[(record.group, record.case)] = record
    wanted = [str(method) for method in run.settings.get("methods") or ()]
    return [
        TaskCases(task, {m: methods[m] for m in [*(m for m in wanted if m in methods), *methods]})
        for task, methods in found.items()
    ]


def _read(run: Run, raw: dict[str, Any]) -> QualityRecord:
    try:
        return from_dict(raw)
    except (KeyError, TypeError) as error:
        raise EvalError(f"{run.name}: record {raw.get('key')!r} cannot be read: {error}") from None


def _summary(task: TaskCases, method: str) -> MethodSummary:
    records = task.by_method[method]
    figures: dict[str, Any] = {
        "score": _one(task, method, score, mean),
        "kl_mean": _one(task, method, kl, mean),
        "kl_median": _one(task, method, kl, quantile(0.5)),
        "kl_p90": _one(task, method, kl, quantile(0.9)),
        "top1": _one(task, method, top1, mean),
        "reused": _share(task, method, reused_tokens),
        "computed": _share(task, method, computed_tokens),
    }
    if method != FULL:
        figures["minus_full"] = _pair(task, method, FULL, score, paired_difference)
        figures["fraction"] = _pair(task, method, FULL, score, fraction)
    if method not in (FULL, NO_CONTEXT):
        figures["pgr"] = _recovered(task, method)
    if method not in (FULL, NO_CONTEXT, BASE):
        figures["score_wins"] = _wins(task, method, score, lower_is_better=False)
        figures["kl_ratio"] = _pair(task, method, BASE, kl, geometric_mean_ratio)
        figures["kl_wins"] = _wins(task, method, kl, lower_is_better=True)
    told = [r.divergence for r in records.values() if r.divergence and r.divergence.kl]
    firsts = [divergence.first_divergence for divergence in told]
    if firsts:
        places = [math.inf if first is None else float(first) for first in firsts]
        # The lower median: no mean of a number and of "never".
        figures["first_divergence"] = sorted(places)[(len(places) - 1) // 2]
        figures["never"] = sum(map(math.isinf, places)) / len(places)
    groups = len({group for group, _ in records})
    return MethodSummary(method, len(records), groups, **figures)


def _one(task: TaskCases, method: str, figure: Figure, statistic: Any) -> Interval | None:
    rows, groups = task.paired([(method, figure)])
    return bootstrap_ci(Sample.of(rows, groups), statistic) if len(rows) else None


def _share(task: TaskCases, method: str, figure: Figure) -> Interval | None:
    """Of all prompt tokens."""
    rows, groups = task.paired([(method, figure), (method, prompt_tokens)])
    return bootstrap_ci(Sample.of(rows, groups), ratio_of_means) if len(rows) else None


def _pair(
    task: TaskCases, method: str, other: str, figure: Figure, compare: Callable[..., Any]
) -> Interval | None:
    rows, groups = task.paired([(method, figure), (other, figure)])
    found: Interval | None = compare(rows[:, 0], rows[:, 1], groups) if len(rows) else None
    return found


def _wins(task: TaskCases, method: str, figure: Figure, *, lower_is_better: bool) -> Wins | None:
    rows, groups = task.paired([(method, figure), (BASE, figure)])
    if not len(rows):
        return None
    return paired_wins(rows[:, 0], rows[:, 1], groups, lower_is_better=lower_is_better)


def _recovered(task: TaskCases, method: str) -> Interval | None:
    rows, groups = task.paired([(method, score), (FULL, score), (NO_CONTEXT, score)])
    if not len(rows):
        return None
    return performance_gap_recovered(rows[:, 0], rows[:, 1], rows[:, 2], groups)
