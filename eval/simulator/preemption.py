"""Slots for the next decode steps: when they run short, who leaves the batch, and how.

SGLang's ``Scheduler.update_running_batch`` and ``ScheduleBatch.retract_decode``.
"""

from __future__ import annotations

from kvshare_eval.simulator.copies import Link
from kvshare_eval.simulator.decode_batch import DecodeBatch
from kvshare_eval.simulator.felt import Felt
from kvshare_eval.simulator.holdings import Holdings
from kvshare_eval.simulator.kv_cache import KvCache
from kvshare_eval.simulator.reservation import Reservation
from kvshare_eval.simulator.settings import Side
from kvshare_eval.simulator.swaps import Swaps
from kvshare_eval.simulator.waiting_queue import WaitingQueue
from sglang_kvshare.scheduling.jobs import Running
from sglang_kvshare.scheduling.preemption import VictimOrder, victims
from sglang_kvshare.scheduling.stock import RETRACT_DECODE_STEPS

#: Stock SGLang protects nobody.
_ANY_NUMBER = 1 << 30


class Preemption:
    """Moves requests from the batch to the queue, and their slots to the pool or the host."""

    def __init__(
        self,
        batch: DecodeBatch,
        queue: WaitingQueue,
        holdings: Holdings,
        cache: KvCache,
        link: Link,
        swaps: Swaps,
        reservation: Reservation,
        order: VictimOrder,
        side: Side,
        tbt_slo_ms: float | None,
        felt: Felt,
    ) -> None:
        self._batch = batch
        self._queue = queue
        self._holdings = holdings
        self._cache = cache
        self._link = link
        self._swaps = swaps
        self._reservation = reservation
        self._order = order
        self._by_slo = side.victims == "slo"
        self._most_preemptions = side.most_preemptions if self._by_slo else _ANY_NUMBER
        self._tbt_slo_ms = tbt_slo_ms
        self._felt = felt
        self._retracted = False

    def copied(self, now_ps: int) -> None:
        """Slots whose copies to the host are done are free."""
        for _, tokens in self._link.done(now_ps):
            self._cache.give(tokens)
            self._batch.full = False

    def make_room(self, now_ps: int) -> int:
        """Slots for the next step, and those that are looked ahead to.

        A swapped request's slots come back when its copy is done: decoding waits for that only if
        the very next step would not fit.

        Returns:
            Until when that took. The batch may be empty: its last request was ended.
        """
        batch, cache, link = self._batch, self._cache, self._link
        ahead = self._reservation.lookahead_steps
        running: list[Running] | None = None
        while batch.size > 1 and cache.available + link.tokens_out < batch.size * ahead:
            running = self._running(now_ps) if running is None else running
            chosen = victims(running, 1, self._order, self._most_preemptions)
            if not chosen:
                break
            one = running.pop(chosen[0])
            self._preempt(int(one.rid), now_ps)
        if running is not None:
            self._reservation.retracted(running)
            self._retracted = True
        while cache.available < batch.size:
            end = link.next_end_ps
            if end is not None:
                self._felt.stalled_ps += max(0, end - now_ps)
                now_ps = max(now_ps, end)
                self.copied(now_ps)
            elif batch.size == 1:
                self._abort_last()
            else:
                self.recompute_one(now_ps)
        return now_ps

    def decays(self, steps: int) -> int:
        """How often SGLang's ratio decays in so many steps: not in one that retracts."""
        retracted, self._retracted = self._retracted, False
        return steps - retracted

    def recompute_one(self, now_ps: int) -> None:
        """The first to leave does, and its slots are free at once."""
        running = self._running(now_ps)
        chosen = victims(running, 1, self._order, self._most_preemptions)
        one = running[chosen[0] if chosen else 0]
        self._preempt(int(one.rid), now_ps, recompute=True)

    def _running(self, now_ps: int) -> list[Running]:
        """What decodes, as victim selection sees it."""
        held = self._holdings
        jobs = []
        for i in self._batch:
            grown = self._batch.grown_tokens(i)
            out = held.out_tokens[i] + grown
            own = held.private_tokens[i] + grown
            alone = sum(node.tokens for node in held.path[i] if node.locks == 1)
            job = Running(
                rid=str(i),
                number=i,
                prompt_tokens=held.prompt_tokens[i],
                output_tokens=out,
                max_new_tokens=held.max_new_tokens[i],
                private_tokens=own + alone,
                left_tokens=1,
                tbt_slo_ms=self._tbt_slo_ms,
                preemptions=self._felt.preemptions[i],
            )
            if self._by_slo:
                context = held.prompt_tokens[i] + out - 1
                job.left_tokens = self._reservation.left_tokens(i, out)
                job.preempt_ms = min(self._swaps.ways_ms(context, own, now_ps))
            jobs.append(job)
        return jobs

    def _preempt(self, i: int, now_ps: int, *, recompute: bool = False) -> None:
        """It leaves the batch for the queue."""
        batch, cache, felt = self._batch, self._cache, self._felt
        batch.leave(i)
        felt.preemptions[i] += 1
        path, private = self._holdings.hand_over(i)
        self._reservation.preempted(i)
        begin = sum(node.tokens for node in path)
        if not recompute and self._swaps.out(i, private, begin, now_ps):
            felt.swaps += 1
        else:
            felt.recomputes += 1
            cache.give(private)
        cache.unlock(path)
        # The newly evictable memory is used instantly.
        cache.evict(batch.size * RETRACT_DECODE_STEPS - cache.free)
        self._queue.add(i, self._holdings.fill_tokens(i), felt.preemptions[i])

    def _abort_last(self) -> None:
        """Not even alone does it fit: SGLang ends it."""
        (i,) = self._batch
        self._batch.leave(i)
        self._batch.end(i)
        self._felt.aborted += 1
