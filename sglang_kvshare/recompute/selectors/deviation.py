"""How far values are off at the check layer."""

from __future__ import annotations

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import (
    FloatArray,
    Need,
    Signals,
    register_selector,
)


@register_selector(
    "deviation", source="CacheBlend (arXiv 2405.16444), its own code", needs={Need.DEVIATION}
)
def deviation(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Squared L2 distance between the donor's value and the fresh one."""
    assert signals.value_l2 is not None
    return signals.value_l2
