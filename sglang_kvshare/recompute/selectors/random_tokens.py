"""A control: what chance recomputes."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import FloatArray, Signals, register_selector


@register_selector("random", source="a control: chance")
def random(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Any tokens; the same for the same plan."""
    shape = (plan.prompt_tokens, plan.prefix_tokens, plan.matched_tokens)
    # Never 0, which would mean that the token does not count.
    return 1.0 - np.random.default_rng(shape).random(plan.matched_tokens)
