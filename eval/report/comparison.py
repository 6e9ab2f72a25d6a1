"""Two runs next to each other: what got better or worse beyond noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvshare_eval.errors import EvalError
from kvshare_eval.quality.record import QualityRecord
from kvshare_eval.report.findings import judge
from kvshare_eval.report.quality import (
    FULL,
    Figure,
    TaskCases,
    computed_tokens,
    kl,
    prompt_tokens,
    score,
    task_cases,
    top1,
)
from kvshare_eval.report.serving import MEASURES, Cell, Measure, Slos, by_repeat, cells, read_slos
from kvshare_eval.report.serving_page import rate_text
from kvshare_eval.run_dir import Run, load_run
from kvshare_eval.stats import serving as stats
from kvshare_eval.stats.bootstrap import (
    Interval,
    Sample,
    bootstrap_ci,
    ratio_of_quantiles,
)
from kvshare_eval.stats.paired import geometric_mean_ratio, paired_difference

THRESHOLD = 0.05
#: With fewer common repeats Student's t has so few degrees of freedom that nothing can be told.
_ENOUGH_REPEATS = 3
#: What two runs should have in common, beside what they measure.
_FACTS = ("machine", "cores", "sglang", "torch")
_SETTINGS = ("model", "seed", "server", "slo")

Outcome = Literal["better", "worse", "within noise", "no interval"]


@dataclass(frozen=True)
class Change:
    """One figure in both runs.

    Attributes:
        where: task and method, or workload, rate and side.
        figure: what was measured.
        before, after: in run A and in run B, over what both have.
        change: after - before, or after / before where ``ratio`` is set.
        size: the change relative to ``before``: 0.1 is 10 % more; ``None`` where that was 0.
        outcome: by the interval alone.
        regression: worse, and by more than the threshold.
        how: how the two were paired.
    """

    where: str
    figure: str
    before: float
    after: float
    change: Interval
    ratio: bool
    size: float | None
    outcome: Outcome
    regression: bool
    how: str


@dataclass(frozen=True)
class Comparison:
    """Everything that two runs have in common."""

    before: str
    after: str
    threshold: float
    warnings: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def has_regression(self) -> bool:
        return any(change.regression for change in self.changes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "has_regression": self.has_regression}


def compare(a: Path, b: Path, threshold: float = THRESHOLD) -> Comparison:
    """Hold run ``b`` against run ``a``.

    Args:
        a: the run before.
        b: the run after.
        threshold: relative size from which a change for the worse is a regression.

    Raises:
        EvalError: a run that cannot be read, runs of different kinds or without anything in
            common, or a negative threshold.
    """
    if not threshold >= 0:
        raise EvalError(f"threshold={threshold}: must be 0 or more")
    before, after = load_run(a), load_run(b)
    if before.kind != after.kind:
        raise EvalError(
            f"{before.name} is a {before.kind} run and {after.name} a {after.kind} run: nothing to "
            "compare"
        )
    of_kind = _quality if before.kind == "quality" else _serving
    changes = tuple(of_kind(before, after, threshold))
    if not changes:
        what = "task, method and case" if before.kind == "quality" else "workload, rate and side"
        raise EvalError(f"{before.name} and {after.name} have no {what} in common")
    return Comparison(before.name, after.name, threshold, _warnings(before, after), changes)


def _warnings(before: Run, after: Run) -> tuple[str, ...]:
    found = [(key, before.facts.get(key), after.facts.get(key)) for key in _FACTS]
    found += [(key, before.settings.get(key), after.settings.get(key)) for key in _SETTINGS]
    return tuple(f"{key} differs: {old!r} and {new!r}" for key, old, new in found if old != new)


# --- quality --------------------------------------------------------------------------------------


def _quality(before: Run, after: Run, threshold: float) -> Iterator[Change]:
    old_tasks = {task.task: task for task in task_cases(before)}
    for new in task_cases(after):
        old = old_tasks.get(new.task)
        for method in new.by_method if old else ():
            assert old is not None
            where = f"{new.task}, {method}"
            for name, figure, lower, is_ratio in _FIGURES:
                if method == FULL and figure is kl:
                    continue
                rows, groups = _both(old, new, method, figure)
                if not len(rows):
                    continue
                change: Interval
                if is_ratio:
                    change = geometric_mean_ratio(rows[:, 1], rows[:, 0], groups)
                    values = tuple(float(np.median(rows[:, column])) for column in (0, 1))
                else:
                    change = paired_difference(rows[:, 1], rows[:, 0], groups)
                    values = tuple(float(rows[:, column].mean()) for column in (0, 1))
                label = new.metric if figure is score else name
                how = f"{len(rows)} cases in {change.groups} groups, paired"
                yield _change(where, label, values, change, is_ratio, lower, threshold, how)


def _computed_share(record: QualityRecord) -> float | None:
    computed = computed_tokens(record)
    return None if computed is None else computed / prompt_tokens(record)


#: Name, figure, whether lower is better, whether a ratio is taken (and medians are shown).
_FIGURES: tuple[tuple[str, Figure, bool, bool], ...] = (
    ("score", score, False, False),
    ("KL", kl, True, True),
    ("top-1 agreement", top1, False, False),
    ("computed share", _computed_share, True, False),
)


def _both(old: TaskCases, new: TaskCases, method: str, figure: Figure) -> tuple[Any, list[str]]:
    """Cases that both runs have, by key; the method is the same, so two names tell them apart."""
    joined = TaskCases(
        new.task,
        {"old": old.by_method.get(method, {}), "new": new.by_method[method]},
    )
    return joined.paired([("old", figure), ("new", figure)])


# --- serving --------------------------------------------------------------------------------------


def _serving(before: Run, after: Run, threshold: float) -> Iterator[Change]:
    old_cells = {(c.workload, c.rate, c.side): c for c in cells(before)}
    # One bar for both: the first run's, should they differ.
    theirs, ours = read_slos(before), read_slos(after)
    slos = Slos(theirs.every or ours.every, {**ours.by_workload, **theirs.by_workload})
    for new in cells(after):
        old = old_cells.get((new.workload, new.rate, new.side))
        if old is None:
            continue
        where = f"{new.workload}, {rate_text(new.rate)}, {new.side}"
        for measure in MEASURES:
            slo = slos.of(new.workload)
            values = (measure.of(old.load, slo), measure.of(new.load, slo))
            found = _paired_or_not(old, new, measure, slos)
            if found is None or values[0] is None or values[1] is None:
                continue
            change, how = found
            known = (values[0], values[1])
            lower = measure.lower_is_better
            yield _change(where, measure.name, known, change, True, lower, threshold, how)


def _paired_or_not(
    old: Cell, new: Cell, measure: Measure, slos: Slos
) -> tuple[Interval, str] | None:
    """By repeat where there are enough of them in common, else by resampling each run."""
    paired = by_repeat(new, old, measure, slos)
    if paired is not None and paired.cases >= _ENOUGH_REPEATS:
        return paired, f"{paired.cases} repeats, paired"
    unpaired = _unpaired(old, new, measure)
    if unpaired is not None:
        return unpaired, f"{unpaired.groups} blocks of requests, not paired"
    return None if paired is None else (paired, f"{paired.cases} repeats, paired")


def _unpaired(old: Cell, new: Cell, measure: Measure) -> Interval | None:
    """Ratio of two independent samples: blocks of requests are drawn within each run.

    What the machine did differently during the two runs is not in this interval.
    """
    if measure.times is None:
        return None
    sides = [measure.times(cell.load) for cell in (old, new)]
    if not all(stats.tells_percentile(len(values), measure.q) for values, _ in sides):
        return None
    rows = [[value, side] for side, (values, _) in enumerate(sides) for value in values]
    groups = [(side, block) for side, (_, blocks) in enumerate(sides) for block in blocks]
    return bootstrap_ci(
        Sample.of(rows, groups, [side for side, _ in groups]), ratio_of_quantiles(measure.q)
    )


# --- verdicts -------------------------------------------------------------------------------------


def _change(
    where: str,
    figure: str,
    values: Sequence[float],
    change: Interval,
    is_ratio: bool,
    lower_is_better: bool,
    threshold: float,
    how: str,
) -> Change:
    neutral = 1.0 if is_ratio else 0.0
    verdict = judge(change, neutral, lower_is_better=lower_is_better)
    outcome: Outcome = _OUTCOMES[verdict]
    size: float | None = change.value - 1 if is_ratio else None
    if not is_ratio and values[0]:
        size = change.value / values[0]
    # Worse than 0 has no relative size: any such change is past every threshold.
    large = size is None or abs(size) > threshold
    return Change(
        where=where,
        figure=figure,
        before=values[0],
        after=values[1],
        change=change,
        ratio=is_ratio,
        size=size,
        outcome=outcome,
        regression=outcome == "worse" and large,
        how=how,
    )


_OUTCOMES: dict[str, Outcome] = {
    "loses": "worse",
    "gains": "better",
    "noise": "within noise",
    "undecided": "no interval",
}
