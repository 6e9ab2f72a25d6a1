"""What the question looks at."""

from __future__ import annotations

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors.registry import (
    FloatArray,
    Need,
    Signals,
    register_selector,
)


@register_selector(
    "query",
    source="ProphetKV (arXiv 2602.02579), InfoFlow KV (arXiv 2603.05353)",
    needs={Need.PROBE_ATTENTION},
)
def query(plan: ReusePlan, signals: Signals) -> FloatArray:
    """Attention from the prompt's last rows to the token, at its position in the prompt, summed
    over ``probe_layers``. Nothing is computed for the other rows before tokens are chosen."""
    assert signals.attention is not None
    return signals.attention
