"""Figures of a method next to another one, from the same cases.

Every function takes one value a case and method, and the group of each case; see
:mod:`kvshare_eval.stats.bootstrap` for the intervals.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvshare_eval.stats.bootstrap import (
    Array,
    Interval,
    Sample,
    bootstrap_ci,
    gap_recovered,
    geometric_mean,
    mean,
    ratio_of_means,
)

#: Divergences are raised to this many nats before a ratio is taken. A method that happens to be
#: exact on one case would otherwise take a geometric mean to 0, whatever it does on all others,
#: and a ratio of two roundings would count like any other. It is about a hundredth of what reuse
#: without repair costs a typical question.
KL_FLOOR = 1e-4

Values = Sequence[float] | Array
Groups = Sequence[Hashable]


def paired_difference(new: Values, base: Values, groups: Groups) -> Interval:
    """Mean of ``new - base``."""
    return bootstrap_ci(Sample.of(np.subtract(new, base), groups), mean)


def geometric_mean_ratio(
    new: Values, base: Values, groups: Groups, *, floor: float = KL_FLOOR
) -> Interval:
    """Geometric mean of ``new / base``, both raised to ``floor``.

    A mean of divergences is carried by a few prompts; here every case has its say.
    """
    ratios = np.maximum(new, floor) / np.maximum(base, floor)
    return bootstrap_ci(Sample.of(ratios, groups), geometric_mean)


def fraction(new: Values, full: Values, groups: Groups) -> Interval | None:
    """Mean of ``new`` as a fraction of the mean of ``full``; ``None`` where that is 0."""
    if not np.any(full):
        return None
    return bootstrap_ci(Sample.of(np.column_stack([new, full]), groups), ratio_of_means)


def performance_gap_recovered(
    new: Values, full: Values, no_context: Values, groups: Groups
) -> Interval | None:
    """PGR = (score - no context) / (full - no context), a ratio of means over the same cases.

    ``None`` where the context is not seen to help: a ratio over a gap whose interval holds 0, or
    that has none, says nothing.
    """
    gap = paired_difference(full, no_context, groups)
    if not gap.above(0):
        return None
    sample = Sample.of(np.column_stack([new, full, no_context]), groups)
    return bootstrap_ci(sample, gap_recovered)


@dataclass(frozen=True)
class Wins:
    """On how many cases the first is better, equal, worse.

    ``p``: of the sign test, two-sided, over groups: a group counts for whom it has more wins. 1
    where no group differs.
    """

    wins: int
    ties: int
    losses: int
    p: float


def paired_wins(
    new: Values, base: Values, groups: Groups, *, lower_is_better: bool, tie: float = 1e-9
) -> Wins:
    """Count wins; values that differ by no more than ``tie`` are equal."""
    from scipy.stats import binomtest

    gain = np.subtract(new, base) * (-1 if lower_is_better else 1)
    signs = np.where(np.abs(gain) <= tie, 0, np.sign(gain)).astype(int)
    by_group: dict[Hashable, int] = {}
    for name, sign in zip(groups, signs.tolist(), strict=True):
        by_group[name] = by_group.get(name, 0) + sign
    ahead = sum(total > 0 for total in by_group.values())
    behind = sum(total < 0 for total in by_group.values())
    p = float(binomtest(ahead, ahead + behind).pvalue) if ahead + behind else 1.0
    return Wins(int((signs > 0).sum()), int((signs == 0).sum()), int((signs < 0).sum()), p)
