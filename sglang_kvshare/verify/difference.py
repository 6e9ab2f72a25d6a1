"""By how much one greedy answer differs from another."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvshare.verify.client import Answer


@dataclass(frozen=True)
class Difference:
    """How one greedy answer differs from that with reuse off.

    Attributes:
        first_divergence: index of the first output token that differs; ``None``: none does.
        tie: the two tokens there are as probable as each other, in both answers, within the
            tolerance; either is then a right greedy choice.
        top1_agreement: share of positions with the same token.
        max_logprob: largest difference of a log-probability that both answers tell, up to the
            first divergence: behind it they answer different contexts. ``None``: they tell none
            in common, and are as different as can be.
    """

    first_divergence: int | None
    tie: bool
    top1_agreement: float
    max_logprob: float | None

    def within(self, tolerance: float) -> bool:
        same_text = self.first_divergence is None or self.tie
        return same_text and self.max_logprob is not None and self.max_logprob <= tolerance


def compare(full: Answer, other: Answer, tolerance: float) -> Difference:
    """Compare ``other`` with ``full`` (reuse off)."""
    length = max(len(full.ids), len(other.ids))
    same = [a == b for a, b in zip(full.ids, other.ids, strict=False)]
    first = same.index(False) if False in same else None
    if first is None and len(full.ids) != len(other.ids):
        first = len(same)
    compared = len(same) if first is None else min(first + 1, len(same))
    gaps = [
        abs(full.top[step][token] - other.top[step][token])
        for step in range(compared)
        for token in full.top[step].keys() & other.top[step].keys()
    ]
    return Difference(
        first_divergence=first,
        tie=first is not None and first < len(same) and _is_tie(full, other, first, tolerance),
        top1_agreement=sum(same) / length if length else 0.0,
        max_logprob=max(gaps, default=None),
    )


def _is_tie(full: Answer, other: Answer, step: int, tolerance: float) -> bool:
    tokens = (full.ids[step], other.ids[step])
    for top in (full.top[step], other.top[step]):
        if not all(token in top for token in tokens):
            return False
        if abs(top[tokens[0]] - top[tokens[1]]) > tolerance:
            return False
    return True


def describe(difference: Difference) -> str:
    if difference.first_divergence is None:
        text = "the same text"
    else:
        tie = ", where both are as probable" if difference.tie else ""
        text = f"the text differs from token {difference.first_divergence + 1} on{tie}"
    gap = "nothing in common" if (worst := difference.max_logprob) is None else f"{worst:.2g}"
    return (
        f"{text}, {difference.top1_agreement:.0%} of the tokens agree, "
        f"largest log-probability difference: {gap}"
    )
