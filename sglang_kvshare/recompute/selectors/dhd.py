"""High deviation weighted by attention: KVShare's own selection."""

from __future__ import annotations

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import (
    FloatArray,
    Need,
    Signals,
    register_selector,
)


@register_selector(
    "dhd",
    source="Dual-Stage High Deviation, KVShare (arXiv 2503.16525)",
    needs={Need.ATTENTION, Need.DEVIATION},
)
def dhd(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Attention that the token receives from rows that are not reused, times how far its value is
    off (L1, at the check layer): what the attention output would be off by.

    The paper takes the attention at the check layer; ``attention: probe_pass`` takes that of the
    prompt's last rows over many layers.
    """
    assert signals.attention is not None
    assert signals.value_l1 is not None
    return signals.attention * signals.value_l1
