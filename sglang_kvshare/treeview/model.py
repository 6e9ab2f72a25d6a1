"""What is known about a radix tree of cached tokens, as far as a picture shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError


class PictureError(ValueError):
    """No picture can be read from this; the message names the field."""


@dataclass(frozen=True)
class Node:
    """Consecutive tokens of a cached sequence.

    Attributes:
        parent: node that holds the tokens before; ``None`` at the beginning of a sequence.
        namespace: name of a :class:`Domain`.
        tenant: whose request brought the tokens.
        start: position of the first one.
        depth: approximations that rest on each other in its values; 0: exact.
        hits: requests that met it again when they published.
        locks: running requests that hold it.
        idle_s: seconds since it was last used.
        indexed_tokens: of its tokens, those that can serve as donors.
        leaving: it serves nobody any more, and goes when its last lock does.
        hidden_children: children that the picture leaves out.
    """

    id: int
    parent: int | None
    namespace: str
    start: int
    tokens: int
    tenant: str | None = None
    depth: int = 0
    hits: int = 0
    locks: int = 0
    idle_s: float = 0.0
    indexed_tokens: int = 0
    leaving: bool = False
    hidden_children: int = 0

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class Edge:
    """A passage that was used at another place.

    Attributes:
        anchor: node where the exact prefix of the request ended; ``None`` for the root, which all
            namespaces share.
        donor: node that holds the passage, from position ``source`` on.
        start: where the request needed it.
        kind: ``exact_run`` or ``semantic``.
        deviation: measured distance of the values, as a share of their size.
        namespace: of the request.
    """

    anchor: int | None
    donor: int
    source: int
    length: int
    start: int
    similarity: float = 1.0
    kind: str = "exact_run"
    hits: int = 0
    deviation: float | None = None
    namespace: str = ""


@dataclass(frozen=True)
class Domain:
    """A namespace: its digest, and the tenants that have text in it."""

    name: str
    tenants: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        if not self.tenants:
            return self.name
        return f"{', '.join(self.tenants)} ({self.name})"


@dataclass(frozen=True)
class TreePicture:
    """A tree, bounded; parents come before their children.

    Attributes:
        pool_tokens: tokens that the KV pool has room for.
        tokens, nodes_in_tree: in the whole tree.
        hidden_nodes, hidden_tokens, hidden_edges: that the picture leaves out.
        ranks_agree: every tensor-parallel rank told the same.
        took_ms: time on the scheduler's thread.
        replica, replicas: which of the data-parallel replicas it is of.
    """

    pool_tokens: int
    tokens: int
    nodes_in_tree: int
    indexed_tokens: int
    namespaces: tuple[Domain, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    index_failed: bool = False
    hidden_nodes: int = 0
    hidden_tokens: int = 0
    hidden_edges: int = 0
    ranks_agree: bool = True
    took_ms: float = 0.0
    replica: int = 0
    replicas: int = 1
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        seen: set[int] = set()
        named = {domain.name for domain in self.namespaces}
        for node in self.nodes:
            if node.parent is not None and node.parent not in seen:
                raise ValueError(f"node {node.id} comes before its parent {node.parent}")
            if node.namespace not in named:
                raise ValueError(f"node {node.id} is of no namespace: {node.namespace!r}")
            seen.add(node.id)
        for edge in self.edges:
            if not {edge.anchor, edge.donor} <= {*seen, None}:
                raise ValueError(f"an edge between {edge.donor} and {edge.anchor}: no such node")

    @classmethod
    def from_json(cls, content: str | bytes | Mapping[str, Any]) -> TreePicture:
        """Read what :meth:`to_json` wrote, or what a scheduler tells.

        Raises:
            PictureError: not such a thing.
        """
        try:
            if isinstance(content, str | bytes):
                return _ADAPTER.validate_json(content)
            return _ADAPTER.validate_python(dict(content))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the picture"
            raise PictureError(f"{where}: {first['msg']}") from error

    def to_json(self) -> str:
        return json.dumps(asdict(self))


_ADAPTER: TypeAdapter[TreePicture] = TypeAdapter(TreePicture)
