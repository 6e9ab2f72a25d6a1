"""A live scheduler whose preempted requests are watched, bit by bit.

Every slot is overwritten with NaN as soon as it is free, so that a slot that is given up too early
cannot come back right. What a request has in its row when it is preempted is kept, and compared
with its row when it runs again.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import live_machine
import numpy as np
import torch
from live_machine import LiveConfig, check_empty, check_idle, check_locks, check_slots, tiny

from kvshare_eval.live.scheduler import LiveScheduler
from sglang_kvshare.config import KVShareConfig

TURNS = 2000


class Rig:
    """One scheduler, in a process of its own."""

    def __init__(self, config: LiveConfig, dtype: str, folder: Path) -> None:
        torch.set_num_threads(1)
        live_machine.logging.disable(live_machine.logging.WARNING)
        self.config, self.dtype = config, dtype
        self.folders = [tiny(number).write(folder / str(number)) for number in range(2)]
        self.live = LiveScheduler(
            self.folders[0],
            KVShareConfig(
                min_run_tokens=live_machine.WINDOW,
                min_saved_tokens=1,
                seam_tokens=2,
                tail_tokens=2,
                refresh_slowdown=1e9,
                gate="off",
                # Whom it preempts, and when, is said by each case.
                schedule="stock",
                reserve="stock",
                victims="stock",
                preempt="swap",
                host_pool_mb=2,
            ),
            dtype=dtype,
            page_size=config.page_size,
            max_total_tokens=config.pool,
            chunked_prefill_size=config.chunk,
            enable_mixed_chunk=config.mixed,
            disable_overlap_schedule=not config.overlap,
            max_running_requests=6,
        )
        self.swapping = self.live.cache.swapping
        self.copier = self.swapping.copier
        self.capacity_tokens = self.swapping.pool.capacity_tokens
        runner = self.live.scheduler.tp_worker.model_runner
        pool = runner.token_to_kv_pool
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        self.buffers = [pool.get_key_buffer(layer) for layer in layers]
        self.buffers += [pool.get_value_buffer(layer) for layer in layers]
        #: What a request had in its row: bytes ``[buffers][tokens, ...]``.
        self.before: dict[str, list[torch.Tensor]] = {}
        self.compared: Counter[str] = Counter()
        self.wanted: list[str] = []
        self.admits = True
        self._watch()
        self.begin()

    # --- what is watched -------------------------------------------------------------------------

    def _watch(self) -> None:
        live, scheduler = self.live, self.live.scheduler
        update, defer = scheduler.update_running_batch, scheduler._should_defer_prefill
        free, swap_out = live.cache.free_kv_row, self.swapping.swap_out

        def updating(batch: Any) -> Any:
            self._preempt_wanted(batch)
            return update(batch)

        def freeing(*args: Any) -> None:
            free(*args)
            self.overwrite_free()

        def swapping_out(req: Any) -> None:
            self.before[req.rid] = self.rows(req, req.seqlen - 1)
            swap_out(req)

        scheduler.update_running_batch = updating
        scheduler._should_defer_prefill = lambda batch: not self.admits or defer(batch)
        live.cache.free_kv_row = freeing
        self.swapping.swap_out = swapping_out
        live.on_batch(self._compare)

    def _preempt_wanted(self, batch: Any) -> None:
        """Where SGLang itself retracts."""
        from sglang_kvshare.engine.swapping import preempt

        for rid in [req.rid for req in batch.reqs]:
            if rid in self.wanted:
                self.wanted.remove(rid)
                at = [req.rid for req in batch.reqs].index(rid)
                self.copying = preempt(self.live.scheduler, batch, at)

    def rows(self, req: Any, tokens: int) -> list[torch.Tensor]:
        slots = self.live.rows.req_to_token[req.kv.req_pool_idx, :tokens].to(torch.int64)
        return [buffer[slots].view(torch.uint8).clone() for buffer in self.buffers]

    def overwrite_free(self) -> None:
        page = self.config.page_size
        pages = self.live.allocator.get_all_free_pages()
        slots = (pages[:, None] * page + torch.arange(page)).reshape(-1)
        for buffer in self.buffers:
            buffer[slots] = float("nan")

    def _compare(self, batch: Any) -> None:
        """A batch is about to run: what is in front of its rows must be what was there before."""
        if not batch.forward_mode.is_extend():
            return
        for req, prefix in zip(batch.reqs, batch.prefix_lens, strict=True):
            if not req.retracted_stain:
                continue
            # Of its first chunk: what stands in front of further ones was computed again.
            before = self.before.pop(req.rid, None)
            if before is None or prefix == 0:
                continue
            tokens = min(prefix, before[0].shape[0])
            for was, now in zip(before, self.rows(req, tokens), strict=True):
                assert torch.equal(was[:tokens], now), (req.rid, prefix)
            self.compared[req.rid] += tokens

    # --- what happens ----------------------------------------------------------------------------

    def begin(self) -> None:
        """As after a start."""
        from sglang_kvshare.scheduling.host_pool import HostPool

        self.live.reset()
        assert self.copier.memory.free_tokens == self.capacity_tokens
        self.swapping.pool = HostPool(self.capacity_tokens)
        self.before.clear()
        self.compared.clear()
        self.wanted.clear()
        self.admits = True
        self.seen = self.counts()
        self.fresh = random.Random(5)

    def counts(self) -> Counter[str]:
        totals = self.live.cache.metrics.totals
        return Counter(
            {
                " ".join((series.name.removeprefix("kvshare:"), *values)): int(number)
                for (series, values), number in totals.items()
                if number and ("swap" in series.name or "faults" in series.name)
            }
        )

    def counted(self) -> dict[str, int]:
        """Since :meth:`begin`."""
        return dict(self.counts() - self.seen)

    def new(self, tokens: int) -> list[int]:
        return [self.fresh.randrange(live_machine.VOCAB) for _ in range(tokens)]

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.live.step()
            self.overwrite_free()
            check_slots(self.live)
            check_locks(self.live)
            self.nothing_left_is_free()

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(TURNS):
            if condition():
                return
            self.turn()
        raise AssertionError("it does not come to that")

    def nothing_left_is_free(self) -> None:
        """Slots that a copy reads have not been given up."""
        free = self.live.allocator.get_all_free_pages().numpy()
        for copy in self.swapping.copying:
            assert copy.left is not None
            row = self.live.rows.req_to_token[copy.left.kv.req_pool_idx, : copy.end].numpy()
            assert not np.isin(row // self.config.page_size, free).any()

    def decoding(self, rid: str, tokens: int = 1) -> bool:
        return any(
            req.rid == rid and len(req.output_ids) >= tokens
            for req in self.live.scheduler.running_batch.reqs
        )

    def waiting(self, rid: str) -> bool:
        return any(req.rid == rid for req in self.live.scheduler.waiting_queue)

    def preempt(self, rid: str) -> None:
        """While it decodes, before memory is short."""
        self.until(lambda: self.decoding(rid, 3))
        self.wanted.append(rid)
        self.until(lambda: rid not in self.wanted)
        assert self.waiting(rid)

    @contextmanager
    def held_worker(self) -> Any:
        """Copies out do not begin inside."""
        go = threading.Event()
        self.copier.worker.submit(lambda job: go.wait(120))
        try:
            yield go
        finally:
            go.set()

    def finish(self) -> dict[str, tuple[int, ...]]:
        """Everything runs to its end; what each request said."""
        self.admits = True
        # What was sent is received in a turn.
        self.turn()
        self.until(lambda: self.live.idle)
        self.settle()
        said = {rid: one.ids for rid, one in self.live.finished.items()}
        self.check_nothing_left()
        return said

    def same(self, one: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]) -> bool:
        """Token for token in fp32. In bf16 the rounding of a batch or of a recomputation, stock's
        too, decides between near tokens, and only the number is compared; the bits of what was
        copied are compared in any case."""
        if self.dtype == "float32":
            return one == other
        return {rid: len(ids) for rid, ids in one.items()} == {
            rid: len(ids) for rid, ids in other.items()
        }

    def settle(self) -> None:
        self.swapping._wait()

    def check_nothing_left(self) -> None:
        """free + evictable = pool, nothing locked, host pool empty, and all of its memory free."""
        check_slots(self.live)
        check_idle(self.live)
        assert not self.swapping.left_rows()
        assert self.copier.memory.free_tokens == self.capacity_tokens
        assert self.live.flush()
        check_empty(self.live)

    def untouched(self, calls: dict[str, tuple[list[int], int]], **settings: Any) -> Any:
        """What the same requests say when nothing disturbs them."""
        for rid, (prompt, n_new) in calls.items():
            self.live.submit(rid, prompt, n_new, **settings)
        said = self.finish()
        assert not self.counted(), self.counted()
        self.live.finished.clear()
        return said
