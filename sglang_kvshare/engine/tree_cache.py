"""SGLang's radix cache with a run index over its contents.

Seams: ``register_radix_cache_backend`` and ``default_radix_cache_factory``, and the four
structural mutators of ``RadixCache`` (``_insert_helper``, ``_split_node``, ``_delete_leaf``,
``reset``), through which the index stays coherent; ``checkpoint`` publishes exact KV only;
``evict`` gives way when memory runs short.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, default_radix_cache_factory

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.activation import active_config, off_sentence, switch_off
from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.matching.namespace import Namespace
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.plan import Int64Array, Placement, ReusePlan

logger = logging.getLogger(__name__)


def build_tree_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Factory of the backend ``kvshare``; the first of our code that sees the loaded model.

    Returns:
        KVShare's tree cache, or SGLang's own where KVShare is optional and cannot serve.

    Raises:
        SeamError: a hook does not stand in this process.
        Unsupported: the model, its RoPE or its KV pool is not served.
    """
    from sglang_kvshare.engine import hooks, verdict
    from sglang_kvshare.engine.forward import prepare_worker
    from sglang_kvshare.engine.seams import SeamError, check_seams
    from sglang_kvshare.engine.support import Unsupported

    config = active_config()
    if config is None:
        raise RuntimeError("--radix-cache-backend kvshare needs --kvshare")
    try:
        check_seams()
        hooks.verify()
        prepare_worker(ctx.tp_worker, config)
    except (SeamError, Unsupported) as error:
        # The same on every rank: it depends on the model's class and the pool's alone.
        verdict.refuse(str(error))
        if not config.optional:
            raise
        switch_off()
        if ctx.tp_rank == 0:
            logger.warning("%s", off_sentence(error))
        return default_radix_cache_factory(ctx)
    logger.info("KVShare is on: %s", config.to_json())
    return KVShareRadixCache(ctx.params, config)


