"""Which waiting requests are held back for a donor that is being computed right now.

Ten users ask about one document at once. Admitted together, each computes it; held until the first
has, nine take it from the cache. So a request waits while a prefill in flight computes a passage of
its own, if that saves more than it costs. Two bounds keep this brief whatever the predictions say:
a time, and a number of prefills that begin while it waits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from sglang_kvshare.scheduling.jobs import Waiting

#: Requests that are remembered as held.
_MOST_HELD = 4096
#: Prefills in flight, and keys of one, that are remembered.
_MOST_IN_FLIGHT = 1024
_MOST_KEYS = 256


@dataclass(frozen=True)
class _Prefill:
    keys: tuple[Hashable, ...]
    ends_ms: float | None


@dataclass(frozen=True)
class _Held:
    since_ms: float
    begun: int


class Holder:
    """Decides, for one scheduler, who waits for whom.

    Keys are opaque: equal keys mean that what one computes the other can take. Their owner makes
    them of the namespace and of the leading windows of a prompt.

    Args:
        most_hold_ms: a request is held no longer than this after it was first held; 0 for never.
        most_bypasses: nor after so many prefills began since then.
    """

    def __init__(self, most_hold_ms: float, most_bypasses: int) -> None:
        self._most_hold_ms = most_hold_ms
        self._most_bypasses = most_bypasses
        self._in_flight: OrderedDict[str, _Prefill] = OrderedDict()
        self._computing: dict[Hashable, set[str]] = {}
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._begun = 0

    def begins(self, rid: str, keys: Collection[Hashable], ends_ms: float | None = None) -> None:
        """A request was chosen, and its prefill computes what ``keys`` stand for.

        Args:
            ends_ms: when that is predicted to be done, on the clock of ``now_ms``.
        """
        self._forget(rid)
        self._held.pop(rid, None)
        self._begun += 1
        while len(self._in_flight) >= _MOST_IN_FLIGHT:
            self._forget(next(iter(self._in_flight)))
        prefill = _Prefill(tuple(keys)[:_MOST_KEYS], ends_ms)
        self._in_flight[rid] = prefill
        for key in prefill.keys:
            self._computing.setdefault(key, set()).add(rid)

    def ended(self, rid: str) -> None:
        """Its prefill is done and can be taken, or it is gone; unknown ones are ignored."""
        self._forget(rid)
        self._held.pop(rid, None)

    def held(
        self,
        waiting: Waiting,
        keys: Collection[Hashable],
        gain_ms: float,
        now_ms: float,
        ahead_ms: float | None = None,
    ) -> bool:
        """Whether it should wait.

        Args:
            keys: what it could take.
            gain_ms: predicted saving of its prefill if it could.
            ahead_ms: what the prefills take that are about to begin before it and compute some of
                ``keys``; ``None`` for none.
        """
        if self._most_hold_ms <= 0 or gain_ms <= self._wait_ms(keys, now_ms, ahead_ms):
            return False
        held = self._held.get(waiting.rid)
        if held is None:
            return self._hold(waiting.rid, now_ms)
        return (
            now_ms - held.since_ms < self._most_hold_ms
            and self._begun - held.begun < self._most_bypasses
        )

    def __contains__(self, key: Hashable) -> bool:
        """Whether a prefill in flight computes it."""
        return key in self._computing

    def __len__(self) -> int:
        """Prefills in flight."""
        return len(self._in_flight)

    # --- details -----------------------------------------------------------------------------

    def _wait_ms(self, keys: Collection[Hashable], now_ms: float, ahead_ms: float | None) -> float:
        """Until the last of those that compute one of ``keys`` is done; infinite for none."""
        waits_ms = [] if ahead_ms is None else [ahead_ms]
        for key in keys:
            for rid in self._computing.get(key, ()):
                ends_ms = self._in_flight[rid].ends_ms
                waits_ms.append(0.0 if ends_ms is None else max(0.0, ends_ms - now_ms))
        return max(waits_ms, default=math.inf)

    def _hold(self, rid: str, now_ms: float) -> bool:
        """Notes when it was first held. With no room for that it is not, for want of a bound."""
        if len(self._held) >= _MOST_HELD:
            oldest, held = next(iter(self._held.items()))
            if now_ms - held.since_ms < self._most_hold_ms:
                return False
            del self._held[oldest]
        self._held[rid] = _Held(now_ms, self._begun)
        return True

    def _forget(self, rid: str) -> None:
        prefill = self._in_flight.pop(rid, None)
        if prefill is None:
            return
        for key in dict.fromkeys(prefill.keys):
            computing = self._computing[key]
            computing.discard(rid)
            if not computing:
                del self._computing[key]
