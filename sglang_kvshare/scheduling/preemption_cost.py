"""Swap or recompute: what each takes on this machine, from copies and forwards that were measured.

    swap        copy out and back in, behind the copies that are queued already
    recompute   one forward of what cannot be reused when it resumes

CacheOPT takes a sequence length as the border between the two (arXiv 2503.13773). Here the two
times are predicted: the border moves with what other requests still hold of the sequence, with the
queue of copies, and with the load of the machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sglang_kvshare.scheduling.forward_cost import ForwardCost, Load, Recent

#: Milliseconds of a full forward of (rows, over a context of so many tokens with the rows).
ForwardMs = Callable[[int, int], float]


@dataclass(frozen=True)
class Way:
    """How to preempt one request.

    Attributes:
        way: ``swap`` or ``recompute``.
        ms: what it is predicted to take, resuming included; infinite where nothing is known.
        other_ms: what the other way would take.
    """

    way: Literal["swap", "recompute"]
    ms: float
    other_ms: float


class Bandwidth:
    """Bytes a millisecond in one direction: medians of the last copies, by size.

    By size, for small copies are slow: each has a latency that no bandwidth tells.
    """

    def __init__(self) -> None:
        self._classes: defaultdict[int, Recent] = defaultdict(Recent)

    def observe(self, count_bytes: int, ms: float) -> None:
        """A copy; one of nothing, or a time that is not above 0, is ignored."""
        if count_bytes > 0 and 0 < ms < math.inf:
            self._classes[count_bytes.bit_length()].add(count_bytes / ms)

    @property
    def known(self) -> bool:
        """A copy was measured. One is enough: at start-up each size is measured once."""
        return bool(self._classes)

    def ms(self, count_bytes: int) -> float:
        """Predicted time, by the nearest size that was measured; infinite where none was."""
        if count_bytes <= 0:
            return 0.0
        if not self._classes:
            return math.inf
        size = count_bytes.bit_length()
        nearest = min(self._classes, key=lambda known: (abs(known - size), known))
        return count_bytes / self._classes[nearest].median


class PreemptionCost:
    """Predicts both ways of preempting, and learns from every copy.

    Args:
        bytes_per_token: of keys and values in all layers.

    Raises:
        ValueError: below 1.
    """

    def __init__(self, bytes_per_token: int) -> None:
        if bytes_per_token < 1:
            raise ValueError(f"bytes_per_token={bytes_per_token}: the least is 1")
        self.bytes_per_token = bytes_per_token
        self.out = Bandwidth()
        self.back = Bandwidth()

    def observe_out(self, count_bytes: int, ms: float) -> None:
        """A copy from the pool to the host."""
        self.out.observe(count_bytes, ms)

    def observe_in(self, count_bytes: int, ms: float) -> None:
        """A copy from the host to the pool."""
        self.back.observe(count_bytes, ms)

    def swap_ms(self, tokens: int, prefix_tokens: int = 0, queued_bytes: int = 0) -> float:
        """Out and in again; infinite where a direction was never measured.

        Args:
            tokens: its whole context.
            prefix_tokens: of it, in the tree, where they stay and are found again.
            queued_bytes: copies out that are waiting before it.
        """
        own = max(0, tokens - prefix_tokens) * self.bytes_per_token
        waits = self.out.ms(queued_bytes)
        return waits + self.out.ms(own) + self.back.ms(own)

    def recompute_ms(
        self, tokens: int, reusable_tokens: int, cost: ForwardCost | ForwardMs
    ) -> float:
        """One forward over what will have to be computed; infinite where no forward was measured.

        Args:
            tokens: its whole context, prompt and answer so far.
            reusable_tokens: of it, expected to be found when it resumes.
        """
        rows = max(1, tokens - reusable_tokens)
        if not isinstance(cost, ForwardCost):
            return cost(rows, max(tokens, rows))
        if not cost.known:
            return math.inf
        return cost.ms(Load.of(rows, max(tokens, rows)), narrowed=False)

    def choose(
        self,
        tokens: int,
        cost: ForwardCost | ForwardMs,
        *,
        prefix_tokens: int = 0,
        reusable_tokens: int = 0,
        queued_bytes: int = 0,
    ) -> Way:
        """The faster one; to recompute, which needs nothing, where that is not known."""
        swap_ms = self.swap_ms(tokens, prefix_tokens, queued_bytes)
        recompute_ms = self.recompute_ms(tokens, reusable_tokens, cost)
        if swap_ms < recompute_ms:
            return Way("swap", swap_ms, recompute_ms)
        return Way("recompute", recompute_ms, swap_ms)
