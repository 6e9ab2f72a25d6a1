"""How long a tenant's text stays: until its time is up, or until the operator forgets the tenant.

Both end in the same way: the tokens leave the index, the similar donors and the tree, and what a
running request holds leaves when it lets go (:mod:`~sglang_kvshare.engine.condemned`). A request of
a forgotten tenant that was running publishes nothing of what it computed before.

Seam: ``Scheduler.get_next_batch_to_run``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_kvshare.engine.condemned import Condemned, is_condemned
from sglang_kvshare.engine.index_mirror import namespace_of
from sglang_kvshare.engine.state import RequestState
from sglang_kvshare.engine.support import Unsupported
from sglang_kvshare.engine.tenant_nodes import TenantNodes, tenant_of
from sglang_kvshare.tenants import Tenant

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Of one tenant; ``None``: none.

    Attributes:
        max_indexed_tokens: cached tokens that may serve as donors; beyond that the oldest leave
            the index, and stay in the tree.
        ttl_s: seconds after which what was cached serves nobody and leaves the tree.
    """

    max_indexed_tokens: int | None = None
    ttl_s: float | None = None


@dataclass(frozen=True)
class Forgotten:
    """What became of a tenant's text.

    Attributes:
        removed_nodes, removed_tokens: that left the tree in this call.
        of_others_tokens: of ``removed_tokens``, text of others that hung below the tenant's.
        left_nodes, left_in_tree: nodes and tokens of the tenant that a full walk over the tree
            finds now. They serve nobody, and leave when the running requests that hold them let go.
        left_in_index: tokens of the tenant, or of no node of the tree, that a full walk over the
            index finds.
        left_windows: the same, for the windows of similar donors.
        removed_from_host: tokens of preempted requests that were copied to host memory; they are
            computed again. What they were in is overwritten with zeros.
        overwritten: what left was overwritten with zeros in the KV pool.
    """

    removed_nodes: int
    removed_tokens: int
    of_others_tokens: int
    left_nodes: int
    left_in_tree: int
    left_in_index: int
    left_windows: int
    removed_from_host: int
    overwritten: bool


def limits_of(tenants: Mapping[str, Tenant], ranks: int) -> dict[str, Limits]:
    """What a tenant file says, for the tree cache.

    Args:
        ranks: tensor-parallel ones.

    Raises:
        Unsupported: a time to live with more than one rank.
    """
    for name, tenant in tenants.items():
        if ranks > 1 and tenant.ttl_s is not None:
            raise Unsupported(
                f"--kvshare does not support ttl_s (tenant {name}) with --tp-size {ranks}: each "
                "rank has a clock of its own, and all must hold the same donors"
            )
    return {
        name: Limits(tenant.max_indexed_tokens, tenant.ttl_s) for name, tenant in tenants.items()
    }


