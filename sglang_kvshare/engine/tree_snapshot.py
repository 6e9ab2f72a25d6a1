"""The radix tree as plain data, for a person to look at: lengths and counts, no token and no salt.

Seams: ``TreeNode`` (``hit_count``, ``last_access_time``, ``lock_ref``).

A snapshot is taken on the scheduler's thread, and so it is bounded: it begins at the root, takes
the most recently used node that it has seen and looks at that node's children, until it has
``most`` nodes or has seen :data:`MOST_SEEN`. That order is the same on every rank.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_kvshare.engine.branches import depth_of, untagged
from sglang_kvshare.engine.condemned import is_condemned
from sglang_kvshare.engine.tenant_nodes import tenant_of
from sglang_kvshare.matching.namespace import Namespace

#: Nodes that are looked at for one snapshot.
MOST_SEEN = 20_000
_DIGEST_BYTES = 5
#: Reuse edges that a snapshot looks at.
_MOST_EDGES = 2000


class UnknownNamespace(ValueError):
    """No node of such a namespace; the message names those that there are."""


@dataclass(frozen=True)
class Asked:
    """What a snapshot shows.

    Attributes:
        key: secret of the asker, so that a namespace's digest says nothing about a weak salt.
        most: nodes.
        namespace: a digest or a tenant's name; ``None`` for all.
    """

    key: bytes
    most: int = 2000
    namespace: str | None = None


@dataclass
class _Names:
    """Digest of each namespace."""

    key: bytes
    _known: dict[tuple[str | None, str | None], str] = field(default_factory=dict)

    def of(self, key: RadixKey) -> str:
        domain = key.cache_salt, untagged(key.extra_key)
        if domain not in self._known:
            self._known[domain] = self.of_encoded(Namespace(*domain).encode())
        return self._known[domain]

    def of_encoded(self, namespace: bytes) -> str:
        if namespace == Namespace().encode():
            return "default"
        return blake2b(namespace, digest_size=_DIGEST_BYTES, key=self.key).hexdigest()


def snapshot(cache: Any, asked: Asked) -> dict[str, Any]:
    """What :meth:`sglang_kvshare.treeview.model.TreePicture.from_json` reads.

    Raises:
        UnknownNamespace: see there.
    """
    begin = time.perf_counter()
    names = _Names(asked.key)
    nodes = _most_recent(cache.root_node, names, asked)
    now = time.monotonic()
    indexed = cache.index.tokens_by_node()
    rows: list[dict[str, Any]] = []
    ends: dict[int, int] = {cache.root_node.id: 0}
    shown_children: dict[int, int] = defaultdict(int)
    namespaces: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        parent = node.parent
        start = ends[parent.id]
        ends[node.id] = start + len(node.key)
        shown_children[parent.id] += 1
        namespace, tenant = names.of(node.key), tenant_of(node)
        namespaces[namespace] |= set() if tenant is None else {tenant}
        rows.append(
            {
                "id": node.id,
                "parent": None if parent is cache.root_node else parent.id,
                "namespace": namespace,
                "tenant": tenant,
                "start": start,
                "tokens": len(node.key),
                "depth": depth_of(node),
                "hits": node.hit_count,
                "locks": node.lock_ref,
                "idle_s": round(max(0.0, now - node.last_access_time), 3),
                "indexed_tokens": indexed.get(node.id, 0),
                "leaving": is_condemned(node),
            }
        )
    for row, node in zip(rows, nodes, strict=True):
        row["hidden_children"] = len(node.children) - shown_children[node.id]
    edges, hidden_edges = _edges(cache, names, set(ends))
    tokens = int(cache.evictable_size() + cache.protected_size())
    # A mirror that failed has lost count.
    in_tree = max(cache.mirror.nodes, len(rows))
    return {
        "pool_tokens": int(cache.token_to_kv_pool_allocator.size),
        "tokens": tokens,
        "nodes_in_tree": in_tree,
        "indexed_tokens": int(cache.index.live_tokens),
        "index_failed": bool(cache.index_failed),
        "hidden_nodes": in_tree - len(rows),
        "hidden_tokens": tokens - sum(row["tokens"] for row in rows),
        "hidden_edges": hidden_edges,
        "namespaces": [
            {"name": name, "tenants": sorted(tenants)}
            for name, tenants in sorted(namespaces.items())
        ],
        "nodes": rows,
        "edges": edges,
        "took_ms": round((time.perf_counter() - begin) * 1e3, 2),
    }


def _most_recent(root: TreeNode, names: _Names, asked: Asked) -> list[TreeNode]:
    """Parents before their children."""
    wanted = None
    if asked.namespace is not None:
        wanted = _namespaces_called(asked.namespace, root, names)
    taken: list[TreeNode] = []
    waiting: list[tuple[float, int, TreeNode]] = []
    tie = count()
    seen = 0

    def look_at(children: Iterable[TreeNode]) -> None:
        nonlocal seen
        # The youngest come first.
        for child in islice(children, MOST_SEEN - seen):
            seen += 1
            if wanted is None or names.of(child.key) in wanted:
                heapq.heappush(waiting, (-child.last_access_time, next(tie), child))

    look_at(reversed(root.children.values()))
    while waiting and len(taken) < asked.most:
        node = heapq.heappop(waiting)[2]
        taken.append(node)
        look_at(reversed(node.children.values()))
    return taken


def _namespaces_called(name: str, root: TreeNode, names: _Names) -> set[str]:
    called: Mapping[str, set[str]] = defaultdict(set)
    for child in islice(reversed(root.children.values()), MOST_SEEN):
        digest = names.of(child.key)
        for one in {digest, tenant_of(child)} - {None}:
            called[one].add(digest)
    if name not in called:
        allowed = ", ".join(sorted(called)[:20]) or "none, for the cache is empty"
        raise UnknownNamespace(f"namespace={name!r}: allowed are {allowed}")
    return called[name]


def _edges(cache: Any, names: _Names, shown: set[int]) -> tuple[list[dict[str, Any]], int]:
    """Reuse edges between nodes that are shown, and the number of the others."""
    root = cache.root_node.id
    told: list[dict[str, Any]] = []
    edges = cache.mirror.edges.latest(_MOST_EDGES)
    donors = cache.index.nodes_of(np.array([edge.last_slot for edge in edges], dtype=np.int64))
    for edge, donor in zip(edges, donors.tolist(), strict=True):
        if donor not in shown or edge.anchor not in shown:
            continue
        told.append(
            {
                "anchor": None if edge.anchor == root else edge.anchor,
                "donor": donor,
                "source": edge.source,
                "length": edge.length,
                "start": edge.start,
                "similarity": round(edge.similarity, 3),
                "kind": edge.kind,
                "hits": edge.hits,
                "deviation": edge.deviation,
                "namespace": names.of_encoded(edge.namespace),
            }
        )
    return told, len(cache.mirror.edges) - len(told)
