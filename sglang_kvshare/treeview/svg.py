"""The tree as one SVG that needs nothing from anywhere.

A namespace is a band with an axis of token positions. A node is a box: as wide as its tokens, as
high as the leaves below it are many, coloured by provenance. A reuse edge leads from the donor's
passage to the place where it was needed, with its similarity and hits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from sglang_kvshare.treeview import words
from sglang_kvshare.treeview.layout import Band, Box, bands
from sglang_kvshare.treeview.model import Edge, Node, TreePicture

#: All in pixels.
_WIDTH, _MARGIN, _ROW, _GAP = 1240, 20, 30, 4
_LINE, _TITLE, _AXIS, _BETWEEN = 19, 30, 26, 26
#: Of a letter, about, at 12 pixels.
_LETTER = 6.7
#: With more edges their labels would lie on each other; they are in the tooltips.
_MOST_LABELS = 40

_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .head { font-size: 17px; font-weight: 600; }
  .title { font-size: 14px; font-weight: 600; } .quiet { fill: #59636e; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .box { stroke: #ffffff; stroke-width: 1; }
  .exact { fill: #b6d4fe; } .near { fill: #ffd8a8; } .far { fill: #ffb3b3; }
  .exact.idle { fill: #dbe9fb; } .near.idle { fill: #fdebd3; } .far.idle { fill: #fcdada; }
  .strip { fill: #1f6feb; } .locked { stroke: #1f2328; stroke-width: 2; }
  .leaving { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 5 3; }
  .edge { fill: none; stroke-opacity: .85; } .run { stroke: #0a7d4b; } .similar { stroke: #9333c9; }
  .run-end { fill: #0a7d4b; } .similar-end { fill: #9333c9; }
  .tag { font-size: 11px; font-weight: 600; } .behind { fill: #ffffff; fill-opacity: .88; }
  .run-tag { fill: #0a7d4b; } .similar-tag { fill: #9333c9; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .page { fill: #0d1117; } .quiet { fill: #9198a1; }
    .grid { stroke: #30363d; } .box { stroke: #0d1117; }
    .exact { fill: #1c4a8a; } .near { fill: #7d4a12; } .far { fill: #8a2a2a; }
    .exact.idle { fill: #17304f; } .near.idle { fill: #4a3214; } .far.idle { fill: #4d2020; }
    .strip { fill: #79b8ff; } .locked { stroke: #e6edf3; } .leaving { stroke: #ff7b72; }
    .run { stroke: #3fd68f; } .similar { stroke: #d2a8ff; }
    .run-end, .run-tag { fill: #3fd68f; } .similar-end, .similar-tag { fill: #d2a8ff; }
    .behind { fill: #0d1117; }
  }
"""
#: Seconds without use after which a node is drawn paler.
_IDLE_S = 300.0


@dataclass(frozen=True)
class _Placed:
    """A band with its first row at ``top``; ``scale``: pixels a position."""

    band: Band
    top: float
    scale: float

    def x(self, position: float) -> float:
        return _MARGIN + position * self.scale

    def y(self, row: float) -> float:
        return self.top + row * _ROW


def draw(picture: TreePicture) -> str:
    """A whole SVG document."""
    told = words.summary(picture)
    y = 34.0 + _LINE * len(told) + 46
    placed = []
    for band in bands(picture):
        y += _TITLE + _AXIS
        placed.append(_Placed(band, y, (_WIDTH - 2 * _MARGIN) / max(1, band.length)))
        y += band.rows * _ROW + _BETWEEN
    height = round(y + 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        "<title>Cached tokens and what reuses them</title>",
        f"<style>{_STYLE}</style>",
        "<defs>",
        *(_arrow(kind) for kind in ("run", "similar")),
        "</defs>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        *_head(told),
        *_legend(34.0 + _LINE * len(told) + 16),
    ]
    for one in placed:
        parts += _band(one)
    parts += _edges(placed, picture.edges)
    if not placed:
        parts.append(_text(_MARGIN, y, "The cache is empty."))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(told: list[str]) -> Iterator[str]:
    yield _text(_MARGIN, 28, "Cached tokens and what reuses them", "head")
    for number, line in enumerate(told):
        yield _text(_MARGIN, 50 + _LINE * number, line, "" if number == 0 else "quiet")


