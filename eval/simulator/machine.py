"""One server: SGLang 0.5.23's scheduling pass over simulated forwards.

    pass    1. what has arrived joins the queue
            2. a prefill batch, if one can be made (it goes before decoding)     -> its time
            3. else a decode step of all that run; short of memory, some leave   -> its time
            4. else nothing until something happens

(``Scheduler.get_next_batch_to_run``, ``PrefillAdder.add_one_req``, ``update_running_batch``,
``ScheduleBatch.retract_decode``; without overlap, mixed chunks, speculation, page size 1.)

Decode steps in which nothing can change are jumped over:

    step      |----|----|----|----|----|        the batch is the same, its context grows by one
    until       the first of: a finish, a step end at or after an arrival that can be admitted or
                a copy, a reservation that is due, memory that runs short

The batch is kept as sums. A request knows the step at which it joined, and with it how long its
answer is by now; what it felt between is asked of :mod:`kvshare_eval.simulator.gaps`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, takewhile

from kvshare_eval.errors import EvalError
from kvshare_eval.simulator.copies import Link
from kvshare_eval.simulator.costs import PS_PER_MS, Costs
from kvshare_eval.simulator.gaps import GapHistogram, LargestSince
from kvshare_eval.simulator.kv_cache import KvCache, Node
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.reservation import LedgerReservation, Lengths, StockReservation
from kvshare_eval.simulator.settings import Flags, Side
from kvshare_eval.simulator.sides import parts_of
from sglang_kvshare.scheduling.jobs import Running, Waiting
from sglang_kvshare.scheduling.preemption import victims
from sglang_kvshare.scheduling.prefill_budget import prefill_tokens
from sglang_kvshare.scheduling.stock import CLIP_MAX_NEW_TOKENS, RETRACT_DECODE_STEPS

#: Waiting requests that are shown to an order, beside as many as may be overtaken.
_WINDOW = 128
#: SGLang touches the prefixes of so many waiting requests every so many passes.
_TOUCHED, _TOUCH_EVERY = 128, 32
#: Blocks of a prompt that tell whether another computes the same.
_KEYS = 64
#: SGLang refuses prompts that leave less room than this.
_SPARE_TOKENS = 6


@dataclass
class Felt:
    """What happened to each request, and to the server; times in picoseconds.

    Attributes:
        first_ps: when its first token came; -1 for one that was refused.
        end_ps: when its last one came.
        gap_ps: the largest gap between its tokens.
        admitted_ps: when its prefill was first chosen.
        preemptions: how often it left.
        prefix, reused: prompt tokens that its first prefill found, and took from elsewhere.
        gaps: of all tokens of all requests.
        refused: requests that could never fit.
        swaps, recomputes: preemptions by the way that was taken.
        aborted: ended for want of memory, as SGLang ends the last one.
        rows: that ran in prefills.
        prefills, steps: forwards.
        busy_ps, idle_ps: of the server's time.
        stalled_ps: that decoding waited for copies.
        peak_tokens: most slots that were locked or private.
    """

    first_ps: list[int]
    end_ps: list[int]
    gap_ps: list[int]
    admitted_ps: list[int]
    preemptions: list[int]
    prefix: list[int]
    reused: list[int]
    gaps: GapHistogram
    refused: int = 0
    swaps: int = 0
    recomputes: int = 0
    aborted: int = 0
    rows: int = 0
    prefills: int = 0
    steps: int = 0
    tokens: int = 0
    idle_ps: int = 0
    end_of_all_ps: int = 0
    stalled_ps: int = 0
    peak_tokens: int = 0
    passes: int = 0


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
        count = len(requests)
        self.requests, self.costs, self.flags, self.side = requests, costs, flags, side
        self._jumps, self._check = jumps, check
        # Of a trace that numbers blocks by all that stands before them, equal content elsewhere
        # cannot be seen.
        self._reuses = side.reuse and bool(requests.blocks) and not requests.chained
        self.cache = KvCache(flags.pool_tokens, donors=self._reuses)
        self.link = Link(costs)
        self.felt = Felt(
            first_ps=[-1] * count,
            end_ps=[-1] * count,
            gap_ps=[0] * count,
            admitted_ps=[-1] * count,
            preemptions=[0] * count,
            prefix=[0] * count,
            reused=[0] * count,
            gaps=GapHistogram(),
        )
        parts = parts_of(side, flags, costs, requests)
        self._parts = parts
        self._order = parts.order
        # Beyond the window of bypasses an order is first come first served anyway; SGLang's lpm
        # only asks whether more than 128 wait.
        self._window = _WINDOW + (side.most_bypasses if side.own_order else 1)
        self._holder = parts.holder if side.hold_ms > 0 else None
        lengths = Lengths(requests, parts)
        self.reservation: StockReservation | LedgerReservation
        if side.reserve == "estimate":
            self.reservation = LedgerReservation(requests, parts, lengths)
        else:
            needs = lengths if side.victims == "slo" else None
            self.reservation = StockReservation(requests, flags, needs)
        self._arrived = requests.arrived_ps.tolist()
        self._prompt = requests.prompt.tolist()
        self._max_new = requests.max_new.tolist()
        self._output = requests.output.tolist()
        self._came = 0
        self.now = 0
        # --- the queue
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        self._full = False
        self._decode_next = False
        self._touches = 0
        self._seen: dict[int, tuple[Node | None, int | None, int]] = {}
        # --- the batch, as sums; and what each of its requests was when it joined
        self._batch = 0
        self._context = 0
        self._left = 0
        self._step = 0
        self._joined: dict[int, tuple[int, int]] = {}
        self._finishes: list[tuple[int, int]] = []
        self._fresh: dict[int, int] = {}
        self._last_step_end = 0
        self._shared = LargestSince()
        # --- what requests hold: path in the tree, private tokens
        self._paths: dict[int, list[Node]] = {}
        self._private: dict[int, int] = {}
        self._out: dict[int, int] = {}
        #: The one prompt that is in chunks, and how far it is.
        self._chunked: int | None = None
        self._computed = 0
        self._chunk_rows_left = 0
        #: Swapped out: where its tokens begin, and how many.
        self._swapped: dict[int, tuple[int, int]] = {}
        self._retracted = False

    # --- the loop ------------------------------------------------------------------------------

    def run(self) -> Felt:
        """Until every request has ended.

        Raises:
            RuntimeError: requests wait and nothing will ever happen; a fault of the simulator.
        """
        felt = self.felt
        while True:
            felt.passes += 1
            self._arrive()
            self._copied()
            if self._check:
                self._checked()
            if self._prefill():
                continue
            if self._batch:
                self._decode()
                continue
            if not self._rest():
                break
        felt.end_of_all_ps = self.now
        self.cache.flush()
        return felt

    def _arrive(self) -> None:
        arrived, now = self._arrived, self.now
        came = self._came
        while came < len(arrived) and arrived[came] <= now:
            self._enqueue(came)
            came += 1
        self._came = came

    def _enqueue(self, i: int) -> None:
        # `max_req_len` is one less than the pool.
        room = self.flags.pool_tokens - 1
        if self._prompt[i] >= room - _SPARE_TOKENS + 1:
            self.felt.refused += 1
            return
        self._max_new[i] = min(self._max_new[i], room - self._prompt[i] - 1)
        self._output[i] = min(self._output[i], self._max_new[i])
        self._waiting[i] = Waiting(
            rid=str(i),
            number=i,
            arrived_ms=self._arrived[i] / PS_PER_MS,
            prompt_tokens=self._prompt[i],
            ttft_slo_ms=self.requests.ttft_slo_ms,
        )
        self._out[i] = 0
        self.reservation.arrived(self._arrived[i])

    def _copied(self) -> None:
        for _, tokens in self.link.done(self.now):
            self.cache.give(tokens)
            self._full = False

    def _rest(self) -> bool:
        """Nothing can run: on to what happens next. False if nothing will."""
        self.reservation.idle()
        ends = [self.link.next_end_ps] if self.link.next_end_ps is not None else []
        if self._came < len(self._arrived):
            ends.append(self._arrived[self._came])
        if not ends:
            if self._waiting:
                raise RuntimeError(f"{len(self._waiting)} requests wait for nothing")
            return False
        then = max(self.now, min(ends))
        self.felt.idle_ps += then - self.now
        self.now = then
        return True

    # --- prefill -------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        """Choose and run a prefill batch; false if there is none."""
        if not self._batch:
            self._full = False
        if (self._full or not self._waiting) and self._chunked is None:
            return False
        if self._decode_next:
            self._decode_next = False
            if self._batch:
                return False
        room = self.flags.max_running - self._batch
        if room <= 0 and self._chunked is None:
            self._full = True
            return False
        chosen = _Chosen(self._chunk_limit(), self.flags.max_prefill_tokens)
        pending = 0
        if self._chunked is not None:
            pending = self._fill(self._chunked) - self._computed
        cache, reservation = self.cache, self.reservation
        reservation.begin_pass(cache.available, pending, self._left, self._batch)
        self._touch_waiting()
        if self._chunked is not None:
            self._continue_chunk(chosen)
        # An order changes nothing: where the chunk has spent the pass nobody needs to be asked.
        for i in () if chosen.spent else self._ordered():
            if chosen.spent:
                break
            if len(chosen.requests) >= room:
                self._full = True
                break
            verdict = self._add(i, chosen)
            if verdict == _HELD:
                continue
            if verdict == _NO_TOKEN:
                self._full = bool(chosen.requests) or self._batch > 0
            if verdict != _ADDED:
                break
            if reservation.exhausted:
                self._full = True
                break
        if not chosen.requests:
            return False
        self._run_prefill(chosen)
        return True

    def _chunk_limit(self) -> int | None:
        """Rows of this pass; ``None`` without chunked prefill."""
        limit = self.flags.chunked_prefill_tokens or None
        slo = self.requests.tbt_slo_ms
        if not self.side.budget or slo is None or not self._batch or limit is None:
            return limit
        decode_ms = self.costs.decode_ms(self._batch, self._context + self._batch)
        before = self._computed if self._chunked is not None else 0
        costs = self.costs
        return prefill_tokens(
            lambda rows, context: costs.prefill_ms(rows, rows * context),
            decode_ms,
            slo,
            limit,
            before,
        )

    def _ordered(self) -> list[int]:
        if not self._waiting:
            return []
        count = min(len(self._waiting), self._window)
        window = list(islice(self._waiting.items(), count))
        if self.side.order == "lpm" and count <= 128:
            for i, one in window:
                path = self._match(i)
                self.cache.touch(path)
                one.prefix_tokens = sum(node.tokens for node in path)
        elif self.side.own_order:
            for i, one in window:
                self._predict(i, one)
        jobs = [one for _, one in window]
        return [window[place][0] for place in self._order.order(jobs, self.now / PS_PER_MS)]

    def _touch_waiting(self) -> None:
        if self.side.order == "lpm":
            return
        if self._touches % _TOUCH_EVERY == 0 and self.requests.blocks:
            for i in reversed(list(islice(self._waiting, _TOUCHED))):
                self.cache.touch(self._match(i))
        self._touches += 1

    def _match(self, i: int) -> list[Node]:
        return self.cache.matched(self._contents(i))

    def _contents(self, i: int) -> tuple[int, ...]:
        blocks = self.requests.blocks
        # A prompt that shares nothing is one block, which only it can find when it resumes.
        return blocks[i] if blocks else (-2 * i - 2,)

    def _predict(self, i: int, one: Waiting) -> None:
        """What its prefill will take. Kept as long as the tree stays as it is for this prompt."""
        cache, contents = self.cache, self._contents(i)
        seen = self._seen.get(i)
        if seen is not None and cache.unchanged(*seen):
            return
        path = cache.matched(contents)
        after = contents[len(path)] if len(path) < len(contents) else None
        self._seen[i] = path[-1] if path else None, after, cache.donor_changes
        prefix = min(sum(node.tokens for node in path), one.prompt_tokens - 1)
        reused = self._reusable(i, prefix)
        one.prefix_tokens = prefix
        spared = round(reused * (1 - self.side.recompute_ratio))
        one.reused_tokens = spared
        rows = max(1, one.prompt_tokens - prefix - spared)
        if i in self._swapped:
            begin, tokens = self._swapped[i]
            rows = max(1, min(rows, one.prompt_tokens - tokens - min(prefix, begin)))
        one.effective_ms = self.costs.prefill_ms(rows, rows * one.prompt_tokens)

    def _reusable(self, i: int, prefix: int, *, takes: bool = False) -> int:
        """Tokens of blocks beyond the prefix that stand elsewhere in the cache.

        Args:
            takes: they are about to be taken.
        """
        if not self._reuses or i in self._swapped:
            return 0
        size, prompt, cache = self.requests.block_tokens, self._prompt[i], self.cache
        # The last block is computed in any case: it holds the question.
        inner = self.requests.blocks[i][prefix // size : (prompt - 1) // size]
        found = [content for content in inner if cache.has_donor(content)]
        if takes:
            for content in found:
                cache.touch_donor(content)
        return size * len(found)

    def _fill(self, i: int) -> int:
        """What must be in the cache before the next token."""
        return int(self._prompt[i]) + self._out[i]

    def _add(self, i: int, chosen: _Chosen) -> int:
        """SGLang's ``add_one_req``."""
        cache = self.cache
        fill = self._fill(i)
        path = self._match(i)
        prefix = min(sum(node.tokens for node in path), fill - 1)
        if self._holder is not None and self._held(i, path, prefix):
            return _HELD
        before = cache.evictable
        cache.lock(path)
        pinned = before - cache.evictable
        extend = fill - prefix
        out = self._out[i]
        if not self.reservation.fits(i, extend, pinned, out):
            cache.unlock(path)
            return _NO_TOKEN
        if chosen.limit is None and chosen.requests and extend >= chosen.input_left:
            cache.unlock(path)
            return _OTHER
        reused = self._reusable(i, prefix, takes=True) if out == 0 else 0
        back = self._swapped.get(i)
        rows = extend - reused + math.ceil(reused * self.side.recompute_ratio)
        if back is not None:
            rows = max(1, extend - back[1])
        whole = chosen.limit is None or rows <= chosen.limit
        taken, charged_rows = extend, rows
        if not whole:
            assert chosen.limit is not None
            charged_rows = chosen.limit
            taken = max(1, extend * charged_rows // rows)
        self.reservation.admitted(i, extend, pinned, out, None if whole else taken)
        if self._holder is not None:
            self._holder.begins(str(i), self._keys(i, len(path)))
        if self.felt.admitted_ps[i] < 0:
            self.felt.admitted_ps[i] = self.now
            self.felt.prefix[i] = prefix
            self.felt.reused[i] = reused
        del self._waiting[i]
        self._seen.pop(i, None)
        self._paths[i] = path
        self._private[i] = 0
        self._take(i, taken)
        if whole:
            self._resumed(i, chosen)
        else:
            self._chunked = i
            self._computed = prefix + taken
            self._chunk_rows_left = rows - charged_rows
        chosen.add(i, charged_rows, charged_rows * (prefix + taken), whole, reused)
        return _ADDED

    def _continue_chunk(self, chosen: _Chosen) -> None:
        i = self._chunked
        assert i is not None
        left = self._fill(i) - self._computed
        rows = self._chunk_rows_left
        limit = rows if chosen.limit is None else chosen.limit
        charged = min(rows, self.reservation.chunk_tokens(limit))
        last = charged >= rows
        taken = left if last else max(1, left * charged // rows)
        while self.cache.available < taken and self._batch:
            # Those that decode between the chunks outgrew what was set aside.
            self._preempt(self._first_victim(), recompute=True)
        self._take(i, taken)
        self._computed += taken
        self._chunk_rows_left -= charged
        self.reservation.continued(i, taken, last)
        chosen.add(i, charged, charged * self._computed, last, 0)
        if last:
            self._chunked = None
            self._resumed(i, chosen)

    def _resumed(self, i: int, chosen: _Chosen) -> None:
        """What was swapped out comes back; the batch waits for it."""
        back = self._swapped.pop(i, None)
        if back is not None:
            self._parts.host_pool.release(str(i))
            chosen.copied_ps = max(chosen.copied_ps, self.link.copy_in(back[1], self.now))

    def _held(self, i: int, path: list[Node], prefix: int) -> bool:
        """Whether it should wait for what is being computed."""
        assert self._holder is not None
        if not len(self._holder):
            return False
        holder = self._holder
        keys = self._keys(i, len(path))
        # What is computed now: at any place where that can be taken, else in a common prefix.
        wanted = (
            [key for key in keys if key in holder]
            if self._reuses
            else [*takewhile(holder.__contains__, keys)]
        )
        if not wanted:
            return False
        prompt, costs = self._prompt[i], self.costs
        rows = prompt - prefix
        later = max(1, rows - len(wanted) * self.requests.block_tokens)
        gain_ms = costs.prefill_ms(rows, rows * prompt) - costs.prefill_ms(later, later * prompt)
        return holder.held(self._waiting[i], wanted, gain_ms, self.now / PS_PER_MS)

    def _keys(self, i: int, known: int) -> tuple[int, ...]:
        """Whole blocks that it would compute and others could take."""
        if not self.requests.blocks:
            return ()
        whole = self._prompt[i] // self.requests.block_tokens
        return self.requests.blocks[i][known : min(whole, known + _KEYS)]

    def _take(self, i: int, tokens: int) -> None:
        self.cache.take(tokens)
        self._private[i] += tokens

    def _run_prefill(self, chosen: _Chosen) -> None:
        felt = self.felt
        took = self.costs.prefill_ps(chosen.rows, chosen.pairs, chosen.placed)
        end = max(self.now + took, chosen.copied_ps)
        felt.prefills += 1
        felt.rows += chosen.rows
        self._note_peak()
        self.now = end
        for i in chosen.requests:
            if i in chosen.whole:
                self._publish(i, self._prompt[i])
                if self._holder is not None:
                    self._holder.ended(str(i))
                self._first_token(i)
            else:
                self._publish(i, self._computed)
        # With a budget for each pass, what decodes gets a step before the next one.
        side = self.side
        self._decode_next = (
            side.budget and side.decode_between and self.requests.tbt_slo_ms is not None
        )

    def _publish(self, i: int, upto: int) -> None:
        """Blocks that are computed up to there go into the tree."""
        contents, size = self._contents(i), self.requests.block_tokens
        if not self.requests.blocks:
            size = self._prompt[i]
        path, prompt = self._paths[i], self._prompt[i]
        last = len(contents) if upto >= prompt else upto // size
        exact = not self._reuses or not path or path[-1].exact
        blocks = []
        for place, content in enumerate(contents[len(path) : last], len(path)):
            if exact and self.felt.reused[i]:
                # From the first block on that was taken from elsewhere the context is not exact.
                exact = not self.cache.has_donor(content)
            blocks.append((content, min(size, prompt - place * size), exact))
        if blocks:
            self._paths[i], _ = self.cache.publish(path, blocks)
            self._private[i] -= sum(tokens for _, tokens, _ in blocks)
        if upto >= prompt:
            # A last token that was cached and computed all the same gives its second slot back.
            held = sum(node.tokens for node in self._paths[i])
            spare = held + self._private[i] - self._fill(i)
            if spare > 0:
                self.cache.give(spare)
                self._private[i] -= spare

    def _first_token(self, i: int) -> None:
        """The token that a prefill yields: the first, or the next of one that resumes."""
        felt, now = self.felt, self.now
        out = self._out[i]
        if out == 0:
            felt.first_ps[i] = now
        else:
            self._gap(i, now - felt.end_ps[i])
        felt.end_ps[i] = now
        felt.tokens += 1
        out += 1
        self._out[i] = out
        if out >= self._output[i]:
            self._finish(i)
            return
        self._joined[i] = (self._step, out)
        heappush(self._finishes, (self._step + self._output[i] - out, i))
        self._fresh[i] = now
        self._batch += 1
        self._context += self._prompt[i] + out - 1
        self._left += self._max_new[i] - out

    def _gap(self, i: int, gap_ps: int) -> None:
        self.felt.gaps.add(gap_ps, 1)
        if gap_ps > self.felt.gap_ps[i]:
            self.felt.gap_ps[i] = gap_ps

    # --- decode --------------------------------------------------------------------------------

    def _decode(self) -> None:
        self.reservation.renew(self._out_now)
        if not self._make_room():
            return
        steps, then = self._steps()
        felt, costs = self.felt, self.costs
        batch = self._batch
        self.cache.take(steps * batch)
        floor, request, context = costs.decode_ps
        # The first step, and by how much each takes longer than the one before.
        first = floor + request * batch + context * (self._context + batch)
        rise = context * batch
        start = self.now
        first_end = start + first
        self._first_gaps(first_end)
        if steps > 1:
            felt.gaps.add_run(first + rise, rise, steps - 1, batch)
            self._shared.add(self._step + steps, first + rise * (steps - 1))
        self.now = then
        self._last_step_end = then
        self._step += steps
        self._context += steps * batch
        self._left -= steps * batch
        felt.steps += steps
        felt.tokens += steps * batch
        # SGLang's ratio does not decay in a step that retracts.
        self.reservation.stepped(steps, steps - self._retracted)
        self._retracted = False
        self._note_peak()
        finishes = self._finishes
        while finishes and finishes[0][0] <= self._step:
            at, i = heappop(finishes)
            if self._ends_at(i) == at:
                self._leave_batch(i)
                felt.end_ps[i] = then
                self._finish(i)

    def _first_gaps(self, end: int) -> None:
        """Of the next step, whose requests got their last token at different times."""
        fresh = self._fresh
        for i, since in fresh.items():
            self._gap(i, end - since)
        others = self._batch - len(fresh)
        if others:
            gap = end - self._last_step_end
            self.felt.gaps.add(gap, others)
            self._shared.add(self._step + 1, gap)
        fresh.clear()

    def _steps(self) -> tuple[int, int]:
        """How many steps are taken at once, and when the last of them ends."""
        batch = self._batch
        floor, request, context = self.costs.decode_ps
        rise = context * batch
        first = floor + request * batch + context * (self._context + batch)

        def took(steps: int) -> int:
            return steps * first + rise * (steps * (steps - 1) // 2)

        steps = 1
        if self._jumps and not self._asks_every_step():
            steps = self._next_finish() - self._step
            need = batch * self.reservation.lookahead_steps
            steps = min(steps, (self.cache.available - need) // batch + 1)
            due = self.reservation.steps_to_due()
            if due is not None:
                steps = min(steps, due)
            event = self._next_event()
            if event is not None and self.now + took(steps) >= event:
                steps = _steps_until(event - self.now, first, rise, took, steps)
            steps = max(1, steps)
        return steps, self.now + took(steps)

    def _asks_every_step(self) -> bool:
        """Whether the next pass would choose a prefill anew, and not find the batch full."""
        return self._chunked is not None or (not self._full and bool(self._waiting))

    def _next_event(self) -> int | None:
        """An arrival that a pass would look at, or a copy that gives slots back."""
        event = self.link.next_end_ps
        if not self._full and self._came < len(self._arrived):
            arrival = self._arrived[self._came]
            event = arrival if event is None else min(event, arrival)
        return event

    def _next_finish(self) -> int:
        finishes = self._finishes
        while self._ends_at(finishes[0][1]) != finishes[0][0]:
            heappop(finishes)
        return finishes[0][0]

    def _ends_at(self, i: int) -> int:
        """Step at which a running request ends; -1 for one that does not run."""
        joined = self._joined.get(i)
        return -1 if joined is None else joined[0] + self._output[i] - joined[1]

    def _out_now(self, i: int) -> int:
        """Its answer so far; a prompt between two chunks does not grow."""
        joined = self._joined.get(i)
        return self._out[i] if joined is None else joined[1] + self._step - joined[0]

    def _leave_batch(self, i: int) -> None:
        """Off the sums; what it felt since it joined is asked now."""
        step, _ = self._joined[i]
        out = self._out_now(i)
        # Its first step it felt alone; from the second on it shared the gaps of the others.
        largest = self._shared.since(step + 2)
        if largest > self.felt.gap_ps[i]:
            self.felt.gap_ps[i] = largest
        self._out[i] = out
        self._private[i] += self._step - step
        self._batch -= 1
        self._context -= self._prompt[i] + out - 1
        self._left -= self._max_new[i] - out
        del self._joined[i]
        self._fresh.pop(i, None)
        self._full = False

    def _finish(self, i: int) -> None:
        self.cache.leave(self._paths.pop(i), self._private.pop(i), -2 * i - 3)
        self.reservation.ended(i, self._out.pop(i))
        self._full = False

    # --- memory --------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Slots for the next step, and those that are looked ahead to; false if nobody is left.

        A swapped request's slots come back when its copy is done: decoding waits for that only if
        the very next step would not fit.
        """
        ahead = self.reservation.lookahead_steps
        cache, link = self.cache, self.link
        running: list[Running] | None = None
        while self._batch > 1 and cache.available + link.tokens_out < self._batch * ahead:
            running = self._running() if running is None else running
            chosen = victims(running, 1, self._parts.victim_order, self._most_preemptions())
            if not chosen:
                break
            one = running.pop(chosen[0])
            self._preempt(int(one.rid))
        if running is not None:
            self.reservation.retracted(running)
            self._retracted = True
        while cache.available < self._batch:
            end = link.next_end_ps
            if end is not None:
                self.felt.stalled_ps += max(0, end - self.now)
                self.now = max(self.now, end)
                self._copied()
            elif self._batch == 1:
                self._abort_last()
                return False
            else:
                self._preempt(self._first_victim(), recompute=True)
        return True

    def _first_victim(self) -> int:
        running = self._running()
        order = self._parts.victim_order
        chosen = victims(running, 1, order, self._most_preemptions())
        return int(running[chosen[0] if chosen else 0].rid)

    def _most_preemptions(self) -> int:
        return self.side.most_preemptions if self.side.victims == "slo" else 1 << 30

    def _running(self) -> list[Running]:
        """What decodes, as victim selection sees it."""
        slo = self.requests.tbt_slo_ms
        jobs = []
        for i in self._joined:
            out = self._out_now(i)
            context = self._prompt[i] + out - 1
            own = self._private[i] + self._step - self._joined[i][0]
            alone = sum(node.tokens for node in self._paths[i] if node.locks == 1)
            job = Running(
                rid=str(i),
                number=i,
                prompt_tokens=self._prompt[i],
                output_tokens=out,
                max_new_tokens=self._max_new[i],
                private_tokens=own + alone,
                left_tokens=1,
                tbt_slo_ms=slo,
                preemptions=self.felt.preemptions[i],
            )
            if self.side.victims == "slo":
                job.left_tokens = self.reservation.left_tokens(i, out)
                job.preempt_ms = min(self._way_ms(context, own))
            jobs.append(job)
        return jobs

    def _way_ms(self, context: int, own: int) -> tuple[float, float]:
        """Predicted time of swapping and of recomputing."""
        costs = self.costs
        recompute = costs.prefill_ms(own + 1, (own + 1) * (context + 1))
        cost = self._parts.preemption_cost
        if cost is None:
            return math.inf, recompute
        queued = self.link.waiting_bytes(self.now)
        way = cost.choose(
            context,
            lambda rows, whole: costs.prefill_ms(rows, rows * whole),
            prefix_tokens=context - own,
            reusable_tokens=context - own,
            queued_bytes=queued,
        )
        return (way.ms, way.other_ms) if way.way == "swap" else (way.other_ms, way.ms)

    def _preempt(self, i: int, *, recompute: bool = False) -> None:
        """It leaves the batch for the queue."""
        felt = self.felt
        felt.end_ps[i] = self._fresh.get(i, self._last_step_end)
        self._leave_batch(i)
        felt.preemptions[i] += 1
        out, private, path = self._out[i], self._private.pop(i), self._paths.pop(i)
        self.reservation.preempted(i)
        begin = sum(node.tokens for node in path)
        if not recompute and self._swaps(i, private, begin):
            felt.swaps += 1
            self._swapped[i] = begin, private
            self.link.copy_out(private, i, self.now)
        else:
            felt.recomputes += 1
            self.cache.give(private)
        self.cache.unlock(path)
        # The newly evictable memory is used instantly.
        self.cache.evict(self._batch * RETRACT_DECODE_STEPS - self.cache.free)
        self._waiting[i] = Waiting(
            rid=str(i),
            number=i,
            arrived_ms=self._arrived[i] / PS_PER_MS,
            prompt_tokens=self._prompt[i] + out,
            ttft_slo_ms=self.requests.ttft_slo_ms,
            preemptions=felt.preemptions[i],
        )
        if self.side.own_order:
            # It keeps its place: those that came later stand behind it.
            self._waiting.move_to_end(i, last=False)

    def _swaps(self, i: int, private: int, begin: int) -> bool:
        side, parts = self.side, self._parts
        if side.preempt not in ("swap", "auto") or private < 1:
            return False
        if side.preempt == "auto":
            swap, recompute = self._way_ms(begin + private, private)
            if swap >= recompute:
                return False
        return parts.host_pool.reserve(str(i), private)

    def _abort_last(self) -> None:
        """Not even alone does it fit: SGLang ends it."""
        (i,) = self._joined
        self.felt.end_ps[i] = self._fresh.get(i, self._last_step_end)
        self._leave_batch(i)
        self.felt.aborted += 1
        self._finish(i)

    # --- accounts ------------------------------------------------------------------------------

    def _note_peak(self) -> None:
        held = self.cache.locked + self.cache.private
        if held > self.felt.peak_tokens:
            self.felt.peak_tokens = held

    def _checked(self) -> None:
        self.cache.check()
        held = sum(self._private.values()) + sum(
            self._step - step for step, _ in self._joined.values()
        )
        assert held + self.link.tokens_out == self.cache.private
        assert self._batch == len(self._joined)
        assert self._context == sum(self._prompt[i] + self._out_now(i) - 1 for i in self._joined)


_ADDED, _NO_TOKEN, _OTHER, _HELD = range(4)


class _Chosen:
    """A prefill batch in the making."""

    def __init__(self, limit: int | None, input_left: int) -> None:
        self.limit = limit
        self.input_left = input_left
        self.requests: list[int] = []
        self.whole: set[int] = set()
        self.rows = 0
        self.pairs = 0
        self.placed = 0
        self.copied_ps = 0

    @property
    def spent(self) -> bool:
        return self.input_left <= 0 or (self.limit is not None and self.limit <= 0)

    def add(self, i: int, rows: int, pairs: int, whole: bool, placed: int) -> None:
        self.requests.append(i)
        if whole:
            self.whole.add(i)
        self.rows += rows
        self.pairs += pairs
        self.placed += placed
        self.input_left -= rows
        if self.limit is not None:
            self.limit -= rows


def _steps_until(span: int, first: int, rise: int, took: Callable[[int], int], most: int) -> int:
    """The fewest steps that take at least ``span``, which ``most`` steps do."""
    if span <= first:
        return 1
    if rise:
        half = first - rise / 2
        guess = int((math.sqrt(half * half + 2 * rise * span) - half) / rise)
    else:
        guess = span // first
    steps = min(most, max(1, guess))
    # The root is rounded; whole numbers decide.
    while took(steps) < span:
        steps += 1
    while steps > 1 and took(steps - 1) >= span:
        steps -= 1
    return steps
