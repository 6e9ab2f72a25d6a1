"""One of each part that schedules, put together by settings; every part can be stock's.

The engine and the simulator drive the same objects. A part that is ``None`` is left to the engine:
what it does is then what SGLang does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sglang_kvshare.scheduling.holding import Holder
from sglang_kvshare.scheduling.host_pool import HostPool
from sglang_kvshare.scheduling.ledger import DemandLedger
from sglang_kvshare.scheduling.length_estimate import LengthEstimator
from sglang_kvshare.scheduling.order import Order, order_named
from sglang_kvshare.scheduling.preemption import VictimOrder, victim_order_named
from sglang_kvshare.scheduling.preemption_cost import PreemptionCost
from sglang_kvshare.scheduling.reserve import GlobalReserve
from sglang_kvshare.scheduling.slo import Slo, SloBook

#: Allowed values of the settings that are names.
SCHEDULES = ("hit-rate", "effective-cost", "fcfs", "stock")
RESERVES = ("estimate", "stock")
VICTIMS = ("slo", "stock")
PREEMPTS = ("auto", "swap", "recompute", "stock")


class Configured(Protocol):
    """What the configuration of a server and a side of the simulator say in the same words; see
    :class:`ScheduleSettings`."""

    @property
    def most_bypasses(self) -> int: ...
    @property
    def hold_ms(self) -> float: ...
    @property
    def reserve(self) -> str: ...
    @property
    def lookahead_steps(self) -> int: ...
    @property
    def length_confidence(self) -> float: ...
    @property
    def length_confidence_slope(self) -> float: ...
    @property
    def victims(self) -> str: ...
    @property
    def most_preemptions(self) -> int: ...


@dataclass(frozen=True)
class ScheduleSettings:
    """What can be set; the names are those of the configuration.

    Attributes:
        schedule: order of the waiting queue; ``stock`` leaves it to SGLang.
        most_bypasses: fewer younger requests than that go ahead of any one.
        hold_ms: longest wait for a donor that is being computed; 0 for none.
        reserve: ``estimate`` for the demand ledger, ``stock`` for SGLang's decaying guess.
        lookahead_steps: reservations are renewed so many decode steps before they end.
        confidence: share of the answers that end within their reservation, at no load.
        confidence_slope: how fast that falls with arrivals a second.
        isolated_lengths: whether a namespace's answers say anything about others'.
        victims: who is preempted.
        preempt: how; ``auto`` for the faster of ``swap`` and ``recompute``.
        most_preemptions: of a request, before it is protected.
        host_pool_tokens: that swapped requests may take in host memory.
        ttft_slo_ms: default; infinite for none.
        tbt_slo_ms: default; infinite for none.

    Raises:
        ValueError: a name that is none of the allowed ones.
    """

    schedule: str = "hit-rate"
    most_bypasses: int = 256
    hold_ms: float = 1000.0
    reserve: str = "estimate"
    lookahead_steps: int = 2
    confidence: float = 0.7
    confidence_slope: float = 0.001
    isolated_lengths: bool = True
    victims: str = "slo"
    preempt: str = "auto"
    most_preemptions: int = 3
    host_pool_tokens: int = 0
    ttft_slo_ms: float = math.inf
    tbt_slo_ms: float = math.inf

    def __post_init__(self) -> None:
        for name, allowed in (
            ("schedule", SCHEDULES),
            ("reserve", RESERVES),
            ("victims", VICTIMS),
            ("preempt", PREEMPTS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}"
                )

    @classmethod
    def of(
        cls,
        configured: Configured,
        *,
        schedule: str,
        preempt: str,
        ttft_slo_ms: float,
        tbt_slo_ms: float,
        host_pool_tokens: int = 0,
        isolated_lengths: bool = True,
    ) -> ScheduleSettings:
        """What ``configured`` says, and beside it what its owner has to say itself.

        Raises:
            ValueError: a name that is none of the allowed ones.
        """
        return cls(
            schedule=schedule,
            most_bypasses=configured.most_bypasses,
            hold_ms=configured.hold_ms,
            reserve=configured.reserve,
            lookahead_steps=configured.lookahead_steps,
            confidence=configured.length_confidence,
            confidence_slope=configured.length_confidence_slope,
            isolated_lengths=isolated_lengths,
            victims=configured.victims,
            preempt=preempt,
            most_preemptions=configured.most_preemptions,
            host_pool_tokens=host_pool_tokens,
            ttft_slo_ms=ttft_slo_ms,
            tbt_slo_ms=tbt_slo_ms,
        )


@dataclass(frozen=True)
class SchedulingParts:
    """What decides, and what it remembers; ``None`` is left to the engine.

    Attributes:
        order: of the waiting queue.
        holder: who waits for a donor.
        ledger: demand for KV slots.
        reserve: kept for what estimates miss.
        lengths: estimates of answers.
        victim_order: who is preempted.
        preemption_cost: which way; ``None`` if requests are always recomputed.
        host_pool: for those that are swapped out.
        slos: what is promised, and attained.
    """

    settings: ScheduleSettings
    slos: SloBook
    lengths: LengthEstimator
    victim_order: VictimOrder
    order: Order | None = None
    holder: Holder | None = None
    ledger: DemandLedger | None = None
    reserve: GlobalReserve | None = None
    preemption_cost: PreemptionCost | None = None
    host_pool: HostPool = field(default_factory=lambda: HostPool(0))


def build_parts(
    settings: ScheduleSettings,
    *,
    pool_tokens: int = 0,
    page_tokens: int = 1,
    bytes_per_token: int = 1,
    tenants: Mapping[str, Slo] | None = None,
    lengths: LengthEstimator | None = None,
) -> SchedulingParts:
    """
    Args:
        pool_tokens: of the KV pool, which bounds the global reserve.
        page_tokens: of its allocator.
        bytes_per_token: of keys and values in all layers.
        tenants: SLOs by tenant.
        lengths: what an earlier run has learnt.
    """
    ours = settings.schedule != "stock"
    estimates = settings.reserve == "estimate"
    swaps = settings.preempt in ("auto", "swap")
    default = Slo(_finite(settings.ttft_slo_ms), _finite(settings.tbt_slo_ms))
    return SchedulingParts(
        settings=settings,
        slos=SloBook(default, tenants),
        lengths=lengths or LengthEstimator(isolated=settings.isolated_lengths),
        victim_order=victim_order_named(settings.victims),
        order=order_named(settings.schedule, settings.most_bypasses) if ours else None,
        holder=Holder(settings.hold_ms, settings.most_bypasses) if ours else None,
        ledger=DemandLedger(page_tokens, settings.lookahead_steps) if estimates else None,
        reserve=GlobalReserve(pool_tokens) if estimates else None,
        preemption_cost=PreemptionCost(bytes_per_token) if swaps else None,
        host_pool=HostPool(settings.host_pool_tokens if swaps else 0),
    )


def _finite(slo_ms: float) -> float | None:
    return slo_ms if math.isfinite(slo_ms) else None
