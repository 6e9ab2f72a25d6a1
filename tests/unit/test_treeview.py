"""The picture of the tree: what it says, that it holds what it is given, and nothing unescaped."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.treeview import FORMATS, PictureError, TreePicture, render
from sglang_kvshare.treeview.layout import bands
from sglang_kvshare.treeview.model import Domain, Edge, Node

pytestmark = pytest.mark.unit

NODES = (
    Node(1, None, "a1", 0, 400, tenant="alice", hits=5, locks=1, indexed_tokens=400),
    Node(2, 1, "a1", 400, 900, tenant="alice", hits=2, indexed_tokens=900),
    Node(3, 1, "a1", 400, 60, tenant="alice", indexed_tokens=0, depth=1, idle_s=400),
    Node(4, None, "default", 0, 70, leaving=True, locks=2, hidden_children=3),
)
EDGE = Edge(1, 2, 500, 40, 410, 0.87, "semantic", 3, 0.125)
PICTURE = TreePicture(
    pool_tokens=10_000,
    tokens=1500,
    nodes_in_tree=6,
    indexed_tokens=1300,
    namespaces=(Domain("a1", ("alice",)), Domain("default")),
    nodes=NODES,
    edges=(EDGE,),
    hidden_nodes=2,
    hidden_tokens=70,
    hidden_edges=4,
    took_ms=1.5,
)


def svg_of(picture):
    return ElementTree.fromstring(render(picture, "svg")[1])


def named(root, tag):
    return list(root.iter("{http://www.w3.org/2000/svg}" + tag))


def test_json_there_and_back():
    assert TreePicture.from_json(PICTURE.to_json()) == PICTURE
    assert render(PICTURE, "json") == ("application/json", PICTURE.to_json())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": [{"id": 1}]}, "nodes.0.parent"),
        ({"nodes": [{**NODES[1].__dict__}]}, "before its parent"),
        ({"pool_tokens": "many"}, "pool_tokens"),
        ({"version": 2}, "version"),
        ({"edges": [{**EDGE.__dict__, "donor": 99}]}, "no such node"),
        ({"namespaces": []}, "no namespace"),
    ],
)
def test_what_is_no_picture_is_named(change, said):
    with pytest.raises(PictureError, match=said):
        TreePicture.from_json({**json.loads(PICTURE.to_json()), **change})
    with pytest.raises(PictureError, match="the picture"):
        TreePicture.from_json("[]")


def test_the_text_says_it_all():
    text = render(PICTURE, "text")[1]
    assert text.splitlines()[0] == (
        "1,500 tokens in 6 nodes, 15% of the KV pool; 1,300 of them can serve as donors"
    )
    assert "not shown: 2 nodes with 70 tokens" in text
    assert "namespace alice (a1): 1,360 tokens in 3 nodes" in text
    lines = [line.split(",")[0] for line in text.splitlines() if "node " in line]
    assert [line for line in lines if "reuses" not in line][-4:] == [
        "  400 node 1",
        "    900 node 2",
        "    60 node 3",
        "  70 node 4",
    ]
    assert (
        "reuses 40 tokens from position 500 of node 2 to position 410: similarity 0.87, 3 hits, "
        "deviation 0.125"
    ) in text
    assert "leaving" in text
    assert "locked by 2, 3 more below" in text
    assert "approximate, depth 1" in text


def test_boxes_are_as_wide_as_their_tokens_and_as_high_as_their_leaves():
    root = svg_of(PICTURE)
    boxes = [box for box in named(root, "rect") if box.get("rx") == "2"]
    assert len(boxes) == len(NODES)
    widths = [float(box.get("width")) + 1 for box in boxes[:3]]
    # One scale for a namespace: in the order in which they are drawn, by position.
    assert widths[0] / widths[1] == pytest.approx(400 / 900, rel=0.01)
    assert widths[2] / widths[1] == pytest.approx(60 / 900, rel=0.02)
    heights = [float(box.get("height")) for box in boxes]
    assert heights[0] > 2 * heights[1] - 1
    assert boxes[0].get("class") == "box exact locked"
    assert boxes[2].get("class") == "box near idle"
    assert boxes[3].get("class") == "box exact leaving"
    paths = [path for path in named(root, "path") if "marker-end" in path.attrib]
    # Two in the legend.
    assert [path.get("class") for path in paths] == ["edge run", "edge similar", "edge similar"]
    texts = [text.text for text in named(root, "text")]
    assert "0.87, 3 hits" in texts
    assert "400 tokens, 5 hits" in texts


def test_bands_do_not_overlap():
    found = bands(PICTURE)
    assert [(band.domain.name, band.rows, band.length) for band in found] == [
        ("a1", 2, 1300),
        ("default", 1, 70),
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_cache_is_told(form):
    empty = TreePicture(100, 0, 0, 0, (), ())
    content = render(empty, form)[1]
    assert form == "json" or "The cache is empty." in content
    assert form != "svg" or svg_of(empty) is not None


@pytest.mark.parametrize("form", ["svg", "html"])
def test_names_are_escaped(form):
    name = "<script>alert(1)</script>&\"'\x1b[2J\x00"
    evil = replace(
        PICTURE,
        namespaces=(Domain("a1", (name,)), Domain("default")),
        nodes=(replace(NODES[0], tenant=name), *NODES[1:]),
        edges=(replace(EDGE, kind=name),),
    )
    content = render(evil, form)[1]
    assert "<script" not in content
    assert "&lt;script&gt;" in content
    assert "http" not in content.replace("http://www.w3.org/2000/svg", "")
    if form == "svg":
        svg_of(evil)
    text = render(evil, "text")[1]
    assert "\x1b" not in text
    assert "\x00" not in text


@st.composite
def pictures(draw):
    nodes = []
    for number in range(draw(st.integers(0, 25))):
        parent = draw(st.sampled_from([None, *nodes]))
        nodes.append(
            Node(
                number,
                None if parent is None else parent.id,
                draw(st.sampled_from("ab")) if parent is None else parent.namespace,
                0 if parent is None else parent.end,
                draw(st.integers(1, 5000)),
                depth=draw(st.integers(0, 3)),
                hits=draw(st.integers(0, 9)),
                idle_s=draw(st.floats(0, 1e7)),
            )
        )
    edges = [
        Edge(
            draw(st.sampled_from(nodes)).id,
            draw(st.sampled_from(nodes)).id,
            draw(st.integers(0, 9999)),
            draw(st.integers(1, 999)),
            draw(st.integers(0, 9999)),
        )
        for _ in range(draw(st.integers(0, 5)) if nodes else 0)
    ]
    return TreePicture(
        9, 9, 9, 9, (Domain("a"), Domain("b"), Domain("c")), tuple(nodes), tuple(edges)
    )


@given(pictures())
def test_any_tree_is_drawn(picture):
    root = svg_of(picture)
    boxes = [box for box in named(root, "rect") if box.get("rx") == "2"]
    assert len(boxes) == len(picture.nodes)
    height = float(root.get("height"))
    for box in boxes:
        assert float(box.get("x")) >= 0
        assert float(box.get("x")) + float(box.get("width")) <= 1240
        assert 0 < float(box.get("y")) < height
    for band in bands(picture):
        cells = [(row, box.node.start) for box in band.boxes for row in range(box.top, box.bottom)]
        assert len(set(cells)) == len(cells)
        assert sum(not _has_child(picture, box.node) for box in band.boxes) == band.rows
    text = render(picture, "text")[1]
    for node in picture.nodes:
        assert f" node {node.id}, positions" in text
    assert text.count("reuses") == len(picture.edges)


def _has_child(picture, node):
    return any(other.parent == node.id for other in picture.nodes)


def test_a_conversation_of_thousands_of_turns_is_drawn():
    nodes = tuple(Node(i, i - 1 if i else None, "a", i * 10, 10) for i in range(5000))
    deep = TreePicture(1, 1, 1, 1, (Domain("a"),), nodes)
    assert len(named(svg_of(deep), "g")) == 5000
    assert max(map(len, render(deep, "text")[1].splitlines())) < 200
