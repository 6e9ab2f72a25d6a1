"""Whose text a node of the radix tree holds, and since when.

    checkpoint of alice at 10:00    [a b c d e f g]        one insertion, one node
    split later                     [a b c] -- [d e f g]   one insertion, last node d e f g
                                          \\- [x y]        bob's, 10:05

An insertion is a stretch of one path. Splits cut it, and eviction takes it from its end.

Seam: ``TreeNode`` (takes an attribute).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang.srt.mem_cache.radix_cache import TreeNode

_ATTRIBUTE = "_kvshare_insertion"


@dataclass(eq=False)
class Insertion:
    """What one checkpoint brought; compared by identity.

    Attributes:
        time_s: of the clock of :class:`TenantNodes`.
        last: its deepest node that is still in the tree.
    """

    tenant: str
    time_s: float
    last: TreeNode


def tenant_of(node: TreeNode) -> str | None:
    """The tenant whose request brought the node's tokens, if it was one's."""
    insertion = _insertion_of(node)
    return None if insertion is None else insertion.tenant


def _insertion_of(node: TreeNode) -> Insertion | None:
    return getattr(node, _ATTRIBUTE, None)


class TenantNodes:
    """The insertions of every tenant, oldest first. Each change costs the same with a larger tree.

    Args:
        ttl_s: tenant -> seconds after which an insertion is due.
    """

    def __init__(self, ttl_s: Mapping[str, float]) -> None:
        self._ttl_s = dict(ttl_s)
        self._of_tenant: dict[str, dict[Insertion, None]] = {}
        #: Nothing is due before this time.
        self._due_s = math.inf

    @property
    def tenants(self) -> list[str]:
        """Those that have a node in the tree."""
        return sorted(self._of_tenant)

    def clear(self) -> None:
        self._of_tenant.clear()
        self._due_s = math.inf

    # --- the tree's changes --------------------------------------------------------------------

    def inserted(self, leaf: TreeNode, tenant: str, now_s: float) -> None:
        insertion = Insertion(tenant, now_s, leaf)
        setattr(leaf, _ATTRIBUTE, insertion)
        self._of_tenant.setdefault(tenant, {})[insertion] = None
        self._due_s = min(self._due_s, now_s + self._ttl_s.get(tenant, math.inf))

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` took over the first part of ``lower``."""
        insertion = _insertion_of(lower)
        if insertion is not None:
            setattr(upper, _ATTRIBUTE, insertion)

    def deleted(self, node: TreeNode) -> None:
        """``node``, a leaf, has left the tree; its parent is still known."""
        insertion = _insertion_of(node)
        if insertion is None:
            return
        if _insertion_of(node.parent) is insertion:
            insertion.last = node.parent
        else:
            self._drop(insertion)

    def _drop(self, insertion: Insertion) -> None:
        own = self._of_tenant.get(insertion.tenant, {})
        own.pop(insertion, None)
        if not own:
            self._of_tenant.pop(insertion.tenant, None)

    # --- questions -----------------------------------------------------------------------------

    def nodes_of(self, tenant: str) -> list[TreeNode]:
        """The first node of each insertion of ``tenant``, oldest first."""
        return [_first(insertion) for insertion in self._of_tenant.get(tenant, ())]

    def due_s(self, node: TreeNode) -> float:
        """When the node's tokens are past their time; infinite where they never are."""
        insertion = _insertion_of(node)
        if insertion is None:
            return math.inf
        return insertion.time_s + self._ttl_s.get(insertion.tenant, math.inf)

    def due(self, now_s: float) -> list[TreeNode]:
        """The first node of each insertion that is past its time."""
        if now_s < self._due_s:
            return []
        nodes = []
        self._due_s = math.inf
        for tenant, ttl_s in self._ttl_s.items():
            for insertion in self._in_order(tenant):
                if now_s < insertion.time_s + ttl_s:
                    self._due_s = min(self._due_s, insertion.time_s + ttl_s)
                    break
                nodes.append(_first(insertion))
        return nodes

    def _in_order(self, tenant: str) -> Iterator[Insertion]:
        return iter(self._of_tenant.get(tenant, ()))


def _first(insertion: Insertion) -> TreeNode:
    node = insertion.last
    while _insertion_of(node.parent) is insertion:
        node = node.parent
    return node