def _legend(y: float) -> Iterator[str]:
    x = float(_MARGIN)
    for kinds, label in (
        ("box exact", "exact"),
        ("box near", "approximate, depth 1"),
        ("box far", "deeper"),
        ("box exact idle", f"unused for {words.seconds(_IDLE_S)}"),
        ("box exact locked", "locked"),
        ("box exact leaving", "leaving"),
    ):
        yield f'<rect class="{kinds}" x="{x:.1f}" y="{y:.1f}" width="22" height="14"/>'
        yield _text(x + 28, y + 11.5, label)
        x += 28 + len(label) * _LETTER + 16
    yield f'<rect class="box exact" x="{x:.1f}" y="{y:.1f}" width="22" height="14"/>'
    yield f'<rect class="strip" x="{x:.1f}" y="{y + 11:.1f}" width="14" height="3"/>'
    yield _text(x + 28, y + 11.5, "share that can serve")
    x += 28 + 20 * _LETTER + 16
    for kind, label in (("run", "reused run"), ("similar", "of a similar window")):
        yield (
            f'<path class="edge {kind}" stroke-width="2" marker-end="url(#{kind}-arrow)" '
            f'd="M{x:.1f} {y + 7:.1f}h22"/>'
        )
        yield _text(x + 32, y + 11.5, label)
        x += 32 + len(label) * _LETTER + 16


def _band(placed: _Placed) -> Iterator[str]:
    band, top = placed.band, placed.top
    title = f"{band.domain.title}: {words.tokens(band.tokens)} in {words.nodes(len(band.boxes))}"
    yield _text(_MARGIN, top - _AXIS - 8, title, "title")
    step = _step(band.length)
    for position in range(0, band.length + 1, step):
        x = placed.x(position)
        yield (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8:.1f}" '
            f'y2="{placed.y(band.rows):.1f}"/>'
        )
        last = position + step > band.length
        near_end = x > _WIDTH - _MARGIN - (90 if last else 40)
        label = f"{position:,} tokens" if last else f"{position:,}"
        yield _text(x, top - 12, label, "quiet", "end" if near_end else "start")
    for box in band.boxes:
        yield from _box(placed, box)


def _step(length: int) -> int:
    """Between the marks of an axis: 1, 2 or 5 times a power of ten, about ten of them."""
    step = 1
    while length / step > 10:
        for factor in (2, 5, 10):
            if length / (step * factor) <= 10 or factor == 10:
                step *= factor
                break
    return step


def _box(placed: _Placed, box: Box) -> Iterator[str]:
    node = box.node
    x, y = placed.x(node.start), placed.y(box.top)
    width = max(1.5, node.tokens * placed.scale - 1)
    height = (box.bottom - box.top) * _ROW - _GAP
    yield "<g>"
    yield f"<title>{_escaped(f'{words.tokens(node.tokens)}: {words.facts(node)}')}</title>"
    yield (
        f'<rect class="{_classes(node)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="2"/>'
    )
    if node.indexed_tokens:
        share = min(1.0, node.indexed_tokens / node.tokens) * max(1.0, width - 4)
        yield (
            f'<rect class="strip" x="{x + 2:.1f}" y="{y + height - 4:.1f}" '
            f'width="{share:.1f}" height="3"/>'
        )
    label = _label(node, width)
    if label:
        yield _text(x + 6, y + min(height, _ROW - _GAP) / 2 + 3, label)
    yield "</g>"


def _classes(node: Node) -> str:
    kinds = ["box", ("exact", "near", "far")[min(node.depth, 2)]]
    if node.idle_s >= _IDLE_S:
        kinds.append("idle")
    if node.leaving:
        kinds.append("leaving")
    elif node.locks:
        kinds.append("locked")
    return " ".join(kinds)


def _label(node: Node, width: float) -> str:
    """As much as there is room for."""
    hits = "" if node.hits < 2 else f", {node.hits} hits"
    more = "" if not node.hidden_children else f" (+{node.hidden_children} below)"
    for label in (
        f"{words.tokens(node.tokens)}{hits}{more}",
        f"{node.tokens:,}{hits}{more}",
        f"{node.tokens:,}{more}",
        f"{node.tokens:,}",
    ):
        if len(label) * _LETTER + 10 <= width:
            return label
    return ""


# --- edges ------------------------------------------------------------------------------------