def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of ``Scheduler.get_next_batch_to_run``: the only place where time passes."""
    retention = getattr(self.tree_cache, "retention", None)
    if isinstance(retention, Retention):
        try:
            retention.expire()
        except Exception:
            logger.exception("KVShare could not take away text that is past its time")
            self.tree_cache.fault("retention")
    return original(self, *args, **kwargs)


class Retention:
    """Owner of what is known about tenants' nodes.

    Args:
        cache: the tree.
        limits: by tenant.
        clock: seconds; see :func:`limits_of`.
    """

    def __init__(
        self, cache: Any, limits: Mapping[str, Limits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self.clock = clock
        ttl_s = {name: one.ttl_s for name, one in limits.items() if one.ttl_s is not None}
        self.nodes = TenantNodes(ttl_s)
        self.condemned = Condemned(cache)
        #: How often each tenant was forgotten.
        self._epochs: Counter[str] = Counter()

    def clear(self) -> None:
        self.nodes.clear()
        self.condemned.clear()

    # --- the tree's changes --------------------------------------------------------------------

    def inserted(self, leaf: TreeNode, state: RequestState | None) -> None:
        if state is not None and state.tenant is not None:
            self.nodes.inserted(leaf, state.tenant, self.clock())

    def unlocked(self, node: TreeNode) -> None:
        if self.condemned.nodes:
            self.condemned.unlocked(node)

    # --- requests ------------------------------------------------------------------------------

    def begins(self, state: RequestState) -> None:
        """A prefill begins: what it computes is of this epoch."""
        if state.tenant is not None:
            state.epoch = self._epochs[state.tenant]

    def may_publish(self, req: Any, state: RequestState | None) -> bool:
        """Whether a request's values may go into the tree."""
        return not is_condemned(req.last_node) and not self.outlived(state)

    def outlived(self, state: RequestState | None) -> bool:
        """Whether the request's tenant was forgotten after its prefill had begun."""
        if state is None or state.tenant is None:
            return False
        return state.epoch != self._epochs.get(state.tenant, 0)

    def released(self, req: Any, state: RequestState) -> None:
        """A request has given its KV back, and its row still names the slots."""
        overwrite = self.condemned.overwrite
        if overwrite is None or not req.kv.holds_kv or not self.outlived(state):
            return
        own = slice(req.kv.cache_protected_len, req.kv.kv_allocated_len)
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, own]
        overwrite(row.to(torch.int64))

    # --- the end -------------------------------------------------------------------------------

    def expire(self) -> None:
        """Condemn what is past its time. Called before anything is matched: no plan and no prefix
        of this step holds it."""
        now_s = self.clock()
        due = self.nodes.due(now_s)
        if due:
            self.condemned.take(due)
        self._cache.swapping.expire(now_s)

    def forget(self, tenant: str) -> Forgotten:
        """Condemn all text of ``tenant``; running requests of it publish nothing any more."""
        self._epochs[tenant] += 1
        self.condemned.overwrites = True
        nodes = self.condemned.take(self.nodes.nodes_of(tenant))
        namespaces = {namespace_of(node.key) for node in nodes}
        self._cache.mirror.relearn(namespaces)
        if self._cache.schedule is not None:
            self._cache.schedule.lengths.forget(tenant, namespaces)
        in_host_memory = self._cache.swapping.forget(tenant)
        gone = [node for node in nodes if not node.lock_ref]
        left_nodes, in_tree, in_index, windows = self._left(tenant)
        return Forgotten(
            removed_nodes=len(gone),
            removed_tokens=_tokens(gone),
            of_others_tokens=_tokens([node for node in gone if tenant_of(node) != tenant]),
            left_nodes=left_nodes,
            left_in_tree=in_tree,
            left_in_index=in_index,
            left_windows=windows,
            removed_from_host=in_host_memory,
            overwritten=self.condemned.overwrite is not None and self.condemned.overwrites,
        )

    def _left(self, tenant: str) -> tuple[int, int, int, int]:
        """A walk over all of the tree and all of both indices: nodes, tokens, tokens, windows."""
        owners: dict[int, str | None] = {}
        nodes = in_tree = 0
        stack = list(self._cache.root_node.children.values())
        while stack:
            node = stack.pop()
            owners[node.id] = tenant_of(node)
            if owners[node.id] == tenant:
                nodes, in_tree = nodes + 1, in_tree + len(node.key)
            stack += node.children.values()
        by_node = self._cache.index.tokens_by_node()
        in_index = sum(
            tokens for number, tokens in by_node.items() if owners.get(number, tenant) == tenant
        )
        similar = self._cache.mirror.similar
        windows = 0
        if similar is not None:
            numbers = self._cache.index.nodes_of(similar.window_slots()).tolist()
            windows = sum(owners.get(number, tenant) == tenant for number in numbers)
        return nodes, in_tree, in_index, windows


def _tokens(nodes: list[TreeNode]) -> int:
    return sum(len(node.key) for node in nodes)
