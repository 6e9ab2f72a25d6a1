"""Which of the reused tokens are recomputed all the same: a registry of selectors.

A selector sees the plan and the ratio and marks matched tokens. Tokens that are not matched are
computed anyway and are no business of a selector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sglang_kvshare.plan import BoolArray, ReusePlan


@dataclass(frozen=True)
class SelectionSettings:
    """``recompute_ratio`` in [0, 1]; ``seam_tokens`` a span; ``tail_tokens`` before the output.

    The tail ends with the first row whose logits are asked for.
    """

    recompute_ratio: float
    seam_tokens: int
    tail_tokens: int


class Selector(Protocol):
    """Marks the matched tokens to recompute: bool ``[plan.matched_tokens]``."""

    def __call__(self, plan: ReusePlan, settings: SelectionSettings) -> BoolArray: ...


_SELECTORS: dict[str, Selector] = {}


def register_selector(name: str) -> Callable[[Selector], Selector]:
    """Add a selector under ``name``, the value that requests and the configuration use."""

    def add(selector: Selector) -> Selector:
        if name in _SELECTORS:
            raise ValueError(f"selector {name!r} is registered already")
        _SELECTORS[name] = selector
        return selector

    return add


def selector_names() -> tuple[str, ...]:
    return tuple(sorted(_SELECTORS))


def select(name: str, plan: ReusePlan, settings: SelectionSettings) -> BoolArray:
    """Run the selector ``name``; the ends of the ratio mean the same for every selector.

    Ratio 0 recomputes none of the reused tokens, ratio 1 all of them.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in _SELECTORS:
        raise ValueError(f"selector {name!r}: allowed are {', '.join(selector_names())}")
    if settings.recompute_ratio <= 0:
        return np.zeros(plan.matched_tokens, dtype=np.bool_)
    if settings.recompute_ratio >= 1:
        return np.ones(plan.matched_tokens, dtype=np.bool_)
    return _SELECTORS[name](plan, settings)


@register_selector("seams")
def seams(plan: ReusePlan, settings: SelectionSettings) -> BoolArray:
    """The first tokens of every span, and the prompt's tail (LegoLink, EPIC arXiv 2410.15332).

    A span's first tokens saw another context in the donor and are attended to most, so that
    their error costs most. Of a span of ``m`` tokens the first
    ``max(seam_tokens, ceil(ratio * m))`` are marked: the ratio widens every seam alike.

        span     |#### seam ####|........ spared ........|
    """
    marked = np.zeros(plan.matched_tokens, dtype=np.bool_)
    tail_start = plan.scored_from + 1 - settings.tail_tokens
    begin = 0
    for span in plan.spans:
        width = max(settings.seam_tokens, int(np.ceil(settings.recompute_ratio * span.length)))
        marked[begin : begin + min(width, span.length)] = True
        in_tail = max(0, span.end - max(tail_start, span.start))
        marked[begin + span.length - in_tail : begin + span.length] = True
        begin += span.length
    return marked