def _edges(placed: list[_Placed], edges: tuple[Edge, ...]) -> Iterator[str]:
    where = {box.node.id: (one, box) for one in placed for box in one.band.boxes}
    below: dict[int, list[int]] = {}
    for one in placed:
        for box in one.band.boxes:
            if box.node.parent is not None:
                below.setdefault(box.node.parent, []).append(box.node.id)
    labels = len(edges) <= _MOST_LABELS
    # What is used most lies on top.
    for edge in sorted(edges, key=lambda edge: edge.hits):
        yield from _edge(where, below, edge, labels)


def _edge(
    where: dict[int, tuple[_Placed, Box]], below: dict[int, list[int]], edge: Edge, labelled: bool
) -> Iterator[str]:
    kind = "run" if edge.kind == "exact_run" else "similar"
    from_band, donor = where[edge.donor]
    holder = _holder(where, below, edge)
    if holder is None:
        return
    to_band, target = where[holder]
    from_x, to_x = from_band.x(edge.source), to_band.x(edge.start)
    from_width = max(2.0, edge.length * from_band.scale)
    to_width = max(2.0, min(edge.length * to_band.scale, _WIDTH - _MARGIN - to_x))
    from_y = from_band.y(donor.top) + 1.5
    to_y = to_band.y(target.top) + 1.5
    thick = min(5.0, 1.2 + 0.5 * edge.hits**0.5)
    start, end = from_x + from_width / 2, to_x + to_width / 2
    # Out of the donor upwards where it is on the same row, else straight towards the target.
    lift = 26.0 if abs(to_y - from_y) < _ROW else 0.4 * abs(to_y - from_y)
    turn = 1 if to_y > from_y + _ROW else -1
    first_y = from_y + turn * lift
    last_y = to_y - turn * lift if abs(to_y - from_y) >= _ROW else to_y - lift
    yield "<g>"
    yield f"<title>{_escaped(words.reuse(edge))}</title>"
    yield f'<rect class="{kind}-end" x="{from_x:.1f}" y="{from_y - 1.5:.1f}" ' + (
        f'width="{from_width:.1f}" height="3"/>'
    )
    yield f'<rect class="{kind}-end" x="{to_x:.1f}" y="{to_y - 1.5:.1f}" ' + (
        f'width="{to_width:.1f}" height="3"/>'
    )
    yield (
        f'<path class="edge {kind}" stroke-width="{thick:.1f}" '
        f'marker-end="url(#{kind}-arrow)" d="M{start:.1f} {from_y:.1f}'
        f'C{start:.1f} {first_y:.1f} {end:.1f} {last_y:.1f} {end:.1f} {to_y:.1f}"/>'
    )
    if labelled:
        hits = f"{edge.hits} hit" + ("" if edge.hits == 1 else "s")
        tag = hits if kind == "run" else f"{edge.similarity:.2f}, {hits}"
        # Where the curve is at its middle.
        x, y = (start + end) / 2, (from_y + 3 * first_y + 3 * last_y + to_y) / 8
        width = len(tag) * _LETTER + 4
        yield (
            f'<rect class="behind" x="{x - width / 2:.1f}" y="{y - 7.5:.1f}" '
            f'width="{width:.1f}" height="15" rx="3"/>'
        )
        yield _text(x, y + 4, tag, f"tag {kind}-tag", "middle")
    yield "</g>"


def _holder(
    where: dict[int, tuple[_Placed, Box]], below: dict[int, list[int]], edge: Edge
) -> int | None:
    """The node below the anchor that holds the edge's target now, or the anchor itself; of an edge
    at the root the first node of its namespace, ``None`` where none is shown."""
    tops = [edge.anchor]
    if edge.anchor is None:
        tops = [
            number
            for number, (_, box) in where.items()
            if box.node.parent is None and box.node.namespace == edge.namespace
        ]
    stack = [number for number in tops if number is not None]
    first = stack[0] if stack else None
    while stack:
        number = stack.pop()
        node = where[number][1].node
        if number != edge.anchor and node.depth and node.start <= edge.start < node.end:
            return number
        if node.start <= edge.start:
            stack += below.get(number, [])
    return first


def _arrow(kind: str) -> str:
    return (
        f'<marker id="{kind}-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" '
        f'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path class="{kind}-end" d="M0 0L8 4L0 8z"/></marker>'
    )


def _text(x: float, y: float, text: str, kinds: str = "", anchor: str = "start") -> str:
    named = f' class="{kinds}"' if kinds else ""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{placed}>{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    """XML has no place for control characters."""
    return escape(words.printable(text))
