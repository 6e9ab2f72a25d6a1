"""The first tokens of every span."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import FloatArray, Signals, register_selector


@register_selector("seams", source="LegoLink, EPIC (arXiv 2410.15332)", per_span=True)
def seams(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Earlier in its span is more.

    A span's first tokens saw another context in the donor and are attended to most, so that their
    error costs most. Of a span of ``m`` tokens the first ``max(seam_tokens, ceil(ratio * m))`` are
    recomputed: the ratio widens every seam alike.

        span     |#### seam ####|........ spared ........|
    """
    parts = [1.0 - np.arange(span.length) / span.length for span in plan.spans]
    return np.concatenate([np.empty(0), *parts])
