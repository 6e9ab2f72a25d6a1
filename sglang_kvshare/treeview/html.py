"""The picture as a page: the SVG, and the same in tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from sglang_kvshare.treeview import svg, words
from sglang_kvshare.treeview.layout import bands
from sglang_kvshare.treeview.model import TreePicture

_STYLE = """
  :root { color-scheme: light dark; }
  body { margin: 16px auto; max-width: 1240px; padding: 0 12px;
    font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif;
    color: #1f2328; background: #ffffff; }
  svg { max-width: 100%; height: auto; }
  table { border-collapse: collapse; margin: 8px 0 20px; font-size: 13px; }
  th, td { text-align: right; padding: 3px 10px; border-bottom: 1px solid #d1d9e0; }
  th:first-child, td:first-child { text-align: left; }
  summary { cursor: pointer; font-weight: 600; margin: 8px 0; }
  @media (prefers-color-scheme: dark) {
    body { color: #e6edf3; background: #0d1117; } th, td { border-color: #30363d; }
  }
"""


def page(picture: TreePicture) -> str:
    """A whole HTML document, without scripts and without anything from elsewhere."""
    found = bands(picture)
    titles = {band.domain.name: band.domain.title for band in found}
    nodes = (
        (
            titles[node.namespace],
            node.id,
            "" if node.parent is None else node.parent,
            f"{node.start:,}",
            f"{node.tokens:,}",
            words.provenance(node),
            node.hits,
            node.locks,
            words.serves(node),
            words.seconds(node.idle_s),
        )
        for node in picture.nodes
    )
    edges = (
        (
            edge.kind,
            edge.donor,
            f"{edge.source:,}",
            f"{edge.length:,}",
            edge.anchor,
            f"{edge.start:,}",
            f"{edge.similarity:.2f}",
            edge.hits,
            "" if edge.deviation is None else f"{edge.deviation:.3f}",
        )
        for edge in picture.edges
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>KVShare's tree</title><style>{_STYLE}</style></head><body>",
            svg.draw(picture),
            "<details><summary>Reuse edges</summary>",
            *_table(
                (
                    *("kind", "donor node", "from position", "tokens", "anchor node"),
                    *("to position", "similarity", "hits", "deviation"),
                ),
                edges,
            ),
            "</details><details><summary>Nodes</summary>",
            *_table(
                (
                    *("namespace", "node", "parent", "position", "tokens", "provenance"),
                    *("hits", "locks", "serves", "idle"),
                ),
                nodes,
            ),
            f"</details><p>Taken in {picture.took_ms:.1f} ms.</p></body></html>\n",
        ]
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    told = ["<table><tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    for row in rows:
        told.append(
            "<tr>"
            + "".join(f"<td>{escape(words.printable(str(cell)))}</td>" for cell in row)
            + "</tr>"
        )
    return [*told, "</table>"]
