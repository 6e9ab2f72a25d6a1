"""KVShare's tree cache over SGLang's allocators, led through requests without a model.

A request takes the way that SGLang's scheduler leads it: match, lock, plan, allocation with
eviction, publishing, decoding, release. Nothing is computed and nothing is copied.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvshare_eval.simulate.tree_load import Asked
from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.plan import Int64Array
from sglang_kvshare.request import RequestOptions

#: Requests that hold their KV at a time.
RUNNING = 8
_CONTEXT = 16_384


@dataclass(frozen=True)
class PlanTimes:
    """One prompt planned twice in the same tree: with the reuse edges, and as if there were none.

    Times are process times in seconds.
    """

    with_s: float
    without_s: float
    with_tokens: int
    without_tokens: int


@dataclass(frozen=True)
class Served:
    """What one request took, in tokens.

    Attributes:
        kind: see :class:`Asked`.
        exact, branch: of its prefix.
        matched: by the plan that was carried out.
        known: of a plan's matched tokens, those that reuse edges knew.
        planned: matched tokens of that plan, carried out or not.
        evicted: to make room for it.
        times: of its plan, where it was measured and there was one.
    """

    kind: str
    prompt: int
    exact: int
    branch: int
    matched: int
    known: int
    planned: int
    evicted: int
    times: PlanTimes | None = None


@dataclass(eq=False)
class _Req:
    """The attributes of SGLang's ``Req`` that the tree cache and admission read."""

    rid: str
    origin_input_ids: Any
    full_untruncated_fill_ids: Any
    cache_salt: str | None
    kv: Any
    answer: Int64Array
    output_ids: Any = field(default_factory=lambda: array("q"))
    extra_key: str | None = None
    done: bool = False
    prefix_len: int = 0
    last_node: Any = None
    lock: Any = None
    priority: int = 0
    skip_radix_cache_insert: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    return_hidden_states: bool = False
    input_embeds: Any = None
    positional_embed_overrides: Any = None
    multimodal_inputs: Any = None
    session: Any = None
    beam_group: Any = None
    multi_item_delimiter_indices: Any = None
    token_indices_to_pool: Any = None

    def finished(self) -> bool:
        return self.done


