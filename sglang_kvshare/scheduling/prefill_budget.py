"""How much prefill a step may carry beside requests that decode.

A prefill stops decoding for as long as it takes. So the chunk is cut to what the tightest TBT SLO
among those that decode leaves beside a decode step. A few tokens always go: a queue that stands
still helps nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_kvshare.scheduling.forward_cost import ForwardCost, Load

#: Steps come no nearer to an SLO than this share of it.
_SLO_SHARE = 0.8


def prefill_tokens(
    cost: ForwardCost | Callable[[int, int], float],
    decode_ms: float,
    tbt_slo_ms: float | None,
    limit_tokens: int,
    context_tokens: int = 0,
    floor_tokens: int = 64,
) -> int:
    """Most tokens of prefill that break no TBT SLO.

    Args:
        cost: of full forwards, as in ``preemption_cost.py``; while it knows nothing, the limit
            holds alone.
        decode_ms: of the decode step that follows.
        tbt_slo_ms: the tightest of those that decode; ``None`` for none.
        limit_tokens: of the engine (its chunk size).
        context_tokens: that stand before the chunk.
        floor_tokens: so many may go in any case; a page at least.
    """
    if tbt_slo_ms is None or (isinstance(cost, ForwardCost) and not cost.known):
        return limit_tokens
    left_ms = _SLO_SHARE * tbt_slo_ms - decode_ms
    least, most = min(floor_tokens, limit_tokens), limit_tokens
    # The largest count in [least, most] whose forward fits; time grows with the count.
    while least < most:
        middle = (least + most + 1) // 2
        if _forward_ms(cost, middle, context_tokens + middle) <= left_ms:
            least = middle
        else:
            most = middle - 1
    return least


def _forward_ms(
    cost: ForwardCost | Callable[[int, int], float], rows: int, context_tokens: int
) -> float:
    if isinstance(cost, ForwardCost):
        return cost.ms(Load.of(rows, context_tokens), narrowed=False)
    return cost(rows, context_tokens)
