"""A control: reuse without repair."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import FloatArray, Signals, register_selector


@register_selector("none", source="a control: reuse without repair", fixed_ratio=0.0)
def nothing(plan: ReusePlan, signals: Signals) -> FloatArray:
    """No token, whatever the ratio."""
    return np.zeros(plan.matched_tokens)
