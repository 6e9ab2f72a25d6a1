"""One server: SGLang 0.5.23's scheduling pass over simulated forwards.

    pass    1. what has arrived joins the queue
            2. a prefill batch, if one can be made (it goes before decoding)     -> its time
            3. else a decode step of all that run; short of memory, some leave   -> its time
            4. else nothing until something happens

(``Scheduler.get_next_batch_to_run``; without overlap, mixed chunks, speculation, page size 1.)

Who owns what:

    machine         the clock, and what has arrived
    waiting_queue   who waits
    prefill         the prompt that is in chunks
    decode_batch    who decodes, as sums; steps, many at a time
    holdings        answers so far, and slots that are held
    swaps           who is in host memory
    kv_cache        all slots, and the tree

Everything else asks or moves what is there: contents, holds, reservation, preemption.
"""

from __future__ import annotations

from kvshare_eval.errors import EvalError
from kvshare_eval.simulator.contents import Contents
from kvshare_eval.simulator.copies import Link
from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.decode_batch import DecodeBatch
from kvshare_eval.simulator.felt import Felt
from kvshare_eval.simulator.holdings import Holdings
from kvshare_eval.simulator.holds import Holds
from kvshare_eval.simulator.kv_cache import KvCache
from kvshare_eval.simulator.preemption import Preemption
from kvshare_eval.simulator.prefill import Prefill
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.reservation import reservation_of
from kvshare_eval.simulator.settings import Flags, Side
from kvshare_eval.simulator.sides import parts_of
from kvshare_eval.simulator.swaps import Swaps
from kvshare_eval.simulator.waiting_queue import WaitingQueue
from sglang_kvshare.scheduling.stock import CLIP_MAX_NEW_TOKENS


class Machine:
    """One run of one side over one workload.

    Args:
        jumps: off, every decode step is a pass of its own; the outcome is the same.
        check: verify the pool's accounting at every pass (slow).

    Raises:
        EvalError: a bound on answers beyond what SGLang reserves at most.
    """

    def __init__(
        self,
        requests: Requests,
        costs: Costs,
        flags: Flags,
        side: Side,
        *,
        jumps: bool = True,
        check: bool = False,
    ) -> None:
        if len(requests) and int(requests.max_new.max()) > CLIP_MAX_NEW_TOKENS:
            raise EvalError(f"max_new: the most that is simulated is {CLIP_MAX_NEW_TOKENS}")
        self._jumps, self._check = jumps, check
        if not side.apart:
            requests = requests.of_one()
        # Of a trace that numbers blocks by all that stands before them, equal content elsewhere
        # cannot be seen.
        elsewhere = side.reuse and bool(requests.blocks) and not requests.chained
        parts = parts_of(side, flags, costs, requests)
        felt = Felt.of(len(requests))
        cache = KvCache(flags.pool_tokens, donors=elsewhere)
        link = Link(costs)
        contents = Contents(requests, cache, elsewhere=elsewhere)
        holdings = Holdings(requests, contents, cache, flags.pool_tokens)
        reservation = reservation_of(side, flags, parts, requests, holdings.max_new_tokens)
        holds = None
        if parts.holder is not None and side.hold_ms > 0:
            holds = Holds(parts.holder, contents, costs)
        swaps = Swaps(link, parts, side, costs)
        batch = DecodeBatch(holdings, reservation, cache, costs, felt)
        assert parts.order is not None
        queue = WaitingQueue(requests, contents, cache, swaps, parts.order, side, costs)
        slo_ms = requests.tbt_slo_ms
        preemption = Preemption(
            batch,
            queue,
            holdings,
            cache,
            link,
            swaps,
            reservation,
            parts.victim_order,
            side,
            slo_ms,
            felt,
        )
        self._prefill = Prefill(
            batch,
            queue,
            holdings,
            contents,
            cache,
            holds,
            swaps,
            preemption,
            reservation,
            costs,
            flags,
            side,
            slo_ms,
            felt,
        )
        self.felt, self.cache, self.link = felt, cache, link
        self.host_pool = parts.host_pool
        self._holdings = holdings
        self._reservation = reservation
        self._batch = batch
        self._queue = queue
        self._preemption = preemption
        self._arrived_ps: list[int] = requests.arrived_ps.tolist()
        self._came = 0
        self._now_ps = 0

    def run(self) -> Felt:
        """Until every request has ended.

        Raises:
            RuntimeError: requests wait and nothing will ever happen; a fault of the simulator.
        """
        felt = self.felt
        while True:
            felt.passes += 1
            self._arrive()
            self._preemption.copied(self._now_ps)
            if self._check:
                self._checked()
            end_ps = self._prefill.run(self._now_ps)
            if end_ps is not None:
                self._now_ps = end_ps
            elif self._batch.size:
                self._decode()
            elif not self._rest():
                break
        felt.end_of_all_ps = self._now_ps
        self.cache.flush()
        return felt

    def _arrive(self) -> None:
        arrived, now = self._arrived_ps, self._now_ps
        came = self._came
        while came < len(arrived) and arrived[came] <= now:
            if self._holdings.comes(came):
                self._queue.add(came, self._holdings.fill_tokens(came))
                self._reservation.arrived(arrived[came])
            else:
                self.felt.refused += 1
            came += 1
        self._came = came

    def _decode(self) -> None:
        """Steps of all that run, as many as nothing can happen in."""
        batch = self._batch
        self._reservation.renew(batch.out_tokens)
        now = self._now_ps = self._preemption.make_room(self._now_ps)
        if not batch.size:
            return
        jumps = self._jumps and not self._prefill.wanted
        event_ps = self._next_event_ps() if jumps else None
        steps, self._now_ps = batch.decode(now, event_ps, jumps=jumps)
        self._reservation.stepped(steps, self._preemption.decays(steps))
        self.felt.note_held(self.cache.locked + self.cache.private)
        batch.end_finished()

    def _next_event_ps(self) -> int | None:
        """An arrival that a pass would look at, or a copy that gives slots back."""
        event = self.link.next_end_ps
        if not self._batch.full and self._came < len(self._arrived_ps):
            arrival = self._arrived_ps[self._came]
            event = arrival if event is None else min(event, arrival)
        return event

    def _rest(self) -> bool:
        """Nothing can run: on to what happens next. False if nothing will."""
        self._reservation.idle()
        ends = [self.link.next_end_ps] if self.link.next_end_ps is not None else []
        if self._came < len(self._arrived_ps):
            ends.append(self._arrived_ps[self._came])
        if not ends:
            if len(self._queue):
                raise RuntimeError(f"{len(self._queue)} requests wait for nothing")
            return False
        then = max(self._now_ps, min(ends))
        self.felt.idle_ps += then - self._now_ps
        self._now_ps = then
        return True

    def _checked(self) -> None:
        self.cache.check()
        self._batch.check()
        private = self._holdings.private_tokens
        held = sum(private.values()) + sum(self._batch.grown_tokens(i) for i in self._batch)
        assert held + self.link.tokens_out == self.cache.private
