"""What the question takes up."""

from __future__ import annotations

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import (
    FloatArray,
    Need,
    Signals,
    register_selector,
)


@register_selector(
    "contribution",
    source="query, with sinks left out: what is attended to for its small value is not taken up",
    needs={Need.PROBE_ATTENTION},
)
def contribution(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Attention from the prompt's last rows times the size of the value, layer by layer."""
    assert signals.contribution is not None
    return signals.contribution
