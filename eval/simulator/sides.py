"""The objects that decide on a side: KVShare's own, built as a server builds them, or stock's."""

from __future__ import annotations

import math
from dataclasses import replace

from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.settings import Flags, Side
from sglang_kvshare.scheduling.holding import Holder
from sglang_kvshare.scheduling.order import order_named
from sglang_kvshare.scheduling.parts import ScheduleSettings, SchedulingParts, build_parts

#: Sizes at which a server measures its copies when it starts.
_COPY_TOKENS = (16, 256, 4096)


def parts_of(side: Side, flags: Flags, costs: Costs, requests: Requests) -> SchedulingParts:
    """One of each part; the order is never ``None`` here, but may be stock's."""
    host = side.host_pool_tokens
    settings = ScheduleSettings.of(
        side,
        schedule=side.order if side.own_order else "stock",
        preempt=side.preempt,
        host_pool_tokens=flags.pool_tokens if host < 0 else host,
        ttft_slo_ms=math.inf if requests.ttft_slo_ms is None else requests.ttft_slo_ms,
        tbt_slo_ms=math.inf if requests.tbt_slo_ms is None else requests.tbt_slo_ms,
    )
    parts = build_parts(
        settings, pool_tokens=flags.pool_tokens, bytes_per_token=costs.kv_bytes_per_token
    )
    if parts.order is None:
        parts = replace(parts, order=order_named(side.order))
    if side.hold_ms > 0 and parts.holder is None:
        # A server holds only with an order of its own; here each part can be tried alone.
        parts = replace(parts, holder=Holder(side.hold_ms, side.most_bypasses))
    if parts.preemption_cost is not None:
        for tokens in _COPY_TOKENS:
            size = tokens * costs.kv_bytes_per_token
            parts.preemption_cost.observe_out(size, costs.out_ms(tokens))
            parts.preemption_cost.observe_in(size, costs.in_ms(tokens))
    return parts
