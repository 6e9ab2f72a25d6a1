"""How far keys are off at the check layer."""

from __future__ import annotations

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import (
    FloatArray,
    Need,
    Signals,
    register_selector,
)


@register_selector(
    "key_deviation", source="CacheBlend as in LMCache's blender", needs={Need.DEVIATION}
)
def key_deviation(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Squared L2 distance between the donor's key and the fresh one, at the same position."""
    assert signals.key_l2 is not None
    return signals.key_l2
