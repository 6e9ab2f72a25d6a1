"""Prefill batches: who is admitted, in which chunks, and what it costs.

    rows of a pass    |- rest of the chunked prompt -|- next waiting -|- one more, cut -|
                      0                                                       limit_rows

SGLang's ``PrefillAdder.add_one_req`` and ``add_chunked_req``. One prompt at a time is in chunks.
Where blocks are reused rows are fewer than tokens, and a chunk takes tokens in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from kvshare_eval.simulator.contents import Contents
from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.decode_batch import DecodeBatch
from kvshare_eval.simulator.felt import Felt
from kvshare_eval.simulator.holdings import Holdings
from kvshare_eval.simulator.holds import Holds
from kvshare_eval.simulator.kv_cache import KvCache
from kvshare_eval.simulator.preemption import Preemption
from kvshare_eval.simulator.reservation import Reservation
from kvshare_eval.simulator.settings import Flags, Side
from kvshare_eval.simulator.swaps import Swaps
from kvshare_eval.simulator.waiting_queue import WaitingQueue
from sglang_kvshare.scheduling.prefill_budget import prefill_tokens


class _Verdict(Enum):
    """On one waiting request."""

    ADDED = auto()
    HELD = auto()
    NO_TOKEN = auto()
    NO_ROW = auto()


@dataclass
class _Chunked:
    """The prompt that is in chunks: how far it is, and rows to come."""

    i: int
    computed: int
    left_rows: int


@dataclass
class _Chosen:
    """A prefill batch in the making.

    Attributes:
        limit_rows: left to it; ``None`` without chunks.
        input_left: tokens until no further request is added.
        requests: numbers, and whether the prompt is computed to its end.
        pairs: of rows and what they attend to.
        placed: tokens that are copied from elsewhere.
        copied_ps: when what was swapped out is back.
    """

    limit_rows: int | None
    input_left: int
    requests: list[tuple[int, bool]] = field(default_factory=list)
    rows: int = 0
    pairs: int = 0
    placed: int = 0
    copied_ps: int = 0

    @property
    def spent(self) -> bool:
        return self.input_left <= 0 or (self.limit_rows is not None and self.limit_rows <= 0)

    def add(self, i: int, rows: int, context: int, whole: bool, placed: int) -> None:
        self.requests.append((i, whole))
        self.rows += rows
        self.pairs += rows * context
        self.placed += placed
        self.input_left -= rows
        if self.limit_rows is not None:
            self.limit_rows -= rows


class Prefill:
    """Chooses prefill batches and runs them.

    Args:
        holds: ``None`` where nobody is ever held.
        tbt_slo_ms: of those that decode.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        queue: WaitingQueue,
        holdings: Holdings,
        contents: Contents,
        cache: KvCache,
        holds: Holds | None,
        swaps: Swaps,
        preemption: Preemption,
        reservation: Reservation,
        costs: Costs,
        flags: Flags,
        side: Side,
        tbt_slo_ms: float | None,
        felt: Felt,
    ) -> None:
        self._batch = batch
        self._queue = queue
        self._holdings = holdings
        self._contents = contents
        self._cache = cache
        self._holds = holds
        self._swaps = swaps
        self._preemption = preemption
        self._reservation = reservation
        self._costs = costs
        self._flags = flags
        self._recompute_ratio = side.recompute_ratio
        #: What a pass beside decoding requests may take; ``None`` for any time.
        self._budget_ms = tbt_slo_ms if side.budget else None
        # With a budget for each pass, what decodes gets a step before the next one.
        self._steps_between = self._budget_ms is not None and side.decode_between
        self._decode_next = False
        self._felt = felt
        self._chunked: _Chunked | None = None

    @property
    def wanted(self) -> bool:
        """Whether the next pass would choose anew, and not find the batch full."""
        return self._chunked is not None or (not self._batch.full and bool(self._queue))

    def run(self, now_ps: int) -> int | None:
        """A prefill batch, if there is one.

        Returns:
            When it ends.
        """
        batch = self._batch
        if not batch.size:
            batch.full = False
        if (batch.full or not self._queue) and self._chunked is None:
            return None
        if self._decode_next:
            self._decode_next = False
            if batch.size:
                return None
        room = self._flags.max_running - batch.size
        if room <= 0 and self._chunked is None:
            batch.full = True
            return None
        chosen = self._choose(room, now_ps)
        return self._compute(chosen, now_ps) if chosen.requests else None

    # --- choosing ------------------------------------------------------------------------------

    def _choose(self, room: int, now_ps: int) -> _Chosen:
        """
        Args:
            room: requests that may be in it.
        """
        batch, reservation = self._batch, self._reservation
        chosen = _Chosen(self._limit_rows(), self._flags.max_prefill_tokens)
        pending = 0
        if self._chunked is not None:
            pending = self._holdings.fill_tokens(self._chunked.i) - self._chunked.computed
        reservation.begin_pass(self._cache.available, pending, batch.left_tokens, batch.size)
        self._queue.touch_prefixes()
        if self._chunked is not None:
            self._continue_chunk(self._chunked, chosen, now_ps)
        # An order changes nothing: where the chunk has spent the pass nobody needs to be asked.
        for i in () if chosen.spent else self._queue.ordered(now_ps):
            if chosen.spent:
                break
            if len(chosen.requests) >= room:
                batch.full = True
                break
            verdict = self._add(i, chosen, now_ps)
            if verdict is _Verdict.HELD:
                continue
            if verdict is _Verdict.NO_TOKEN:
                batch.full = bool(chosen.requests) or batch.size > 0
            if verdict is not _Verdict.ADDED:
                break
            if reservation.exhausted:
                batch.full = True
                break
        return chosen

    def _limit_rows(self) -> int | None:
        """Rows of this pass; ``None`` without chunked prefill."""
        limit = self._flags.chunked_prefill_tokens or None
        batch, costs = self._batch, self._costs
        if self._budget_ms is None or not batch.size or limit is None:
            return limit
        return prefill_tokens(
            lambda rows, context: costs.prefill_ms(rows, rows * context),
            costs.decode_ms(batch.size, batch.context_tokens + batch.size),
            self._budget_ms,
            limit,
            self._chunked.computed if self._chunked is not None else 0,
        )

    def _add(self, i: int, chosen: _Chosen, now_ps: int) -> _Verdict:
        """SGLang's ``add_one_req``."""
        cache, held, reservation = self._cache, self._holdings, self._reservation
        fill, out = held.fill_tokens(i), held.out_tokens[i]
        path = self._contents.matched(i)
        known = len(path)
        prefix = min(sum(node.tokens for node in path), fill - 1)
        holds = self._holds
        if holds is not None and holds.holds(
            self._queue[i], held.prompt_tokens[i], known, prefix, now_ps
        ):
            return _Verdict.HELD
        before = cache.evictable
        cache.lock(path)
        pinned = before - cache.evictable
        extend = fill - prefix
        if not reservation.fits(i, extend, pinned, out):
            cache.unlock(path)
            return _Verdict.NO_TOKEN
        if chosen.limit_rows is None and chosen.requests and extend >= chosen.input_left:
            cache.unlock(path)
            return _Verdict.NO_ROW
        rows, reused = self._rows(i, prefix, extend)
        whole = chosen.limit_rows is None or rows <= chosen.limit_rows
        taken, now_rows = extend, rows
        if not whole:
            assert chosen.limit_rows is not None
            now_rows = chosen.limit_rows
            taken = max(1, extend * now_rows // rows)
        reservation.admitted(i, extend, pinned, out, None if whole else taken)
        if holds is not None:
            holds.begins(i, known)
        if self._felt.admitted_ps[i] < 0:
            self._felt.admitted_ps[i] = now_ps
            self._felt.prefix[i] = prefix
            self._felt.reused[i] = reused
        self._queue.remove(i)
        held.admit(i, path)
        held.take(i, taken)
        if whole:
            chosen.copied_ps = max(chosen.copied_ps, self._swaps.back(i, now_ps))
        else:
            self._chunked = _Chunked(i, prefix + taken, rows - now_rows)
        chosen.add(i, now_rows, prefix + taken, whole, reused)
        return _Verdict.ADDED

    def _rows(self, i: int, prefix: int, extend: int) -> tuple[int, int]:
        """Rows to compute of ``extend`` tokens behind the prefix, and tokens from elsewhere."""
        swapped = self._swaps.of(i)
        if swapped is not None:
            return max(1, extend - swapped.tokens), 0
        if self._holdings.out_tokens[i]:
            return extend, 0
        reused = self._contents.elsewhere_tokens(i, prefix, takes=True)
        return extend - reused + math.ceil(reused * self._recompute_ratio), reused

    def _continue_chunk(self, chunked: _Chunked, chosen: _Chosen, now_ps: int) -> None:
        """SGLang's ``add_chunked_req``."""
        i, rows = chunked.i, chunked.left_rows
        left = self._holdings.fill_tokens(i) - chunked.computed
        limit = rows if chosen.limit_rows is None else chosen.limit_rows
        now_rows = min(rows, self._reservation.chunk_tokens(limit))
        last = now_rows >= rows
        taken = left if last else max(1, left * now_rows // rows)
        while self._cache.available < taken and self._batch.size:
            # Those that decode between the chunks outgrew what was set aside.
            self._preemption.recompute_one(now_ps)
        self._holdings.take(i, taken)
        chunked.computed += taken
        chunked.left_rows -= now_rows
        self._reservation.continued(i, taken, last)
        chosen.add(i, now_rows, chunked.computed, last, 0)
        if last:
            self._chunked = None
            chosen.copied_ps = max(chosen.copied_ps, self._swaps.back(i, now_ps))

    # --- running -------------------------------------------------------------------------------

    def _compute(self, chosen: _Chosen, now_ps: int) -> int:
        """When it ends: with the forward, or with the last copy from the host."""
        felt, held = self._felt, self._holdings
        took = self._costs.prefill_ps(chosen.rows, chosen.pairs, chosen.placed)
        end_ps = max(now_ps + took, chosen.copied_ps)
        felt.prefills += 1
        felt.rows += chosen.rows
        felt.note_held(self._cache.locked + self._cache.private)
        for i, whole in chosen.requests:
            approximate = felt.reused[i] > 0
            if whole:
                held.publish(i, held.prompt_tokens[i], approximate=approximate)
                if self._holds is not None:
                    self._holds.ended(i)
                self._batch.first_token(i, end_ps)
            else:
                assert self._chunked is not None
                held.publish(i, self._chunked.computed, approximate=approximate)
        self._decode_next = self._steps_between
        return end_ps
