"""The tree as lines of text."""

from __future__ import annotations

from collections import defaultdict

from sglang_kvshare.treeview import words
from sglang_kvshare.treeview.layout import Band, bands
from sglang_kvshare.treeview.model import Edge, Node, TreePicture

#: Levels that are indented; a conversation may have thousands.
_DEEPEST = 20


def lines(picture: TreePicture) -> str:
    """All of it, with a line break at the end."""
    edges: dict[int | str, list[Edge]] = defaultdict(list)
    for edge in picture.edges:
        edges[edge.namespace if edge.anchor is None else edge.anchor].append(edge)
    told = words.summary(picture)
    for band in bands(picture):
        told += ["", *_namespace(band, edges)]
    if not picture.nodes:
        told += ["", "The cache is empty."]
    return "\n".join(map(words.printable, told)) + "\n"


def _namespace(band: Band, edges: dict[int | str, list[Edge]]) -> list[str]:
    told = [
        f"namespace {band.domain.title}: {words.tokens(band.tokens)} in "
        f"{words.nodes(len(band.boxes))}"
    ]
    told += [f"    reuses {words.reuse(edge)}" for edge in edges[band.domain.name]]
    level: dict[int | None, int] = {None: 0}
    for node in _in_depth_first_order(band):
        level[node.id] = level[node.parent] + 1
        indent = "  " * min(level[node.id], _DEEPEST)
        told.append(f"{indent}{node.tokens:,} {words.facts(node)}")
        told += [f"{indent}    reuses {words.reuse(edge)}" for edge in edges[node.id]]
    return told


def _in_depth_first_order(band: Band) -> list[Node]:
    return [box.node for box in sorted(band.boxes, key=lambda box: (box.top, box.node.start))]
