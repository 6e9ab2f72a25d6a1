"""SGLang's radix cache with a run index over its contents and approximate branches.

Seams: ``register_radix_cache_backend`` and ``default_radix_cache_factory``, and the four
structural mutators of ``RadixCache`` (``_insert_helper``, ``_split_node``, ``_delete_leaf``,
``reset``), through which the index stays coherent; ``match_prefix`` follows branches,
``checkpoint`` publishes them, ``evict`` gives way when memory runs short.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, default_radix_cache_factory

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine import branches
from sglang_kvshare.engine.activation import active_config, off_sentence, switch_off
from sglang_kvshare.engine.branches import exact_ancestor
from sglang_kvshare.engine.donor_locks import DonorLocks
from sglang_kvshare.engine.eligibility import accepts_approximation, scored_tokens
from sglang_kvshare.engine.eviction import DonorsLast
from sglang_kvshare.engine.exact_events import ExactEvents
from sglang_kvshare.engine.index_mirror import IndexMirror, int64
from sglang_kvshare.engine.metrics import IndexSize, Metrics, build_metrics
from sglang_kvshare.engine.retention import Limits, Retention, limits_of
from sglang_kvshare.engine.similar_donors import similar_donors, wanted_sketcher
from sglang_kvshare.engine.state import NOTHING_PLACED, EdgesUsed, RequestState, state_of
from sglang_kvshare.engine.swappable_tree import SwappableRadixCache
from sglang_kvshare.engine.swapping import Swapping, build_swapping
from sglang_kvshare.matching.gaps import GapSettings
from sglang_kvshare.matching.namespace import Namespace
from sglang_kvshare.matching.planner import Behind, plan_reuse
from sglang_kvshare.matching.reuse_edges import ReuseEdges
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.sketch import WindowSketcher
from sglang_kvshare.plan import Placement, ReusePlan
from sglang_kvshare.scheduling.benefit import BenefitGate, BenefitGates
from sglang_kvshare.tenants import TenantError

if TYPE_CHECKING:
    from sglang_kvshare.engine.schedule import Schedule
    from sglang_kvshare.matching.semantic_index import SemanticIndex

logger = logging.getLogger(__name__)


def build_tree_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Factory of the backend ``kvshare``; the first of our code that sees the loaded model.

    Returns:
        KVShare's tree cache, or SGLang's own where KVShare is optional and cannot serve.

    Raises:
        SeamError: a hook does not stand in this process.
        Unsupported: the model, its RoPE, its KV pool or the embedder is not served.
        TenantError: the tenants file cannot be used any more.
    """
    from sglang.srt.runtime_context import get_parallel

    from sglang_kvshare.engine import hooks, tenancy, verdict
    from sglang_kvshare.engine.forward import prepare_worker
    from sglang_kvshare.engine.overwriting import Overwriter
    from sglang_kvshare.engine.schedule_parts import build_schedule
    from sglang_kvshare.engine.seams import SeamError, check_seams
    from sglang_kvshare.engine.support import Unsupported, decoder_layers

    config = active_config()
    if config is None:
        raise RuntimeError("--radix-cache-backend kvshare needs --kvshare")
    try:
        check_seams()
        hooks.verify()
        prepare_worker(ctx.tp_worker, config)
        sketcher = wanted_sketcher(config, ctx.tp_worker)
        tenants = tenancy.read(config)
        limits = {} if tenants is None else limits_of(tenants.file.tenants, ctx.tp_size)
    except (SeamError, Unsupported, TenantError) as error:
        # The same on every rank: it depends on the model's class, the pool's and what is installed.
        verdict.refuse(str(error))
        if not config.optional:
            raise
        switch_off()
        if ctx.tp_rank == 0:
            logger.warning("%s", off_sentence(error))
        return default_radix_cache_factory(ctx)
    # Every rank must come to the same plans, and no two measure the same times.
    gate = BenefitGate() if config.gate == "measured" and ctx.tp_size == 1 else None
    logger.info("KVShare is on: %s", config.to_json())
    layers = len(decoder_layers(ctx.tp_worker.model_runner.model))
    metrics = build_metrics()
    cache = KVShareRadixCache(ctx.params, config, gate, metrics, layers, sketcher, limits)
    cache.retention.condemned.overwrite = Overwriter(ctx.tp_worker.model_runner)
    cache.schedule = build_schedule(cache, ctx, sketcher, tenants)
    cache.replica = get_parallel().dp_rank or 0
    metrics.watch_schedule(cache.schedule.gauges)
    cache.swapping = build_swapping(
        cache, ctx.tp_worker.model_runner, config, ctx.tp_size, ctx.params.tp_cache_group
    )
    return cache


