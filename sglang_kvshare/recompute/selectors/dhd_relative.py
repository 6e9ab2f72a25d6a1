"""DHD with what the question takes up in the place of attention."""

from __future__ import annotations

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import (
    FloatArray,
    Need,
    Signals,
    register_selector,
)


@register_selector(
    "dhd_relative",
    source="DHD with the relative deviation of the check layer carried to all layers",
    needs={Need.PROBE_ATTENTION, Need.DEVIATION},
)
def dhd_relative(plan: ReusePlan, signals: Signals) -> FloatArray:
    """What the question takes up, times the share of the value that is off at the check layer."""
    assert signals.contribution is not None
    assert signals.value_l1 is not None
    assert signals.value_size is not None
    return signals.contribution * signals.value_l1 / (signals.value_size + 1e-12)
