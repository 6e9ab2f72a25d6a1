"""Where everything stands in a picture.

position   0        400       800
namespace  |--------|----|              a node: as wide as its tokens, as high as the leaves
           |        |-------|           below it are many
           |--|
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sglang_kvshare.treeview.model import Domain, Node, TreePicture


@dataclass(frozen=True)
class Box:
    """A node in rows ``[top, bottom)`` of its namespace."""

    node: Node
    top: int
    bottom: int


@dataclass(frozen=True)
class Band:
    """A namespace: ``rows`` high, ``length`` positions long."""

    domain: Domain
    boxes: tuple[Box, ...]
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return sum(box.node.tokens for box in self.boxes)


def bands(picture: TreePicture) -> list[Band]:
    """The namespaces, the one with most tokens first."""
    children: dict[int | None, list[Node]] = defaultdict(list)
    tops: dict[str, list[Node]] = defaultdict(list)
    for node in picture.nodes:
        children[node.parent].append(node)
        if node.parent is None:
            tops[node.namespace].append(node)
    told = []
    for domain in picture.namespaces:
        boxes, rows = _stacked(tops[domain.name], children)
        length = max((box.node.end for box in boxes), default=0)
        told.append(Band(domain, tuple(boxes), rows, length))
    return sorted(told, key=lambda band: (-band.tokens, band.domain.name))


def _stacked(tops: list[Node], children: dict[int | None, list[Node]]) -> tuple[list[Box], int]:
    top_of: dict[int, int] = {}
    boxes: list[Box] = []
    row = 0
    # A node is visited twice, before and after what is below it; conversations are too deep for
    # recursion.
    stack = [(node, False) for node in _ordered(tops)]
    while stack:
        node, done = stack.pop()
        below = children[node.id]
        if not done:
            top_of[node.id] = row
            stack.append((node, True))
            stack += [(child, False) for child in _ordered(below)]
        else:
            if not below:
                row += 1
            boxes.append(Box(node, top_of[node.id], row))
    return sorted(boxes, key=lambda box: (box.node.start, box.top)), row


def _ordered(nodes: list[Node]) -> list[Node]:
    """Last first, for a stack: the oldest node is drawn first."""
    return sorted(nodes, key=lambda node: -node.id)
