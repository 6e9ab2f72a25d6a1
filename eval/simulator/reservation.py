"""Who may be admitted: SGLang's decaying guess, or the demand ledger; each with its own state.

Both are asked in the same places of a scheduling pass, so that the machine knows neither.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Protocol

from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.settings import Flags, Side
from sglang_kvshare.scheduling.jobs import Running
from sglang_kvshare.scheduling.length_estimate import Asked, LengthEstimate, confidence_at
from sglang_kvshare.scheduling.parts import SchedulingParts
from sglang_kvshare.scheduling.stock import NewTokenRatio, StockBudget

#: Arrivals that the rate is reckoned from.
_RATE_OF = 64


class Reservation(Protocol):
    """Asked by the machine; requests are numbers, lengths tokens."""

    #: Decode steps that memory must suffice for.
    lookahead_steps: int

    def begin_pass(self, available: int, pending: int, left_sum: int, running: int) -> None: ...
    def fits(self, i: int, extend: int, pinned: int, out: int) -> bool: ...
    def admitted(self, i: int, extend: int, pinned: int, out: int, charged: int | None) -> None: ...
    def continued(self, i: int, extend: int, last: bool) -> None: ...
    @property
    def exhausted(self) -> bool: ...
    def chunk_tokens(self, limit: int) -> int: ...

    def arrived(self, now_ps: int) -> None: ...
    def stepped(self, steps: int, decays: int) -> None: ...
    def steps_to_due(self) -> int | None: ...
    def renew(self, out_of: OutOf) -> None: ...
    def left_tokens(self, i: int, out: int) -> int: ...
    def ended(self, i: int, out: int) -> None: ...
    def preempted(self, i: int) -> None: ...
    def retracted(self, kept: list[Running]) -> None: ...
    def idle(self) -> None: ...


class OutOf(Protocol):
    """How long a running request's answer is by now."""

    def __call__(self, i: int) -> int: ...


class Lengths:
    """What is expected of answers, by the estimator that a server has.

    Args:
        max_new: bound on each answer as the server keeps it, which may be tighter than what the
            request names (``Holdings.max_new_tokens``, of which all here are a view).
    """

    def __init__(self, requests: Requests, max_new: list[int], parts: SchedulingParts) -> None:
        self._requests = requests
        self._max_new = max_new
        self._estimator = parts.lengths
        self._settings = parts.settings
        self._told: dict[int, tuple[Asked, LengthEstimate]] = {}
        self._arrivals: deque[int] = deque(maxlen=_RATE_OF)

    def arrived(self, now_ps: int) -> None:
        self._arrivals.append(now_ps)

    @property
    def confidence(self) -> float:
        times = self._arrivals
        span_s = (times[-1] - times[0]) / 1e12 if len(times) > 1 else 0.0
        rate = (len(times) - 1) / span_s if span_s else 0.0
        return confidence_at(rate, self._settings.confidence, self._settings.confidence_slope)

    def of(self, i: int) -> LengthEstimate:
        if i not in self._told:
            requests = self._requests
            asked = Asked(requests.namespace(i), int(requests.prompt[i]), self._max_new[i])
            self._told[i] = asked, self._estimator.estimate(asked, self.confidence)
        return self._told[i][1]

    def longer(self, i: int, so_far: int) -> int:
        """Upper bound of the whole answer, now that it is so long."""
        self.of(i)
        return self._estimator.longer(self._told[i][0], so_far, self.confidence)

    def ended(self, i: int, out: int) -> int:
        """Learn from it; how far it outgrew its first bound."""
        self.of(i)
        asked, estimate = self._told.pop(i)
        self._estimator.observe(asked, estimate, out)
        return out - estimate.upper_tokens


class StockReservation:
    """SGLang 0.5.23: a decaying share of what every running request may still generate."""

    lookahead_steps = 1

    def __init__(
        self, requests: Requests, max_new: list[int], flags: Flags, lengths: Lengths | None
    ) -> None:
        self._max_new = max_new
        self._ratio = NewTokenRatio.of(flags.conservativeness)
        self._ignore_eos = requests.ignore_eos
        self._lengths = lengths
        self._budget = StockBudget(0, (), 0.0)

    @property
    def ratio(self) -> float:
        return self._ratio.current

    def begin_pass(self, available: int, pending: int, left_sum: int, running: int) -> None:
        share = 1.0 if self._ignore_eos else self._ratio.current
        self._budget = StockBudget.with_reserved(available, left_sum * share)

    def fits(self, i: int, extend: int, pinned: int, out: int) -> bool:
        # What pinning its prefix takes from the evictable is gone by now (SGLang locks first).
        self._budget.pin(pinned)
        if self._budget.fits(extend, self._max_new[i], out):
            return True
        self._budget.pin(-pinned)
        return False

    def admitted(self, i: int, extend: int, pinned: int, out: int, charged: int | None) -> None:
        if charged is None:
            self._budget.charge(extend, self._max_new[i])
        else:
            self._budget.charge(charged, 0)

    def continued(self, i: int, extend: int, last: bool) -> None:
        self._budget.charge(extend, self._max_new[i] if last else 0)

    @property
    def exhausted(self) -> bool:
        return self._budget.exhausted

    def chunk_tokens(self, limit: int) -> int:
        return self._budget.chunk_tokens(limit)

    def arrived(self, now_ps: int) -> None:
        if self._lengths is not None:
            self._lengths.arrived(now_ps)

    def stepped(self, steps: int, decays: int) -> None:
        ratio = self._ratio
        # As many decays as it takes to reach the least, one by one as SGLang does it.
        for _ in range(decays):
            if ratio.current <= ratio.least:
                break
            ratio.step()

    def steps_to_due(self) -> int | None:
        return None

    def renew(self, out_of: OutOf) -> None:
        pass

    def left_tokens(self, i: int, out: int) -> int:
        most = self._max_new[i]
        if self._lengths is None:
            return most - out
        return max(1, self._lengths.of(i).predicted_tokens - out)

    def ended(self, i: int, out: int) -> None:
        if self._lengths is not None:
            self._lengths.ended(i, out)

    def preempted(self, i: int) -> None:
        pass

    def retracted(self, kept: list[Running]) -> None:
        self._ratio.retracted(kept)

    def idle(self) -> None:
        self._ratio.idle()


