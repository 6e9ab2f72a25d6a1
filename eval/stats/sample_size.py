"""How many cases a claim needs, and what a number of cases can show; printed before a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvshare_eval.stats.bootstrap import LEVEL, MIN_GROUPS

POWER = 0.8
#: Share of cases whose score changes with the method, and by how much if it does (root mean
#: square): gives the standard deviation that was measured for token F1 of a 0.5B model, 0.35.
CHANGED_SHARE = 0.15
CHANGE_SIZE = 0.9
#: Standard deviation of the log ratio of two methods' divergences over questions, as measured with
#: two small models (papers report none).
LOG_RATIO_SD = 1.15
#: How alike cases of one group are (intraclass correlation), until a run tells.
ICC = 0.1


@dataclass(frozen=True)
class Spread:
    """What is assumed of paired differences.

    Attributes:
        sd: standard deviation over cases.
        cases_per_group: cases that share donors.
        icc: intraclass correlation of cases in one group.
    """

    sd: float
    cases_per_group: float = 1.0
    icc: float = ICC

    @property
    def design_effect(self) -> float:
        """A case in a group is worth ``1 / design effect`` of an independent one (Kish)."""
        return 1 + (self.cases_per_group - 1) * self.icc


def score_sd(changed_share: float = CHANGED_SHARE, change_size: float = CHANGE_SIZE) -> float:
    """Standard deviation of paired score differences, if this share of answers changes."""
    return change_size * math.sqrt(changed_share)


def required_cases(
    margin: float, spread: Spread, *, level: float = LEVEL, power: float = POWER
) -> int:
    """Cases with which the interval of a paired mean difference excludes ``margin``.

    This often (``power``) when the true difference is 0: then "costs less than ``margin``" is
    shown. The same number tells a true difference of ``margin`` from 0. For a ratio, ``margin`` is
    its logarithm and the spread one of log ratios.

    Raises:
        ValueError: ``margin`` or the spread is not above 0.
    """
    if margin <= 0 or spread.sd <= 0:
        raise ValueError(f"margin and sd must be above 0, got {margin} and {spread.sd}")
    z = _z((1 + level) / 2)
    normal = ((z + _z(power)) * spread.sd / margin) ** 2
    # z * z / 2 groups more make up for Student's t (Guenther 1981).
    groups = normal * spread.design_effect / spread.cases_per_group + z * z / 2
    return math.ceil(max(groups, MIN_GROUPS) * spread.cases_per_group)


def half_width(cases: int, spread: Spread, *, level: float = LEVEL) -> float:
    """Half of the interval that this many cases give; infinite with fewer than ``MIN_GROUPS``."""
    from scipy import special

    groups = cases / spread.cases_per_group
    if groups < MIN_GROUPS:
        return math.inf
    t = float(special.stdtrit(groups - 1, (1 + level) / 2))
    return t * spread.sd * math.sqrt(spread.design_effect / cases)


def plan_lines(cases: int, groups: int, *, gold: bool) -> list[str]:
    """What ``cases`` in ``groups`` can show, in sentences for a terminal."""
    if groups < MIN_GROUPS:
        return [f"{cases} cases in {groups} groups: no intervals, they take {MIN_GROUPS} groups"]
    share = cases / groups
    ratio = Spread(LOG_RATIO_SD, share)
    score = Spread(score_sd(), share)
    effect = f"a design effect of {ratio.design_effect:.2f} (icc {ICC} assumed)"
    lines = [f"{cases} cases in {groups} groups of {share:.1f}: {effect}"]
    if gold:
        width = half_width(cases, score)
        need = {margin: required_cases(margin, score) for margin in (0.1, 0.05)}
        lines.append(
            f"score against full recompute: 95 % interval ± {width:.3f} (sd {score.sd:.2f} of "
            f"paired differences assumed); to show a loss below 0.10 takes {need[0.1]:,} cases, "
            f"below 0.05 {need[0.05]:,} (80 % power)"
        )
    factor = math.exp(half_width(cases, ratio))
    need_kl = {kept: required_cases(-math.log(kept), ratio) for kept in (0.5, 0.8)}
    lines.append(
        f"geometric mean of KL ratios: 95 % interval × or ÷ {factor:.2f} (sd {ratio.sd:.2f} of "
        f"log ratios assumed); to tell a ratio of 0.5 from 1 takes {need_kl[0.5]:,} cases, of 0.8 "
        f"{need_kl[0.8]:,} (80 % power)"
    )
    return lines


def _z(probability: float) -> float:
    from scipy import special

    return float(special.ndtri(probability))
