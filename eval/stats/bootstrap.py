"""Intervals by resampling groups.

Cases of one group share passages and donors, so they are no independent evidence: whole groups are
drawn, with replacement, and a case counts as often as its group was drawn. A statistic is written
once, for weighted cases, and is evaluated for all resamples at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
#: ``(values: cases x columns, weights: resamples x cases) -> one figure for each resample``.
Statistic = Callable[[Array, Array], Array]

LEVEL = 0.95
RESAMPLES = 2000
#: With fewer groups there is no interval. A resample never leaves the range of the groups, and five
#: groups lie on the same side of the truth by chance in one sample of 16: no bootstrap over them
#: reaches 95 %.
MIN_GROUPS = 6
#: Numbers held at a time: 16 MB for each array of that size.
_CHUNK = 2_000_000
#: Resamples in which a figure is not defined (0 / 0) are left out, up to this share of them.
_UNDEFINED_SHARE = 0.05


@dataclass(frozen=True)
class Interval:
    """A figure with its interval.

    Attributes:
        value: the figure of the sample itself.
        low, high: bounds; ``None`` where the sample allows none, as with fewer than ``MIN_GROUPS``.
        cases, groups: the size of the sample.
    """

    value: float
    low: float | None
    high: float | None
    cases: int
    groups: int

    def above(self, bound: float) -> bool:
        """Whether the whole interval is."""
        return self.low is not None and self.low > bound

    def below(self, bound: float) -> bool:
        return self.high is not None and self.high < bound


@dataclass(frozen=True)
class Sample:
    """Cases with the groups that they belong to.

    Attributes:
        values: cases x columns; a statistic of two columns is one of pairs.
        group: number of each case's group, from 0.
        stratum: number of each group's stratum; groups are drawn within their stratum.
    """

    values: Array
    group: npt.NDArray[np.intp]
    stratum: npt.NDArray[np.intp]

    @classmethod
    def of(
        cls,
        values: Sequence[float] | Sequence[Sequence[float]] | Array,
        groups: Sequence[Hashable],
        strata: Sequence[Hashable] | None = None,
    ) -> Self:
        """A sample from one row, group and stratum a case.

        Raises:
            ValueError: nothing in it, lengths that differ, values that are not finite, or a group
                that lies in two strata.
        """
        rows = np.asarray(values, dtype=np.float64)
        rows = rows[:, None] if rows.ndim == 1 else rows
        strata = [0] * len(groups) if strata is None else strata
        if not len(rows) or not len(rows) == len(groups) == len(strata):
            raise ValueError(f"{len(rows)} values, {len(groups)} groups, {len(strata)} strata")
        if not np.isfinite(rows).all():
            raise ValueError("values must be finite")
        numbers = {name: index for index, name in enumerate(dict.fromkeys(groups))}
        layers = {name: index for index, name in enumerate(dict.fromkeys(strata))}
        group = np.array([numbers[name] for name in groups], dtype=np.intp)
        layer = np.array([layers[name] for name in strata], dtype=np.intp)
        stratum = np.zeros(len(numbers), dtype=np.intp)
        stratum[group] = layer
        if (stratum[group] != layer).any():
            raise ValueError("a group lies in two strata")
        return cls(rows, group, stratum)

    @property
    def cases(self) -> int:
        return len(self.values)

    @property
    def groups(self) -> int:
        return len(self.stratum)


def bootstrap_ci(
    sample: Sample,
    statistic: Statistic,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """A percentile interval over groups, widened for small numbers of them.

    The plain percentile interval is too narrow when groups are few: it has no Student's t and
    leaves out the factor ``n / (n - 1)``. Its level is therefore raised such that for a mean both
    are made up for ("expanded percentile", Hesterberg 2015). On simulated clustered scores and
    differences this covered nearer to the nominal 95 % than the plain and the BCa interval: 93 to
    97 % from 30 groups on for all but strongly skewed values; with 8 groups 82 to 93 %.
    """
    value = float(statistic(sample.values, np.ones((1, sample.cases)))[0])
    free = sample.groups - len(np.unique(sample.stratum))
    if free + 1 < MIN_GROUPS or not math.isfinite(value):
        return Interval(value, None, None, sample.cases, sample.groups)
    random = np.random.default_rng(seed)
    step = max(1, _CHUNK // max(sample.cases, sample.groups))
    parts = [
        statistic(sample.values, _draw(sample, min(step, resamples - done), random))
        for done in range(0, resamples, step)
    ]
    figures = np.concatenate(parts)
    figures = figures[np.isfinite(figures)]
    if len(figures) < (1 - _UNDEFINED_SHARE) * resamples:
        return Interval(value, None, None, sample.cases, sample.groups)
    tail = _expanded_tail(level, free)
    low, high = np.quantile(figures, [tail, 1 - tail])
    return Interval(value, float(low), float(high), sample.cases, sample.groups)


def _draw(sample: Sample, count: int, random: np.random.Generator) -> Array:
    """How often each case counts in each of ``count`` resamples."""
    times = np.empty((count, sample.groups))
    for stratum in np.unique(sample.stratum):
        members = np.flatnonzero(sample.stratum == stratum)
        chances = np.full(len(members), 1 / len(members))
        times[:, members] = random.multinomial(len(members), chances, size=count)
    drawn: Array = times[:, sample.group]
    return drawn


def _expanded_tail(level: float, free: int) -> float:
    from scipy import special

    t = special.stdtrit(free, (1 + level) / 2)
    return float(special.ndtr(-math.sqrt((free + 1) / free) * t))


# --- statistics -----------------------------------------------------------------------------------


def mean(values: Array, weights: Array) -> Array:
    """Of the first column."""
    return np.asarray(weights @ values[:, 0] / weights.sum(axis=1))


def geometric_mean(values: Array, weights: Array) -> Array:
    return np.exp(mean(np.log(values[:, :1]), weights))


def ratio_of_means(values: Array, weights: Array) -> Array:
    """First column over second."""
    sums = weights @ values
    return _divide(sums[:, 0], sums[:, 1])


def gap_recovered(values: Array, weights: Array) -> Array:
    """PGR: (score - floor) / (full - floor), each a mean; columns score, full, floor."""
    sums = weights @ values
    return _divide(sums[:, 0] - sums[:, 2], sums[:, 1] - sums[:, 2])


def quantile(q: float) -> Statistic:
    """Of the first column, with linear interpolation, as numpy has it."""

    def statistic(values: Array, weights: Array) -> Array:
        order = np.argsort(values[:, 0], kind="stable")
        ranked = values[order, 0]
        upto = np.cumsum(weights[:, order], axis=1)
        place = (upto[:, -1] - 1) * q
        below = np.floor(place)
        lower = ranked[(upto > below[:, None]).argmax(axis=1)]
        upper = ranked[(upto > np.minimum(below + 1, upto[:, -1] - 1)[:, None]).argmax(axis=1)]
        return np.asarray(lower + (upper - lower) * (place - below))

    return statistic


def ratio_of_quantiles(q: float) -> Statistic:
    """Of two separate sets of cases: the second column is 1 for those of the numerator, else 0."""
    one = quantile(q)

    def statistic(values: Array, weights: Array) -> Array:
        top = values[:, 1] == 1
        return _divide(
            one(values[top], weights[:, top]),
            one(values[~top], weights[:, ~top]),
        )

    return statistic


def mean_over(column: int, statistic: Statistic) -> Statistic:
    """The mean of a statistic over the parts that a column numbers: every part counts the same."""

    def over(values: Array, weights: Array) -> Array:
        parts = [values[:, column] == part for part in np.unique(values[:, column])]
        return np.asarray(
            np.mean([statistic(values[part], weights[:, part]) for part in parts], axis=0)
        )

    return over


def _divide(top: Array, bottom: Array) -> Array:
    out = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=out, where=bottom != 0)
    return out
