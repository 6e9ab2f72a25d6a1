"""Requests in host memory: who is there, how much of it, and what the way there and back takes.

context    |-- prefix, in the tree --|==== swapped: tokens ====|
           0                         begin
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvshare_eval.simulator.copies import Link
from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.settings import Side
from sglang_kvshare.scheduling.parts import SchedulingParts


@dataclass(frozen=True)
class Swapped:
    """What of a request is in host memory: ``tokens`` of its context from ``begin`` on."""

    begin: int
    tokens: int


class Swaps:
    """Who is swapped out. The link that the copies take is asked here for what they cost."""

    def __init__(self, link: Link, parts: SchedulingParts, side: Side, costs: Costs) -> None:
        self._link = link
        self._host_pool = parts.host_pool
        self._cost = parts.preemption_cost
        self._costs = costs
        self._allowed = side.preempt in ("swap", "auto")
        self._if_faster = side.preempt == "auto"
        self._swapped: dict[int, Swapped] = {}

    def of(self, i: int) -> Swapped | None:
        """``None`` for one that is not swapped out."""
        return self._swapped.get(i)

    def ways_ms(self, context: int, own: int, now_ps: int) -> tuple[float, float]:
        """Predicted time of swapping and of recomputing.

        Args:
            context: tokens of the request.
            own: of these, private ones, which preempting gives back.
        """
        costs = self._costs
        recompute = costs.prefill_ms(own + 1, (own + 1) * (context + 1))
        if self._cost is None:
            return math.inf, recompute
        way = self._cost.choose(
            context,
            lambda rows, whole: costs.prefill_ms(rows, rows * whole),
            prefix_tokens=context - own,
            reusable_tokens=context - own,
            queued_bytes=self._link.waiting_bytes(now_ps),
        )
        return (way.ms, way.other_ms) if way.way == "swap" else (way.other_ms, way.ms)

    def out(self, i: int, tokens: int, begin: int, now_ps: int) -> bool:
        """Copy its private slots out. False if it is to be recomputed; nothing is done then.

        Its slots come back when the link says that the copy is done.
        """
        if not self._allowed or tokens < 1:
            return False
        if self._if_faster:
            swap, recompute = self.ways_ms(begin + tokens, tokens, now_ps)
            if swap >= recompute:
                return False
        if not self._host_pool.reserve(str(i), tokens):
            return False
        self._swapped[i] = Swapped(begin, tokens)
        self._link.copy_out(tokens, i, now_ps)
        return True

    def back(self, i: int, now_ps: int) -> int:
        """It is admitted again: when its copy is there; 0 for one that was not swapped out."""
        swapped = self._swapped.pop(i, None)
        if swapped is None:
            return 0
        self._host_pool.release(str(i))
        return self._link.copy_in(swapped.tokens, now_ps)
