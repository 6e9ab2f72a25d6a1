"""From scores to the tokens that are recomputed: the same rules for every selector.

    matched tokens of a span   |## seam ##|.....#...#.......#..|## tail ##|
                                forced      best scores          forced

A span that continues the one before it behind a short edit has what is left of that one's seam: its
first tokens saw nearly the same context in the donor (docs/decisions/0013).

Ratio 0 recomputes none of the reused tokens, not even the seams; ratio 1 all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.plan import BoolArray, ReusePlan
from sglang_kvshare.recompute.selectors.registry import FloatArray, Selector


@dataclass(frozen=True)
class SelectionSettings:
    """How much is recomputed.

    Attributes:
        recompute_ratio: share of the matched tokens, in [0, 1]; seams and tail count.
        seam_tokens: first tokens of a span, and of those that continue it, that are recomputed in
            any case.
        tail_tokens: last tokens of the prompt, up to the first whose logits are asked for, that
            are recomputed in any case.
        recompute_error: below 1 it takes the place of the ratio: as few tokens are recomputed as
            leave at most this share of the score's total mass.
    """

    recompute_ratio: float
    seam_tokens: int
    tail_tokens: int
    recompute_error: float = 1.0

    @property
    def recomputes(self) -> bool:
        """Whether anything may be recomputed, seams included."""
        return self.recompute_ratio > 0 or self.recompute_error < 1

    @property
    def spares(self) -> bool:
        """Whether anything may be spared."""
        return self.recompute_ratio < 1 or self.recompute_error < 1


def forced_tokens(plan: ReusePlan, settings: SelectionSettings) -> BoolArray:
    """bool ``[plan.matched_tokens]``: seams and tail."""
    marked = np.zeros(plan.matched_tokens, dtype=np.bool_)
    if not settings.recomputes:
        return marked
    tail_start = plan.scored_from + 1 - settings.tail_tokens
    begin = 0
    for span, seam in zip(plan.spans, seams_of(plan, settings), strict=True):
        end = begin + span.length
        marked[begin : begin + seam] = True
        in_tail = max(0, span.end - max(tail_start, span.start))
        marked[end - in_tail : end] = True
        begin = end
    return marked


def seams_of(plan: ReusePlan, settings: SelectionSettings) -> list[int]:
    """Tokens of each span's seam."""
    told, first = [], 0
    for span in plan.spans:
        first = first if span.continues else span.start
        left = settings.seam_tokens - (span.start - first)
        told.append(min(max(0, left), span.length))
    return told


def choose(
    selector: Selector, plan: ReusePlan, scores: FloatArray, settings: SelectionSettings
) -> BoolArray:
    """bool ``[plan.matched_tokens]``: the tokens to recompute.

    Args:
        scores: what ``selector`` says of the matched tokens; not a number counts as 0.
    """
    if scores.shape != (plan.matched_tokens,):
        raise ValueError(f"scores have shape {scores.shape}, expected ({plan.matched_tokens},)")
    ratio = settings.recompute_ratio if selector.fixed_ratio is None else selector.fixed_ratio
    whole = np.ones(plan.matched_tokens, dtype=np.bool_)
    if selector.fixed_ratio is not None or settings.recompute_error >= 1:
        if ratio <= 0:
            return ~whole
        if ratio >= 1:
            return whole
    scores = np.nan_to_num(np.maximum(scores, 0.0), nan=0.0)
    forced = forced_tokens(plan, settings)
    if settings.recompute_error < 1:
        return forced | _within_error(scores, forced, settings.recompute_error)
    if not selector.per_span:
        return forced | _best(scores, forced, _share(ratio, len(scores)))
    parts, begin = [np.zeros(0, dtype=np.bool_)], 0
    for span, seam_tokens in zip(plan.spans, seams_of(plan, settings), strict=True):
        part = slice(begin, begin + span.length)
        # A span's tail does not use up its share.
        seam = np.arange(span.length) < seam_tokens
        parts.append(_best(scores[part], seam, _share(ratio, span.length)))
        begin += span.length
    marked: BoolArray = forced | np.concatenate(parts)
    return marked


def _share(ratio: float, tokens: int) -> int:
    return math.ceil(ratio * tokens)


def _best(scores: FloatArray, forced: BoolArray, count: int) -> BoolArray:
    """``forced`` and the best others, ``count`` in all if there are so many of a score above 0;
    the earlier of two equal ones first."""
    marked = forced.copy()
    left = count - int(forced.sum())
    if left > 0:
        open_ = np.flatnonzero(~forced & (scores > 0))
        if left >= len(open_):
            marked[open_] = True
            return marked
        # The score of the last one that is taken: linear, where sorting is not.
        values = scores[open_]
        last = np.partition(values, -left)[-left]
        marked[open_[values > last]] = True
        equal = open_[values == last]
        marked[equal[: left - int((values > last).sum())]] = True
    return marked


def _within_error(scores: FloatArray, forced: BoolArray, error: float) -> BoolArray:
    """The fewest best tokens beside ``forced`` that leave at most ``error`` of the mass."""
    marked = forced.copy()
    open_ = np.flatnonzero(~forced & (scores > 0))
    order = open_[np.argsort(-scores[open_], kind="stable")]
    # What would be left over if the first k of the order were taken.
    left = np.concatenate([np.cumsum(scores[order][::-1])[::-1], [0.0]])
    count = int(np.argmax(left <= error * scores.sum()))
    marked[order[:count]] = True
    return marked
