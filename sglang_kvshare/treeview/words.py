"""The same figures in the same words, whatever they are written in."""

from __future__ import annotations

from sglang_kvshare.treeview.model import Edge, Node, TreePicture


def printable(text: str) -> str:
    """A name must not move a cursor, change colours, or break a document."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def tokens(count: int) -> str:
    return f"{count:,} token" + ("" if count == 1 else "s")


def nodes(count: int) -> str:
    return f"{count:,} node" + ("" if count == 1 else "s")


def provenance(node: Node) -> str:
    return "exact" if not node.depth else f"approximate, depth {node.depth}"


def seconds(idle_s: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if idle_s >= 2 * length:
            return f"{idle_s / length:.0f} {unit}"
    return f"{idle_s:.0f} s"


def serves(node: Node) -> str:
    """What of a node is in the index."""
    if node.leaving:
        return "leaving"
    if node.indexed_tokens == node.tokens:
        return "donor"
    return f"{node.indexed_tokens:,} donor tokens" if node.indexed_tokens else "no donor"


def facts(node: Node) -> str:
    told = [
        f"node {node.id}",
        f"positions {node.start:,} to {node.end - 1:,}",
        provenance(node),
        f"{node.hits} hit" + ("" if node.hits == 1 else "s"),
        serves(node),
        f"idle {seconds(node.idle_s)}",
    ]
    if node.tenant is not None:
        told.append(f"of {node.tenant}")
    if node.locks:
        told.append(f"locked by {node.locks}")
    if node.hidden_children:
        told.append(f"{node.hidden_children} more below")
    return ", ".join(told)


def reuse(edge: Edge) -> str:
    like = "the same tokens" if edge.kind == "exact_run" else f"similarity {edge.similarity:.2f}"
    off = "" if edge.deviation is None else f", deviation {edge.deviation:.3f}"
    return (
        f"{tokens(edge.length)} from position {edge.source:,} of node {edge.donor} "
        f"to position {edge.start:,}: {like}, {edge.hits} hit{'' if edge.hits == 1 else 's'}{off}"
    )


def summary(picture: TreePicture) -> list[str]:
    """The first lines of every form."""
    share = picture.tokens / picture.pool_tokens if picture.pool_tokens else 0.0
    told = [
        f"{tokens(picture.tokens)} in {nodes(picture.nodes_in_tree)}, {share:.0%} of the KV pool; "
        f"{picture.indexed_tokens:,} of them can serve as donors"
    ]
    if picture.hidden_nodes:
        told.append(
            f"not shown: {nodes(picture.hidden_nodes)} with {tokens(picture.hidden_tokens)}, "
            "those that were not used for longest, or of other namespaces"
        )
    if picture.hidden_edges:
        told.append(f"not shown: {picture.hidden_edges:,} reuse edges of nodes that are not shown")
    if picture.index_failed:
        told.append("THE INDEX FAILED: nothing is reused until the cache is flushed")
    if not picture.ranks_agree:
        told.append("THE RANKS DO NOT AGREE: this is the tree of the first one")
    if picture.replicas > 1:
        told.append(f"replica {picture.replica} of {picture.replicas}")
    return told