class Driver:
    """One tree over one pool.

    Args:
        pool_tokens: KV slots.
        policy: a value of ``--radix-eviction-policy``.
        config: of KVShare; of its selectors one that chooses before the forward.
        times: plan each prompt a second time, without its edges.
    """

    def __init__(
        self, pool_tokens: int, policy: str, config: KVShareConfig, *, times: bool = False
    ) -> None:
        # SGLang chooses its platform when it is imported.
        os.environ.setdefault("SGLANG_PLATFORM", "kvshare_cpu")
        import torch
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from sglang_kvshare.engine.tree_cache import KVShareRadixCache
        from sglang_kvshare.matching.reuse_edges import ReuseEdges

        self._allocator = TokenToKVPoolAllocator(
            pool_tokens, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
        )
        self._rows = ReqToTokenPool(RUNNING + 1, _CONTEXT, "cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self._allocator,
            page_size=1,
            eviction_policy=policy,
        )
        self._int32 = torch.int32
        self.cache = KVShareRadixCache(params, config)
        self.cache.fault = _raise
        self._options = RequestOptions("approximate", config.recompute_ratio, config.selector)
        self._no_edges = ReuseEdges(self.cache.index, 0)
        self._times = times
        self._running: deque[_Req] = deque()
        self._count = 0
        self._plan: Any = None
        self._plan_times: PlanTimes | None = None
        self._plan_of, self._evict_of = self.cache.plan, self.cache.evict
        self.cache.plan = self._watched_plan
        self.cache.evict = self._watched_evict
        self._evicted_tokens = 0

    def serve(self, requests: Iterable[Asked]) -> list[Served]:
        """Lead ``requests`` through the cache, ``RUNNING`` at a time, and let go of all."""
        served = []
        for asked in requests:
            if len(self._running) == RUNNING:
                self._finish(self._running.popleft())
            served.append(self._admit(asked))
        while self._running:
            self._finish(self._running.popleft())
        return served

    # --- the life of a request ---------------------------------------------------------------

    def _admit(self, asked: Asked) -> Served:
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        from sglang_kvshare.engine.admission import plan_admitted, settle
        from sglang_kvshare.engine.state import RequestState, attach

        cache, ids = self.cache, array("q", asked.prompt.tobytes())
        req = _Req(
            rid=f"r{self._count}",
            origin_input_ids=ids,
            full_untruncated_fill_ids=ids,
            cache_salt=f"tenant-{asked.tenant}",
            kv=ReqKvInfo(),
            answer=asked.answer,
        )
        self._count += 1
        state = RequestState(self._options)
        attach(req, state)
        key = RadixKey(ids, None, limit=len(ids) - 1, cache_salt=req.cache_salt)
        match = cache.match_prefix(MatchPrefixParams(key, req=req))
        req.prefix_len = match.device_prefix_len
        req.last_node = match.last_device_node
        req.kv.cache_protected_len = req.prefix_len
        req.lock = cache.lock(req.last_node)
        self._plan, self._plan_times, self._evicted_tokens = None, None, 0
        branch = plan_admitted(cache, req)
        plan = self._plan

        slots = self._allocate(len(ids) - req.prefix_len)
        req.kv.req_pool_idx = self._rows.alloc_rows(1)[0]
        row = self._rows.req_to_token[req.kv.req_pool_idx]
        row[: req.prefix_len] = cache.prefix_device_indices(req)[: req.prefix_len].to(self._int32)
        row[req.prefix_len : len(ids)] = slots.to(self._int32)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(ids)
        exact = req.prefix_len - branch
        if state.placement is not None:
            # What a forward does behind its copy.
            state.note_placed(state.placement)
            cache.release(state)
        settle(state, cache.metrics)
        told = state.report
        cache.checkpoint(req, up_to=len(ids))
        self._running.append(req)
        return Served(
            kind=asked.kind,
            prompt=len(ids),
            exact=exact,
            branch=branch,
            matched=told.reused_tokens + told.recomputed_tokens - branch,
            known=0 if plan is None else plan.edge_tokens,
            planned=0 if plan is None else plan.matched_tokens,
            evicted=self._evicted_tokens,
            times=self._plan_times,
        )

    def _finish(self, req: _Req) -> None:
        """Decode all of the answer, publish and let go."""
        cache, begin = self.cache, len(req.origin_input_ids)
        end = begin + len(req.answer)
        row = self._rows.req_to_token[req.kv.req_pool_idx]
        row[begin:end] = self._allocate(len(req.answer)).to(self._int32)
        req.output_ids = array("q", req.answer.tobytes())
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        req.done = True
        cache.checkpoint(req, up_to=end)
        cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, end)])
        cache.unlock(req.lock)
        cache.on_release(req, checkpointed=True)
        self._rows.free(req)
        req.kv.mark_kv_released()

    def _allocate(self, tokens: int) -> Any:
        self._allocator.evict_to_free_tokens(self.cache, tokens)
        slots = self._allocator.alloc(tokens)
        if slots is None:
            raise RuntimeError(
                f"the pool has no room for {tokens} tokens beside {RUNNING} requests"
            )
        return slots

    # --- what is watched ---------------------------------------------------------------------

    def _watched_evict(self, params: Any) -> Any:
        result = self._evict_of(params)
        self._evicted_tokens += result.num_tokens_evicted
        return result

    def _watched_plan(self, req: Any) -> Any:
        if not self._times:
            self._plan = self._plan_of(req)
            return self._plan
        edges, plans, seconds = self.cache.mirror.edges, {}, {}
        # What comes first finds colder caches: each does, every other time.
        order = (True, False) if self._count % 2 else (False, True)
        for asked in order:
            self.cache.mirror.edges = edges if asked else self._no_edges
            begin = time.process_time()
            plans[asked] = self._plan_of(req)
            seconds[asked] = time.process_time() - begin
        self.cache.mirror.edges = edges
        self._plan = plans[True]
        self._plan_times = PlanTimes(
            seconds[True], seconds[False], plans[True].matched_tokens, plans[False].matched_tokens
        )
        return self._plan


def _raise(step: str) -> None:
    """A fault would be a miss, and a wrong figure."""
    raise RuntimeError(f"KVShare had a fault: {step}")


def share(served: Iterable[Served], of: str, kind: str | None = None) -> float:
    """Tokens ``of`` (a field of :class:`Served`) as a share of the prompts' tokens."""
    these = [one for one in served if kind is None or one.kind == kind]
    return float(np.sum([getattr(one, of) for one in these]) / np.sum([o.prompt for o in these]))
