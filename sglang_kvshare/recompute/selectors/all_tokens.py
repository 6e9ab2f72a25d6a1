"""A control: everything is recomputed."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import FloatArray, Signals, register_selector


@register_selector("all", source="a control: full recomputation", fixed_ratio=1.0)
def everything(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Every token, whatever the ratio."""
    return np.ones(plan.matched_tokens)
