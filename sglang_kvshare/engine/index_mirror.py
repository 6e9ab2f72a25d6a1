"""The indices, kept in step with the radix tree by the tree's own structural changes."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_kvshare.engine.branches import path_tokens, untagged
from sglang_kvshare.matching.namespace import Namespace
from sglang_kvshare.matching.reuse_edges import ReuseEdges
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.tenant_ledger import TenantLedger
from sglang_kvshare.plan import Int64Array

if TYPE_CHECKING:
    from sglang_kvshare.matching.semantic_index import SemanticIndex

logger = logging.getLogger(__name__)


class IndexMirror:
    """Owner of the indices; told of every change of the tree after it happened.

    The tree serves on whatever happens here: an index that cannot follow is given up until the
    next flush, and every request gets its prefix as in stock SGLang. Similar donors are given up on
    their own; runs serve on.

    Args:
        similar: the sketches of what ``index`` holds, or ``None`` where nobody asks for them.
        edges: what served behind the tree's nodes.
        max_depth: tokens of a greater depth serve nobody and are not indexed.
        on_fault: called with ``index`` or ``similar``, what is given up.
        quotas: tenant -> tokens that may serve as donors; the oldest of more leave the indices.
    """

    def __init__(
        self,
        index: RunIndex,
        max_depth: int,
        on_fault: Callable[[str], None],
        similar: SemanticIndex | None = None,
        edges: ReuseEdges | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self.index = index
        #: Dropped with the index; a fault of theirs is the index's.
        self.edges = ReuseEdges(index, 0) if edges is None else edges
        #: ``None`` where no tenant has a quota.
        self.ledger = TenantLedger(index.slots, quotas) if quotas else None
        self.failed = False
        self._similar = similar
        self._max_depth = max_depth
        self._on_fault = on_fault
        self._nodes: dict[int, TreeNode] = {}
        #: Numbers of nodes that are in the tree and of which nothing is in the indices.
        self._retired: set[int] = set()
        self.similar_failed = False

    @property
    def similar(self) -> SemanticIndex | None:
        """Where similar donors are found; ``None`` when they are not wanted or given up."""
        return None if self.failed or self.similar_failed else self._similar

    @property
    def nodes(self) -> int:
        """Nodes of the tree, as far as it was followed."""
        return len(self._nodes)

    def clear(self) -> None:
        self.edges.clear()
        self.index.clear()
        self._clear_ledger()
        self._nodes.clear()
        self._retired.clear()
        self.failed = False
        self.similar_failed = False
        self._similar_follows(lambda similar: similar.clear())

    def forget_donors(self) -> None:
        """Nothing that is cached now serves as a donor; the tree itself stays."""
        self._similar_follows(lambda similar: similar.clear())

        def change() -> None:
            self.edges.clear()
            self.index.clear()

        self._follow(change)
        self._clear_ledger()

    def _clear_ledger(self) -> None:
        if self.ledger is not None:
            self.ledger.clear()

    def discard(self, slots: Int64Array) -> None:
        """Tokens that are no donors any more, although the tree still owns their slots."""
        self._follow(lambda: self._discard(slots))

    def retire(self, nodes: Iterable[TreeNode]) -> None:
        """No token of ``nodes`` is a donor any more; they are still in the tree."""

        def change() -> None:
            self._discard(np.concatenate([_slots(node) for node in nodes]))
            self._retired.update(node.id for node in nodes)

        self._follow(change)

    def _discard(self, slots: Int64Array) -> None:
        if not slots.shape[0]:
            return
        self._similar_follows(lambda similar: similar.remove(slots))
        self.index.discard(slots)
        if self.ledger is not None:
            self.ledger.removed(slots)
        self.edges.slots_gone(slots)
        self.edges.recheck()

    def relearn(self, namespaces: Iterable[bytes]) -> None:
        """Text of ``namespaces`` was forgotten: nothing of it weighs in sketches any more."""
        self._similar_follows(lambda similar: similar.relearn(namespaces))

    def give_up_similar(self) -> None:
        """No similar donors until the next flush."""
        self.similar_failed = True
        self._on_fault("similar")

    def owners(self, slots: Int64Array) -> dict[int, TreeNode]:
        """The tree nodes that own ``slots``, by number."""
        numbers = np.unique(self.index.nodes_of(slots)).tolist()
        return {number: self._nodes[number] for number in numbers}

    def inserted(
        self, leaf: TreeNode, depth: int | None, placed: Int64Array, tenant: str | None = None
    ) -> None:
        """``leaf`` is new in the tree.

        Args:
            depth: of its provenance; ``None`` for values that must never serve as donors.
            placed: positions (of the whole sequence, ascending) that hold moved values. They are
                no donors: a key is never rotated twice, and their own donors serve better.
            tenant: whose tokens they are.
        """
        self._follow(lambda: self._insert(leaf, depth, placed, tenant))

    def split(self, upper: TreeNode) -> None:
        """``upper`` took over the first part of its only child."""

        def change() -> None:
            self._nodes[upper.id] = upper
            self.index.reassign(upper.id, _slots(upper))

        self._follow(change)

    def deleted(self, node: TreeNode) -> None:
        """``node`` has left the tree."""

        def change() -> None:
            if node.id in self._retired:
                self._retired.remove(node.id)
            else:
                slots = _slots(node)
                self._similar_follows(lambda similar: similar.remove(slots))
                self.index.remove(slots)
                if self.ledger is not None:
                    self.ledger.removed(slots)
                self.edges.slots_gone(slots)
            self.edges.node_gone(node.id)
            del self._nodes[node.id]

        self._follow(change)

    def _insert(
        self, leaf: TreeNode, depth: int | None, placed: Int64Array, tenant: str | None
    ) -> None:
        self._nodes[leaf.id] = leaf
        if depth is None or depth > self._max_depth:
            return
        slots, tokens = _slots(leaf), int64(leaf.key.raw_token_ids())
        end = path_tokens(leaf)
        begin = end - tokens.shape[0]
        namespace = namespace_of(leaf.key)
        above = leaf.parent
        # The root's value is an empty list.
        before = int(above.value[-1]) if len(above.value) else -1
        beyond_quota: list[Int64Array] = []
        for start, stop in _computed(begin, end, placed):
            part = slice(start - begin, stop - begin)
            parent = before if start == begin and before >= 0 and self.index.holds(before) else -1
            self.index.insert(
                leaf.id, namespace, tokens[part], slots[part], parent, position=start, depth=depth
            )
            self._similar_follows(_insertion(namespace, tokens[part], slots[part]))
            if tenant is not None and self.ledger is not None:
                beyond_quota.append(self.ledger.inserted(tenant, slots[part]))
        self._discard(np.concatenate([*beyond_quota, slots[:0]]))

    def _similar_follows(self, change: Callable[[SemanticIndex], None]) -> None:
        if self._similar is None or self.similar_failed:
            return
        try:
            change(self._similar)
        except Exception:
            logger.exception("KVShare's sketches lost the tree; no similar donors until a flush")
            self.give_up_similar()

    def _follow(self, change: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            change()
        except Exception:
            logger.exception("KVShare's run index lost the tree; no donors until the next flush")
            self.failed = True
            self._on_fault("index")


def _insertion(
    namespace: bytes, tokens: Int64Array, slots: Int64Array
) -> Callable[[SemanticIndex], None]:
    return lambda similar: similar.insert(namespace, tokens, slots)


def _computed(begin: int, end: int, placed: Int64Array) -> list[tuple[int, int]]:
    """The stretches of ``[begin, end)`` between placed positions."""
    inside = placed[np.searchsorted(placed, begin) : np.searchsorted(placed, end)]
    if not inside.shape[0]:
        return [(begin, end)]
    edges = np.concatenate([[begin - 1], inside, [end]])
    gaps = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[gap]) + 1, int(edges[gap + 1])) for gap in gaps]


def namespace_of(key: RadixKey) -> bytes:
    """Of a node's key, in a branch or not."""
    # `extra_key` holds the caller's key and the adapter, already apart (`Namespace.tree_key`).
    return Namespace(key.cache_salt, untagged(key.extra_key)).encode()


def _slots(node: TreeNode) -> Int64Array:
    return np.asarray(node.value.cpu().numpy(), dtype=np.int64)


def int64(tokens: array[int] | Iterable[int] | Any) -> Int64Array:
    """A copy: numpy must not keep SGLang's growing array from being resized."""
    if isinstance(tokens, array):
        return np.frombuffer(tokens, dtype=np.int64).copy()
    return np.fromiter(tokens, dtype=np.int64)