class KVShareRadixCache(RadixCache):
    """Stock prefix behaviour, plus plans for what lies beyond the prefix.

    Locks on donors are soft: they keep donors in the tree while anything else can be evicted, and
    give way before an allocation would fail. A donor that is gone costs its tokens, not a request.
    """

    def __init__(self, params: Any, config: KVShareConfig) -> None:
        self.config = config
        allocator = params.token_to_kv_pool_allocator
        # The pool has one page of padding before the first slot that is handed out.
        self.index = RunIndex(allocator.size + params.page_size, config.min_run_tokens)
        self._nodes: dict[int, TreeNode] = {}
        self._holders: set[RequestState] = set()
        #: The index could not follow the tree; nothing is planned until the next flush.
        self.index_failed = False
        super().__init__(params)

    # --- the tree's structure, mirrored in the index ---------------------------------------

    def reset(self) -> None:
        super().reset()
        self.index.clear()
        self._nodes.clear()
        self.index_failed = False
        # The locked nodes are gone with the old tree; there is nothing to unlock.
        for state in self._holders:
            state.placement, state.donor_locks = None, []
        self._holders.clear()

    def _insert_helper(self, node: TreeNode, key: RadixKey, value: Any, *rest: Any) -> Any:
        matched_tokens, leaf = super()._insert_helper(node, key, value, *rest)
        if leaf is not self.root_node and leaf.id not in self._nodes:
            self._mirror(self._mirror_insert, leaf)
        return matched_tokens, leaf

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        self._mirror(self._mirror_split, upper)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self._mirror(self._mirror_delete, node)

    def _mirror(self, change: Callable[[TreeNode], None], node: TreeNode) -> None:
        """The tree has changed already and serves on; an index that cannot follow is given up
        until the next flush, and every request gets its exact prefix as in stock SGLang."""
        if self.index_failed:
            return
        try:
            change(node)
        except Exception:
            logger.exception("KVShare's run index lost the tree; no reuse until the next flush")
            self.index_failed = True

    def _mirror_insert(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        parent_slot = -1 if parent is self.root_node else int(parent.value[-1])
        self._nodes[leaf.id] = leaf
        self.index.insert(
            leaf.id, _namespace(leaf.key), _tokens(leaf.key), _slots(leaf), parent_slot
        )

    def _mirror_split(self, upper: TreeNode) -> None:
        self._nodes[upper.id] = upper
        self.index.reassign(upper.id, _slots(upper))

    def _mirror_delete(self, node: TreeNode) -> None:
        self.index.remove(_slots(node))
        del self._nodes[node.id]

    # --- what a request may take and give ---------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        state = state_of(params.req) if params.req is not None else None
        if state is not None and state.options.reuse == "off":
            return self._empty_match_result
        return super().match_prefix(params)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish what rests on computed values alone.

        row   |-- prefix --|-- computed --|== placed ==|-- computed on placed --|
              0            P              exact_until                            n
                           |<- published->|
        """
        state = state_of(req)
        if state is not None:
            if state.options.reuse == "off" and not req.finished():
                # A checkpoint points the row at the tree's copy, which would be taking from it.
                return
            if state.exact_until is not None:
                up_to = min(up_to, state.exact_until)
                if up_to // self.page_size * self.page_size <= req.kv.cache_protected_len:
                    return
        super().checkpoint(req, up_to=up_to, **kwargs)

    def plan(self, req: Any) -> ReusePlan:
        """Match a request beyond its prefix (``req.prefix_len``); changes nothing."""
        tokens = _int64(req.full_untruncated_fill_ids)
        namespace = Namespace(req.cache_salt, req.extra_key).encode()
        return plan_reuse(
            self.index,
            tokens,
            int(req.prefix_len),
            namespace,
            self.config.max_donors_per_window,
        )

    # --- donors -----------------------------------------------------------------------------

    def hold(self, state: RequestState, placement: Placement) -> int:
        """Keep the donors of ``placement`` in the tree until :meth:`release`.

        Returns:
            the number of donors: cached sequences that serve.
        """
        self.release(state)
        owners = {
            int(number): self._nodes[int(number)]
            for number in np.unique(self.index.nodes_of(placement.slots))
        }
        # A node above another one belongs to the same sequence, and a lock below covers it.
        parents = {parent.id: parent for node in owners.values() for parent in self._above(node)}
        above = parents.keys()
        # A donor that serves is in use, for eviction as well.
        now = time.monotonic()
        for node in (*owners.values(), *parents.values()):
            node.last_access_time = now
        donors = [node for number, node in owners.items() if number not in above]
        state.placement = placement
        state.donor_locks = [self.lock(node) for node in donors]
        self._holders.add(state)
        return len(donors)

    def _above(self, node: TreeNode) -> Iterator[TreeNode]:
        while (node := node.parent) is not self.root_node:
            yield node

    def release(self, state: RequestState) -> None:
        """Let go of a request's donors; what was not placed yet is computed. Idempotent."""
        locks, state.donor_locks, state.placement = state.donor_locks, [], None
        self._holders.discard(state)
        for lock in locks:
            self.unlock(lock)

    @property
    def held_donor_locks(self) -> int:
        return sum(len(state.donor_locks) for state in self._holders)

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        if result.num_tokens_evicted < params.num_tokens and self._holders:
            for state in list(self._holders):
                self.release(state)
            more = super().evict(EvictParams(params.num_tokens - result.num_tokens_evicted))
            result = EvictResult(result.num_tokens_evicted + more.num_tokens_evicted)
        return result

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        state = state_of(req)
        if state is not None:
            self.release(state)
            state.exact_until = None


def _namespace(key: RadixKey) -> bytes:
    # `extra_key` holds the caller's key and the adapter, already apart (`Namespace.tree_key`).
    return Namespace(key.cache_salt, key.extra_key).encode()


def _tokens(key: RadixKey) -> Int64Array:
    return _int64(key.raw_token_ids())


def _slots(node: TreeNode) -> Int64Array:
    return np.asarray(node.value.cpu().numpy(), dtype=np.int64)


def _int64(tokens: array[int] | Iterable[int]) -> Int64Array:
    """A copy: numpy must not keep SGLang's growing array from being resized."""
    if isinstance(tokens, array):
        return np.frombuffer(tokens, dtype=np.int64).copy()
    return np.fromiter(tokens, dtype=np.int64)
