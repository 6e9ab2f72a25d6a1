"""Whom to preempt when decoding runs out of KV slots (CacheOPT 4, and SGLang's rule).

``slo``: the loosest TBT SLO first; of like ones the longest remaining job, which would stand in the
way longest; of like ones the one that is cheapest to preempt and to resume (arXiv 2503.13773). Like
means within a factor of two: a finer order would let a token decide where the paper means cost.

``stock``: the fewest output tokens, then the longest prompt, as SGLang 0.5.23 retracts.

A request that was preempted ``most_preemptions`` times is protected: it goes only if there is no
other way, so that no two push each other out for ever. One request always stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop
from typing import Protocol

from sglang_kvshare.scheduling.jobs import Running

#: What is sorted by; the least goes first.
Key = Callable[[Running], tuple[float, ...]]


class VictimOrder(Protocol):
    """In which order running requests are given up."""

    @property
    def name(self) -> str: ...

    @property
    def protects(self) -> bool:
        """Whether those that were preempted often enough are spared."""
        ...

    def key(self, one: Running) -> tuple[float, ...]:
        """The least goes first. It is unique, so that every rank sorts alike."""
        ...


class SloVictims:
    """CacheOPT's order; of requests alike in everything the youngest goes first."""

    name = "slo"
    protects = True

    def key(self, one: Running) -> tuple[float, ...]:
        return (
            -math.inf if one.tbt_slo_ms is None else -_octave(one.tbt_slo_ms),
            -_octave(one.left_tokens),
            one.preempt_ms,
            -one.number,
        )


class StockVictims:
    """SGLang's order (``ScheduleBatch._get_decode_retraction_order``)."""

    name = "stock"
    protects = False

    def key(self, one: Running) -> tuple[float, ...]:
        return one.output_tokens, -one.prompt_tokens, -one.number


_ORDERS: dict[str, Callable[[], VictimOrder]] = {"slo": SloVictims, "stock": StockVictims}


def victim_orders() -> tuple[str, ...]:
    """Names that :func:`victim_order_named` knows."""
    return tuple(_ORDERS)


def victim_order_named(name: str) -> VictimOrder:
    """
    Raises:
        ValueError: no such order; it lists them.
    """
    if name not in _ORDERS:
        raise ValueError(f"no victim order is named {name!r}; there are {', '.join(_ORDERS)}")
    return _ORDERS[name]()


def victims(
    running: Sequence[Running], needed_tokens: int, order: VictimOrder, most_preemptions: int
) -> list[int]:
    """Indices of those to preempt, in order, until ``needed_tokens`` are given back.

    Lower priorities go before higher ones. All but the last may be returned and still give back
    less than is needed; the caller then has to end that one.

    Args:
        most_preemptions: of a request, before it is protected.
    """

    left = []
    for i, one in enumerate(running):
        # Of the protected, those that were preempted least.
        protected = max(0, one.preemptions - most_preemptions + 1) if order.protects else 0
        left.append((protected, one.priority, order.key(one), i))
    # A heap, for few of many are wanted.
    heapify(left)
    chosen: list[int] = []
    freed = 0
    while len(left) > 1 and freed < needed_tokens:
        i = heappop(left)[-1]
        # One that shares all it has gives nothing back.
        if running[i].private_tokens > 0:
            chosen.append(i)
            freed += running[i].private_tokens
    return chosen


def _octave(value: float) -> int:
    """Values of one octave are within a factor of two; those below 1 are alike."""
    return int(value).bit_length()
