"""Which waiting requests go first: a score, and a window that no score gets around.

    number      7  8  9 10 11 12 13 14 15 16 17 ...
    waiting     x     x  x     x     x  x     x
                |<- most_bypasses = 8 ->|
                sorted by score          first come first served

Only requests whose number lies less than ``most_bypasses`` beyond the oldest waiting one's may go
ahead of older ones. So no request is overtaken by ``most_bypasses`` younger ones, whatever they
score and whenever they come: a j that overtakes i has number_j < oldest + most_bypasses, and while
i waits the oldest is no younger than i. KVShare's order, by hit rate (arXiv 2503.16525), has no
such bound, and a stream of good hits starves the rest.

Inside the window, first to last: those that resume, as they came; the others; and those whose
TTFT SLO has passed already. What a request's cached text saves must tell nothing to the users of
other namespaces (PromptPeek), so that it decides only within its own: the places of the others

    arrived     A1  B1  A2  A3  B2                 A3 scores best in A, B2 in B
    go          A3  B2  A1  A2  B1                 as the namespaces came: A B A A B

are given to namespaces by arrival, and each namespace fills its own with the best first: with those
that waited for a good part of their SLO and can still meet it; then others that can; then those
that cannot, and would only make others miss theirs. In each of the three, requests of like cost
stand beside each other, the groups in the order of their best member: a batch takes as long as its
longest, so that a cheap request gains nothing in a batch of costly ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_kvshare.scheduling.jobs import Waiting
from sglang_kvshare.scheduling.slo import feasible

#: From this share of its TTFT SLO on a request has aged.
AGED_SHARE = 0.5
#: SLO of those without one, as far as ageing goes.
PATIENCE_MS = 10_000.0
#: SGLang sorts by prefix only up to so many (`WAITING_QUEUE_PREFIX_MATCH_MAX`).
_STOCK_SORTS_UP_TO = 128

Score = Callable[[Waiting], float]


class Order(Protocol):
    """An order of the waiting queue."""

    @property
    def name(self) -> str: ...

    def order(self, waiting: Sequence[Waiting], now_ms: float) -> list[int]:
        """Indices into ``waiting``, each once; the first goes first. Changes nothing."""
        ...


class Windowed:
    """By score inside the window, first come first served beyond it; larger priorities first.

    Args:
        score: the lowest goes first.
        most_bypasses: size of the window. 1 is first come first served.
        patience_ms: SLO of those without one, as far as ageing goes.
        grouped: whether requests of like cost stand beside each other.

    Raises:
        ValueError: ``most_bypasses`` below 1.
    """

    def __init__(
        self,
        name: str,
        score: Score,
        most_bypasses: int,
        patience_ms: float = PATIENCE_MS,
        grouped: bool = True,
    ) -> None:
        if most_bypasses < 1:
            raise ValueError(f"most_bypasses={most_bypasses}: the least is 1")
        self.name = name
        self._score = score
        self._most_bypasses = most_bypasses
        self._patience_ms = patience_ms
        self._grouped = grouped

    def order(self, waiting: Sequence[Waiting], now_ms: float) -> list[int]:
        ordered: list[int] = []
        for queue in _queues(waiting):
            end = _window_end(waiting, queue, self._most_bypasses)
            ordered += self._best_first(waiting, queue[:end], now_ms)
            ordered += queue[end:]
        return ordered

    def _best_first(
        self, waiting: Sequence[Waiting], window: list[int], now_ms: float
    ) -> list[int]:
        resume: list[int] = []
        others: list[int] = []
        missed: list[int] = []
        for i in window:
            one = waiting[i]
            slo_ms = one.ttft_slo_ms
            if one.preemptions > 0:
                resume.append(i)
            elif slo_ms is not None and now_ms - one.arrived_ms > slo_ms:
                missed.append(i)
            else:
                others.append(i)
        return [
            *resume,
            *self._in_own_places(waiting, others, now_ms),
            *self._in_own_places(waiting, missed, now_ms),
        ]

    def _in_own_places(
        self, waiting: Sequence[Waiting], arrivals: list[int], now_ms: float
    ) -> list[int]:
        """The best of each namespace first, in the places in which its requests came."""
        of: defaultdict[bytes, list[int]] = defaultdict(list)
        for i in arrivals:
            of[waiting[i].namespace].append(i)
        ranked = {name: self._ranked(waiting, own, now_ms) for name, own in of.items()}
        if len(ranked) < 2:
            return [i for own in ranked.values() for i in own]
        left = {name: iter(own) for name, own in ranked.items()}
        return [next(left[waiting[i].namespace]) for i in arrivals]

    def _ranked(self, waiting: Sequence[Waiting], own: list[int], now_ms: float) -> list[int]:
        tiers: tuple[list[int], ...] = [], [], []
        for i in own:
            tiers[self._tier(waiting[i], now_ms)].append(i)
        return [i for tier in tiers for i in self._by_score(waiting, tier)]

    def _tier(self, one: Waiting, now_ms: float) -> int:
        waited_ms = now_ms - one.arrived_ms
        slo_ms = one.ttft_slo_ms
        if slo_ms is None:
            return _AGED if waited_ms > AGED_SHARE * self._patience_ms else _OTHERS
        in_time = feasible(waited_ms, one.effective_ms, slo_ms)
        if not in_time:
            return _LATE
        return _AGED if waited_ms > AGED_SHARE * slo_ms else _OTHERS

    def _by_score(self, waiting: Sequence[Waiting], indices: list[int]) -> list[int]:
        """Equal ones as they came; those of like cost follow the best of them."""
        ordered = sorted(indices, key=lambda i: self._score(waiting[i]))
        if not self._grouped:
            return ordered
        groups: dict[int, list[int]] = {}
        for i in ordered:
            groups.setdefault(cost_class(waiting[i].effective_ms), []).append(i)
        return [i for group in groups.values() for i in group]


_AGED, _OTHERS, _LATE = range(3)


class AsQueued:
    """SGLang's ``fcfs``: as they stand in its queue, in which a preempted one goes last."""

    name = "stock-fcfs"

    def order(self, waiting: Sequence[Waiting], now_ms: float) -> list[int]:
        return sorted(range(len(waiting)), key=lambda i: -waiting[i].priority)