class LedgerReservation:
    """CacheOPT: demand by estimate, kept in the ledger, with a small reserve for all."""

    def __init__(
        self, requests: Requests, max_new: list[int], parts: SchedulingParts, lengths: Lengths
    ) -> None:
        assert parts.ledger is not None
        assert parts.reserve is not None
        self._max_new = max_new
        self._known = requests.ignore_eos
        self._lengths = lengths
        self._ledger = parts.ledger
        self._reserve = parts.reserve
        self.lookahead_steps = max(1, parts.settings.lookahead_steps)
        #: Steps at which reservations are due, and until when each holds.
        self._due: list[tuple[int, int]] = []
        self._until: dict[int, int] = {}
        self._now = 0
        self._available = 0
        self._running = 0

    def begin_pass(self, available: int, pending: int, left_sum: int, running: int) -> None:
        # A prompt in chunks is in the ledger whole, but has not taken all of its slots yet.
        self._available = available - pending
        self._running = running

    def _bound(self, i: int, out: int) -> int:
        """Tokens to come at most."""
        if self._known:
            return int(self._max_new[i]) - out
        upper = self._lengths.longer(i, out) if out else self._lengths.of(i).upper_tokens
        return max(1, min(upper, self._max_new[i]) - out)

    def fits(self, i: int, extend: int, pinned: int, out: int) -> bool:
        reserve = self._reserve.tokens(self._running)
        return self._ledger.fits(extend + pinned, self._bound(i, out), self._available, reserve)

    def admitted(self, i: int, extend: int, pinned: int, out: int, charged: int | None) -> None:
        left = self._bound(i, out)
        self._ledger.open(str(i), extend + pinned, left)
        self._available -= extend + pinned
        self._running += 1
        self._note(i, left, out)

    def _note(self, i: int, left: int, out: int) -> None:
        if left + out >= self._max_new[i]:
            # Nothing to renew: it cannot grow beyond this.
            self._until.pop(i, None)
            return
        self._until[i] = self._now + left
        heappush(self._due, (self._now + left - self.lookahead_steps, i))

    def continued(self, i: int, extend: int, last: bool) -> None:
        pass

    @property
    def exhausted(self) -> bool:
        return self._available <= 0

    def chunk_tokens(self, limit: int) -> int:
        return limit

    def arrived(self, now_ps: int) -> None:
        self._lengths.arrived(now_ps)

    def stepped(self, steps: int, decays: int) -> None:
        self._now += steps
        self._ledger.step(steps)

    def steps_to_due(self) -> int | None:
        due = self._due
        while due and self._until.get(due[0][1]) != due[0][0] + self.lookahead_steps:
            heappop(due)
        return max(1, due[0][0] - self._now) if due else None

    def renew(self, out_of: OutOf) -> None:
        due = self._due
        while due and due[0][0] <= self._now:
            at, i = heappop(due)
            if self._until.get(i) != at + self.lookahead_steps:
                continue
            out = out_of(i)
            left = self._bound(i, out)
            self._ledger.renew(str(i), left)
            # At the earliest at the next step.
            self._until[i] = self._now + max(left, self.lookahead_steps + 1)
            if left + out >= self._max_new[i]:
                del self._until[i]
            else:
                heappush(due, (self._until[i] - self.lookahead_steps, i))

    def left_tokens(self, i: int, out: int) -> int:
        if self._known:
            return int(self._max_new[i]) - out
        return max(1, self._lengths.of(i).predicted_tokens - out)

    def ended(self, i: int, out: int) -> None:
        self.preempted(i)
        if not self._known:
            self._reserve.observe(self._lengths.ended(i, out))

    def preempted(self, i: int) -> None:
        if str(i) in self._ledger:
            self._ledger.close(str(i))
        self._until.pop(i, None)

    def retracted(self, kept: list[Running]) -> None:
        pass

    def idle(self) -> None:
        pass


def reservation_of(
    side: Side, flags: Flags, parts: SchedulingParts, requests: Requests, max_new: list[int]
) -> Reservation:
    """The one of a side. Stock's is given estimates only where victims are chosen by them.

    Args:
        max_new: see :class:`Lengths`.
    """
    lengths = Lengths(requests, max_new, parts)
    if side.reserve == "estimate":
        return LedgerReservation(requests, max_new, parts, lengths)
    return StockReservation(requests, max_new, flags, lengths if side.victims == "slo" else None)
