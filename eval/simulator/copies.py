"""The link between the KV pool and the host's memory: a queue each way.

Copies of one direction run one after the other; the two directions do not disturb each other.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvshare_eval.simulator.costs import PS_PER_MS, Costs


class Link:
    """When copies are done, in picoseconds."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._out_free_ps = 0
        self._in_free_ps = 0
        self._ends: list[tuple[int, int, int]] = []
        #: On their way to the host.
        self.tokens_out = 0

    def copy_out(self, tokens: int, slot: int, now_ps: int) -> int:
        """Queue a copy to the host; ``slot`` names it when it is done. Its end."""
        took = round(self._costs.out_ms(tokens) * PS_PER_MS)
        self._out_free_ps = max(self._out_free_ps, now_ps) + took
        heappush(self._ends, (self._out_free_ps, slot, tokens))
        self.tokens_out += tokens
        return self._out_free_ps

    def copy_in(self, tokens: int, now_ps: int) -> int:
        """Queue a copy from the host. Its end."""
        took = round(self._costs.in_ms(tokens) * PS_PER_MS)
        self._in_free_ps = max(self._in_free_ps, now_ps) + took
        return self._in_free_ps

    @property
    def next_end_ps(self) -> int | None:
        """Of the copies to the host."""
        return self._ends[0][0] if self._ends else None

    def done(self, now_ps: int) -> list[tuple[int, int]]:
        """Name and tokens of each copy to the host that has ended, once."""
        ended = []
        while self._ends and self._ends[0][0] <= now_ps:
            _, slot, tokens = heappop(self._ends)
            self.tokens_out -= tokens
            ended.append((slot, tokens))
        return ended

    def waiting_bytes(self, now_ps: int) -> int:
        """Still to be copied out."""
        ms = max(0, self._out_free_ps - now_ps) / PS_PER_MS
        return round(ms * self._costs.out_bytes_per_ms)
