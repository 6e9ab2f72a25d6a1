"""First-order change of the attention output."""

from __future__ import annotations

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import (
    FloatArray,
    Need,
    Signals,
    register_selector,
)


@register_selector(
    "influence",
    source="the gradient variant in the code of KVShare's authors (arXiv 2503.16525)",
    needs={Need.INFLUENCE},
)
def influence(plan: ReusePlan, signals: Signals) -> FloatArray:
    """How far the attention output of the rows that are not reused moves, to first order, by what
    the token's key and its value are off at the check layer."""
    assert signals.influence is not None
    return signals.influence