class KVShareRadixCache(SwappableRadixCache):
    """Stock prefix behaviour, plus branches and plans for what lies beyond the exact prefix.

    A fault of ours costs what it would have gained: an exact prefix instead of a branch, a plan, a
    branch that is not published.
    """

    def __init__(
        self,
        params: Any,
        config: KVShareConfig,
        gate: BenefitGate | None = None,
        metrics: Metrics | None = None,
        layers: int = 32,
        sketcher: WindowSketcher | None = None,
        limits: Mapping[str, Limits] | None = None,
    ) -> None:
        self.config = config
        #: Number of this scheduler's replica.
        self.replica = 0
        #: Of every tenant that the operator named.
        self.limits = dict(limits or {})
        self.retention = Retention(self, self.limits)
        self.swapping = Swapping(self)
        #: Decoder layers of the model.
        self.layers = layers
        self.metrics = Metrics() if metrics is None else metrics
        self.metrics.watch(self.index_size)
        allocator = params.token_to_kv_pool_allocator
        # The pool has one page of padding before the first slot that is handed out.
        self.index = RunIndex(allocator.size + params.page_size, config.min_run_tokens)
        similar = None
        if sketcher is not None:
            similar = similar_donors(self.index, config, sketcher, self.fault)
        quotas = {
            name: one.max_indexed_tokens
            for name, one in self.limits.items()
            if one.max_indexed_tokens is not None
        }
        edges = ReuseEdges(self.index, config.reuse_edges_per_node)
        self.mirror = IndexMirror(
            self.index, config.max_depth, lambda what: self.fault(what), similar, edges, quotas
        )
        self.donors = DonorLocks(self.lock, self.unlock)
        #: ``None``: every plan of ``min_saved_tokens`` is carried out. Beside tenants see
        #: :meth:`gate_of`.
        self.gate = gate
        self._gates = BenefitGates() if gate is not None and config.tenants else None
        #: Set by the factory; ``None`` leaves scheduling to SGLang.
        self.schedule: Schedule | None = None
        #: Counts the model's weights; see :meth:`forget_donors`.
        self.generation = 0
        #: The request whose values are being inserted, if it is one of ours.
        self._publishing: RequestState | None = None
        super().__init__(params)
        self.eviction_strategy = DonorsLast(
            self.eviction_strategy, config.donor_weight, allocator.size
        )
        self.kv_events = ExactEvents(self.kv_events)

    def fault(self, step: str) -> None:
        """Count a fault of ours that became a miss."""
        self.metrics.fault(step)

    def index_size(self) -> IndexSize:
        """The figures of the gauges; costs no more with a larger index."""
        return IndexSize(
            tokens=self.index.live_tokens,
            namespaces=self.index.namespaces,
            entries=self.index.entries,
            bytes=self.index.nbytes,
            donor_locks=self.held_donor_locks,
            host_pool_tokens=self.swapping.used_tokens,
            failed=self.index_failed,
        )

    def gate_of(self, reqs: Iterable[Any]) -> BenefitGate | None:
        """The gate that decides for ``reqs`` and learns from a forward of them, if there is one."""
        if self._gates is None:
            return self.gate
        states = (state_of(req) for req in reqs)
        return self._gates.of({state.domain for state in states if state is not None})

    # --- the tree's structure, mirrored in the index ---------------------------------------

    def reset(self) -> None:
        super().reset()
        self.mirror.clear()
        self.donors.drop()
        self.retention.clear()

    def forget_donors(self) -> None:
        """The model's weights are other ones now: no donor, no branch and no host copy serves any
        more.

        Exact prefixes are SGLang's to drop or keep (``flush_cache`` of the update request).
        """
        self.generation += 1
        self.mirror.forget_donors()
        self.donors.release_all()
        self.swapping.drop_all()

    def _insert_helper(self, node: TreeNode, key: RadixKey, value: Any, *rest: Any) -> Any:
        matched_tokens, leaf = super()._insert_helper(node, key, value, *rest)
        if matched_tokens < len(key):
            state = self._publishing
            if state is not None and branches.is_approximate(leaf):
                depth = max(state.depth, branches.depth_of(leaf.parent))
                branches.set_depth(leaf, depth)
            self.retention.inserted(leaf, state)
            self._new_leaf(leaf, state)
        return matched_tokens, leaf

    def _new_leaf(self, leaf: TreeNode, state: RequestState | None) -> None:
        tenant = None if state is None else state.tenant
        if state is not None and state.generation != self.generation:
            # Computed by weights that are gone, in part at least.
            self.mirror.inserted(leaf, None, NOTHING_PLACED)
        elif state is None or not branches.is_approximate(leaf):
            self.mirror.inserted(leaf, 0, NOTHING_PLACED, tenant)
        else:
            depth = branches.depth_of(leaf)
            self.mirror.inserted(leaf, depth, state.placed_positions(), tenant)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        branches.set_depth(upper, branches.depth_of(child))
        self.eviction_strategy.split(upper, child)
        self.retention.nodes.split(upper, child)
        self.mirror.split(upper)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self.retention.nodes.deleted(node)
        self.mirror.deleted(node)

    def dec_lock_ref(self, node: TreeNode, params: Any = None) -> Any:
        result = super().dec_lock_ref(node, params)
        self.retention.unlocked(node)
        return result

    # --- what a request may take -------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        state = state_of(params.req) if params.req is not None else None
        found = self._in_the_tree(params, state)
        return found if state is None else self.swapping.promised(found, len(params.key), state)

    def _in_the_tree(self, params: MatchPrefixParams, state: RequestState | None) -> MatchResult:
        if state is not None and state.options.reuse == "off":
            return self._empty_match_result
        exact = super().match_prefix(params)
        try:
            if state is None or not accepts_approximation(params.req, state):
                return exact
            if self.swapping.beats_branch(exact, state):
                return exact
            return self._along_branch(params.key, exact, state)
        except Exception:
            logger.exception("KVShare could not follow a branch; the exact prefix serves")
            self.fault("match")
            return exact

    def _along_branch(self, key: RadixKey, exact: MatchResult, state: RequestState) -> MatchResult:
        """``exact``, or a branch that reaches ``min_run_tokens`` further."""
        whole = len(key) // self.page_size * self.page_size
        tagged = RadixKey(
            key.token_ids,
            branches.tagged(key.extra_key, state.options.quality, self.generation),
            limit=whole,
            cache_salt=key.cache_salt,
        )
        end = exact.device_prefix_len
        found = branches.longest_branch(tagged, exact.last_device_node, end, self.page_size)
        if found is None or found.end < end + self.config.min_run_tokens:
            return exact
        _, node = self._match_prefix_helper(found.node, tagged[found.start : found.end])
        return exact._replace(
            device_prefix_len=found.end,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def plan(self, req: Any) -> ReusePlan:
        """Match a request beyond its prefix (``req.prefix_len``); changes nothing.

        A fault among similar donors costs these alone: runs are planned.
        """
        similar = self.mirror.similar
        if similar is None:
            return self._plan(req, None)
        try:
            return self._plan(req, similar)
        except Exception:
            # What fails without them too is no fault of theirs, and is raised.
            plan = self._plan(req, None)
            logger.exception("KVShare could not look for similar donors")
            self.mirror.give_up_similar()
            return plan

    def _plan(self, req: Any, similar: SemanticIndex | None) -> ReusePlan:
        state = state_of(req)
        return plan_reuse(
            self.index,
            int64(req.full_untruncated_fill_ids),
            int(req.prefix_len),
            _namespace_of(req),
            self.config.max_donors_per_window,
            max_depth=self.config.max_depth,
            scored_tokens=scored_tokens(req),
            similar=similar,
            gaps=GapSettings(
                self.config.min_semantic_run_tokens,
                self.config.min_window_coverage,
                self.config.max_depth,
            ),
            behind=Behind(self.mirror.edges, exact_ancestor(req.last_node)[0].id),
            shared=() if state is None else state.shared_namespaces,
        )

    def hold(self, state: RequestState, placement: Placement) -> int:
        """Keep the donors of ``placement`` in the tree until released; returns their number."""
        owners = self.mirror.owners(placement.slots)
        for node in owners.values():
            self.eviction_strategy.used(node)
        return self.donors.hold(state, placement, owners)

    def carried_out(self, req: Any, state: RequestState, plan: ReusePlan) -> None:
        """``plan`` serves ``req``: reuse edges say so to prompts that come to the same node."""
        used = EdgesUsed(exact_ancestor(req.last_node)[0].id, _namespace_of(req), plan.spans)
        state.edges = used
        self._edges_follow(lambda: self.mirror.edges.used(used.anchor, used.namespace, used.spans))
        self.metrics.planned_tokens(plan)

    def measured(self, state: RequestState) -> None:
        """The deviations of ``state``'s spans are known."""
        used, found = state.edges, state.deviations
        if used is not None and found:
            self._edges_follow(
                lambda: self.mirror.edges.measured(used.anchor, used.namespace, used.spans, found)
            )

    def _edges_follow(self, change: Callable[[], None]) -> None:
        try:
            change()
        except Exception:
            logger.exception(
                "KVShare could not keep a reuse edge; the request is served all the same"
            )
            self.mirror.edges.clear()
            self.fault("edges")

    def release(self, state: RequestState) -> None:
        """See :meth:`DonorLocks.release`."""
        self.donors.release(state)

    @property
    def held_donor_locks(self) -> int:
        return len(self.donors)

    @property
    def index_failed(self) -> bool:
        """The index could not follow the tree; no donor serves until the next flush."""
        return self.mirror.failed

    # --- what a request gives -----------------------------------------------------------------

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish exact values as SGLang does, and what rests on placed ones in a branch.

        row   |-- prefix --|-- computed --|== placed ==|-- computed on placed --|
              0            P              exact_until                           n
                           |<-- exact --->|<--------------- branch ------------>|
        """
        state = state_of(req)
        if not self.retention.may_publish(req, state):
            return
        if state is None:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        if state.options.reuse == "off" and not req.finished():
            # A checkpoint points the row at the tree's copy, which would be taking from it.
            return
        if self.schedule is not None:
            self.schedule.computed(req)
        self._publishing = state
        try:
            if state.exact_until is None:
                super().checkpoint(req, up_to=up_to, **kwargs)
                return
            exact = min(up_to, state.exact_until) // self.page_size * self.page_size
            if req.kv.cache_protected_len < exact:
                super().checkpoint(req, up_to=exact, **kwargs)
            self._publish_branch(req, state, up_to)
        finally:
            self._publishing = None

    def _publish_branch(self, req: Any, state: RequestState, up_to: int) -> None:
        try:
            prepared = self._prepare_branch(req, state, up_to)
        except Exception:
            logger.exception("KVShare could not publish a branch; the request keeps its slots")
            self.fault("publish")
            return
        if prepared is not None:
            self._insert_branch(req, state, *prepared)

    def _prepare_branch(
        self, req: Any, state: RequestState, up_to: int
    ) -> tuple[TreeNode, int, RadixKey] | None:
        """The node to hang the branch on, the branch's first position, and its key."""
        end = up_to // self.page_size * self.page_size
        if end <= req.kv.cache_protected_len:
            return None
        base, branch_tokens = branches.exact_ancestor(req.last_node)
        start = req.kv.cache_protected_len - branch_tokens
        key = RadixKey(
            req.full_untruncated_fill_ids[start:end],
            branches.tagged(req.extra_key, state.options.quality, state.generation),
            cache_salt=req.cache_salt,
        )
        return base, start, key

    def _insert_branch(
        self, req: Any, state: RequestState, base: TreeNode, start: int, key: RadixKey
    ) -> None:
        """As ``RadixCache.checkpoint`` does from the root, from ``base`` at position ``start``."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        end, protected, priority = start + len(key), req.kv.cache_protected_len, req.priority or 0
        values = row[start:end].to(dtype=self._empty_device_indices.dtype, copy=True)
        inserted = max(0, req.kv.cache_inserted_len - start)
        matched, leaf = self._insert_helper(base, key, values, priority, inserted)
        prompt = len(req.origin_input_ids) // self.page_size * self.page_size - start
        if 0 < prompt < len(key):
            # A boundary there, so that the output can leave without the prompt.
            first = min(priority + 1, 2**63 - 1)
            self._insert_helper(base, key[:prompt], values[:prompt], first, prompt)
        state.depth = max(state.depth, branches.depth_of(leaf))
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, end)
        # Where another request was first, its slots stay and this request's are given back.
        self.token_to_kv_pool_allocator.free_segment(
            row[protected : start + matched], start_pos=protected
        )
        indices = self.path_device_indices(leaf)
        assert len(indices) == end, f"{len(indices)=}, {end=}"
        self.req_to_token_pool.write(
            (req.kv.req_pool_idx, slice(protected, end)), indices[protected:]
        )
        req.kv.cache_protected_len = end
        self.unlock(req.lock)
        req.lock = self.lock(leaf)
        req.last_node = leaf

    # --- what it gives up -----------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        missing = params.num_tokens - result.num_tokens_evicted
        if missing > 0 and (waited := self.swapping.make_room(missing)):
            result = EvictResult(result.num_tokens_evicted + waited)
        if result.num_tokens_evicted < params.num_tokens and self.donors.holders:
            try:
                self.donors.release_all()
            except Exception:
                logger.exception("KVShare could not let go of its donors")
                self.fault("alloc")
            more = super().evict(EvictParams(params.num_tokens - result.num_tokens_evicted))
            result = EvictResult(result.num_tokens_evicted + more.num_tokens_evicted)
        self.eviction_strategy.evicted(result.num_tokens_evicted)
        return result

    def release_aborted_request(self, handle: Any) -> None:
        super().release_aborted_request(handle)
        if self.schedule is not None:
            self.schedule.aborted_waiting(handle.rid)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        state = state_of(req)
        if state is not None:
            self.retention.released(req, state)
            self.release(state)
            if self.schedule is not None:
                self.schedule.ended(req, state)
            state.end()
            if req.finished():
                self.swapping.finished(state)


def _namespace_of(req: Any) -> bytes:
    return Namespace(req.cache_salt, req.extra_key).encode()