class LongestPrefix:
    """SGLang's ``lpm``: longest prefix first, and as queued while more than 128 wait.

    Left out: of several requests that share an uncached prefix SGLang puts all but one last.
    """

    name = "lpm"

    def order(self, waiting: Sequence[Waiting], now_ms: float) -> list[int]:
        indices = list(range(len(waiting)))
        if len(waiting) <= _STOCK_SORTS_UP_TO:
            indices.sort(key=lambda i: -waiting[i].prefix_tokens)
        return indices


def in_window(waiting: Sequence[Waiting], most_bypasses: int) -> list[bool]:
    """Of each, whether it may be put ahead of older ones of its priority.

    Whoever admits requests past one that does not fit must ask this too, or the bound on bypasses
    is lost.
    """
    inside = [False] * len(waiting)
    for queue in _queues(waiting):
        for i in queue[: _window_end(waiting, queue, most_bypasses)]:
            inside[i] = True
    return inside


def _queues(waiting: Sequence[Waiting]) -> list[list[int]]:
    """Indices of each priority, the largest first; in each the oldest request first."""
    numbers = [one.number for one in waiting]
    arrivals = sorted(range(len(waiting)), key=numbers.__getitem__)
    if len({one.priority for one in waiting}) == 1:
        return [arrivals]
    queues: defaultdict[int, list[int]] = defaultdict(list)
    for i in arrivals:
        queues[waiting[i].priority].append(i)
    return [queues[priority] for priority in sorted(queues, reverse=True)]


def _window_end(waiting: Sequence[Waiting], queue: list[int], most_bypasses: int) -> int:
    """So many of ``queue`` are in its window; their numbers are unique, so no more than its
    size."""
    beyond = waiting[queue[0]].number + most_bypasses
    return bisect_left(
        queue, beyond, hi=min(len(queue), most_bypasses), key=lambda i: waiting[i].number
    )


def cost_class(effective_ms: float) -> int:
    """Costs of one class are within a factor of two; everything up to 1 is one class."""
    return math.frexp(max(effective_ms, 1.0))[1]


def miss_share(one: Waiting) -> float:
    """KVShare's score: the share of the prompt that is computed."""
    return 1 - one.hit_share


def _cost(one: Waiting) -> float:
    return one.effective_ms


_ORDERS: dict[str, Callable[[int], Order]] = {
    "hit-rate": lambda most: Windowed("hit-rate", miss_share, most),
    "effective-cost": lambda most: Windowed("effective-cost", _cost, most),
    "fcfs": lambda most: Windowed("fcfs", _cost, 1),
    "stock-fcfs": lambda most: AsQueued(),
    "lpm": lambda most: LongestPrefix(),
}


def orders() -> tuple[str, ...]:
    """Names that :func:`order_named` knows."""
    return tuple(_ORDERS)


def order_named(name: str, most_bypasses: int = 256) -> Order:
    """
    Args:
        most_bypasses: fewer younger requests than that overtake any one; without effect on
            ``fcfs`` (none do) and on stock's two (any number).

    Raises:
        ValueError: no such order; it lists them.
    """
    if name not in _ORDERS:
        raise ValueError(f"no order is named {name!r}; there are {', '.join(_ORDERS)}")
    return _ORDERS[name](most_bypasses)
