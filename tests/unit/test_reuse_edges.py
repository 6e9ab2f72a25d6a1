"""Reuse edges: what they know, and that none outlives either of its ends."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_kvshare.matching.planner import Behind, plan_reuse
from sglang_kvshare.matching.reuse_edges import ReuseEdges
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.plan import Span

pytestmark = pytest.mark.unit

SHORTEST = 2
#: Edges of fewer tokens are not asked.
ASKED = 4 * SHORTEST
PREFIX = 3
ANCHOR = 900


def ints(values):
    return np.array(list(values), dtype=np.int64)


def donors(*paths, per_node=16):
    index, slot = RunIndex(1_000, SHORTEST), 0
    for node, path in enumerate(paths):
        slots = np.arange(slot, slot + len(path))
        index.insert(node, b"a", ints(path), slots, -1)
        slot += len(path)
    return index, ReuseEdges(index, per_node)


def planned(index, edges, prompt, anchor=ANCHOR, namespace=b"a", **options):
    behind = Behind(edges, anchor)
    return plan_reuse(index, ints(prompt), PREFIX, namespace, 8, behind=behind, **options)


PASSAGE = list(range(100, 140))
PROMPT = [1, 2, 3, 4, 5, *PASSAGE, 6, 7]


def used(index, edges, prompt=PROMPT, anchor=ANCHOR, namespace=b"a"):
    plan = planned(index, edges, prompt, anchor, namespace)
    edges.used(anchor, namespace, plan.spans)
    return plan


def test_what_served_is_known_the_next_time():
    index, edges = donors(PASSAGE)
    first = used(index, edges)
    assert (first.edge_tokens, first.matched_tokens, len(edges)) == (0, 40, 1)
    again = planned(index, edges, PROMPT)
    assert again.edge_tokens == 40
    assert [(s.start, s.source, s.slots.tolist()) for s in again.spans] == [
        (s.start, s.source, s.slots.tolist()) for s in first.spans
    ]
    # Not behind another node, nor in another namespace.
    assert planned(index, edges, PROMPT, anchor=901).edge_tokens == 0
    assert planned(index, edges, PROMPT, namespace=b"b").matched_tokens == 0


def test_tokens_are_compared_and_the_index_serves_where_they_differ():
    index, edges = donors(PASSAGE)
    used(index, edges)
    edited = [*PROMPT[:20], 99, *PROMPT[21:]]
    plan = planned(index, edges, edited)
    assert (plan.edge_tokens, plan.matched_tokens) == (0, 39)
    shifted = [*PROMPT[:PREFIX], 9, *PROMPT[PREFIX:]]
    assert planned(index, edges, shifted).edge_tokens == 0
    assert planned(index, edges, shifted).matched_tokens == 40


def test_a_span_goes_on_where_its_donor_agrees():
    index, edges = donors(PASSAGE)
    used(index, edges, [1, 2, 3, 4, 5, *PASSAGE[10:25], 6, 7])
    longer = [1, 2, 3, *PASSAGE[8:30], 6, 7]
    plan = planned(index, edges, longer)
    assert [(s.start, s.source, s.length) for s in plan.spans] == [(3, 8, 22)]
    assert plan.edge_tokens == 22


def test_the_rest_of_a_prompt_is_looked_up():
    other = list(range(200, 230))
    index, edges = donors(PASSAGE, other)
    used(index, edges)
    plan = planned(index, edges, [*PROMPT[:-1], *other, 8])
    assert (plan.edge_tokens, plan.matched_tokens) == (40, 70)
    # Stretches before and behind, and one between two edges.
    both = [*PROMPT, *other, 8]
    used(index, edges, both)
    plan = planned(index, edges, both)
    assert (plan.edge_tokens, plan.matched_tokens) == (70, 70)


def test_an_edge_dies_with_either_end():
    index, edges = donors(PASSAGE)
    used(index, edges)
    edges.node_gone(ANCHOR + 1)
    assert len(edges) == 1
    edges.node_gone(ANCHOR)
    assert (len(edges), planned(index, edges, PROMPT).edge_tokens) == (0, 0)

    used(index, edges)
    last = np.arange(38, 40)
    index.remove(last)
    edges.slots_gone(last)
    assert (len(edges), planned(index, edges, PROMPT).matched_tokens) == (0, 38)

    used(index, edges)
    middle = np.arange(10, 12)
    index.discard(middle)
    edges.slots_gone(middle)
    edges.recheck()
    assert len(edges) == 0


def test_slots_that_come_back_hold_other_tokens():
    index, edges = donors(PASSAGE)
    used(index, edges)
    slots = np.arange(40)
    index.remove(slots)
    edges.slots_gone(slots)
    index.insert(7, b"a", ints(range(300, 340)), slots, -1)
    plan = planned(index, edges, [1, 2, 3, 4, 5, *range(300, 340), 6, 7])
    assert (plan.edge_tokens, plan.matched_tokens) == (0, 40)


def test_edges_are_bounded_and_the_latest_stay(monkeypatch):
    index, edges = donors(*(range(n, n + 10) for n in range(100, 700, 10)), per_node=3)
    for n in range(100, 700, 10):
        used(index, edges, [1, 2, 3, *range(n, n + 10), 0])
    assert len(edges) == 3
    assert {edge.source + edge.last_slot for edge in edges} == {579, 589, 599}
    monkeypatch.setattr("sglang_kvshare.matching.reuse_edges.MOST_ANCHORS", 2)
    for anchor in range(5):
        used(index, edges, [1, 2, 3, *range(100, 110), 0], anchor=anchor)
    assert {edge.anchor for edge in edges} == {3, 4}


def test_short_spans_do_not_take_the_place_of_those_that_are_asked():
    index, edges = donors(PASSAGE, *(range(n, n + 5) for n in range(200, 260, 5)), per_node=8)
    used(index, edges)
    for _ in range(3):
        used(
            index, edges, [1, 2, 3, *(t for n in range(200, 260, 5) for t in (*range(n, n + 5), 9))]
        )
    lengths = sorted(edge.length for edge in edges)
    assert lengths == [5, 5, 40]
    assert planned(index, edges, PROMPT).edge_tokens == 40


def test_use_and_deviation_are_remembered():
    index, edges = donors(PASSAGE)
    plan = used(index, edges)
    edges.measured(ANCHOR, b"a", plan.spans, {5: 0.25})
    used(index, edges)
    (edge,) = edges
    assert (edge.hits, edge.deviation, edge.kind) == (2, 0.25, "exact_run")
    # Of a plan whose edges are gone nothing is kept.
    edges.clear()
    edges.measured(ANCHOR, b"a", plan.spans, {5: 0.5})
    assert len(edges) == 0


def test_without_edges_nothing_is_kept():
    index, edges = donors(PASSAGE, per_node=0)
    used(index, edges)
    assert len(edges) == 0


def test_deeper_donors_serve_only_who_accepts_them():
    index = RunIndex(1_000, SHORTEST)
    index.insert(0, b"a", ints(PASSAGE), np.arange(40), -1, depth=1)
    edges = ReuseEdges(index, 16)
    plan = planned(index, edges, PROMPT, max_depth=1)
    edges.used(ANCHOR, b"a", plan.spans)
    assert planned(index, edges, PROMPT, max_depth=1).edge_tokens == 40
    assert planned(index, edges, PROMPT).edge_tokens == 0


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


class EdgesMachine(RuleBasedStateMachine):
    """Paths come and go, plans are made and carried out; no edge ever dangles."""

    @initialize(checked=st.sampled_from([0, 256]))
    def begin(self, checked):
        """With 0 no edge is dropped when its donor is torn; none is shown or serves."""
        self.checked = checked
        self.index = RunIndex(2_000, SHORTEST)
        self.edges = ReuseEdges(self.index, 4, most_checked=checked)
        #: node -> (namespace, parent, tokens, slots)
        self.nodes = {}
        self.anchors = set(range(5_000, 5_004))
        self.fresh = iter(range(10_000))
        self.free = list(range(2_000))
        self.dead_slots = set()

    def leaves(self):
        parents = {parent for _, parent, _, _ in self.nodes.values()}
        return sorted(set(self.nodes) - parents)

    @rule(data=st.data(), tokens=TOKENS, namespace=st.sampled_from([b"a", b"b"]))
    def insert(self, data, tokens, namespace):
        if len(self.free) < len(tokens):
            return
        same = [n for n, (ns, _, _, slots) in self.nodes.items() if ns == namespace]
        same = [n for n in same if int(self.nodes[n][3][-1]) not in self.dead_slots]
        parent = data.draw(st.sampled_from([None, *sorted(same)]))
        slots = ints(self.free.pop() for _ in tokens)
        node = next(self.fresh)
        before = -1 if parent is None else int(self.nodes[parent][3][-1])
        self.index.insert(node, namespace, ints(tokens), slots, before)
        self.nodes[node] = (namespace, parent, tokens, slots)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def evict(self, data):
        node = data.draw(st.sampled_from(self.leaves()))
        *_, slots = self.nodes.pop(node)
        self.index.remove(slots)
        self.edges.slots_gone(slots)
        self.edges.node_gone(node)
        self.dead_slots -= set(slots.tolist())
        self.free += slots.tolist()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def discard(self, data):
        *_, slots = self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]
        part = slots[data.draw(st.integers(0, len(slots) - 1)) :][:3]
        self.index.discard(part)
        self.edges.slots_gone(part)
        self.edges.recheck()
        self.dead_slots |= set(part.tolist())

    @rule(anchor=st.integers(5_000, 5_003))
    def anchor_leaves(self, anchor):
        self.edges.node_gone(anchor)
        assert all(edge.anchor != anchor for edge in self.edges)

    @rule(
        data=st.data(),
        anchor=st.integers(5_000, 5_003),
        namespace=st.sampled_from([b"a", b"b"]),
        carried_out=st.booleans(),
    )
    def ask(self, data, anchor, namespace, carried_out):
        paths = [self.path(node) for node in sorted(self.nodes)]
        piece = st.one_of(TOKENS, *([st.sampled_from(paths)] if paths else []))
        prompt = [9] * PREFIX
        for part in data.draw(st.lists(piece, max_size=3)):
            prompt += part
        known = [(e.start, e.last_slot, e.length) for e in self.edges]
        plan = planned(self.index, self.edges, prompt, anchor, namespace)
        twice = planned(self.index, self.edges, prompt, anchor, namespace)
        assert [s.slots.tolist() for s in plan.spans] == [s.slots.tolist() for s in twice.spans]
        assert [(e.start, e.last_slot, e.length) for e in self.edges] == known
        content = self.content(namespace)
        for span in plan.spans:
            slots = span.slots.tolist()
            assert [content[slot] for slot in slots] == prompt[span.start : span.end]
        if carried_out and plan.spans:
            self.edges.used(anchor, namespace, plan.spans)
            longest = max(span.length for span in plan.spans)
            again = planned(self.index, self.edges, prompt, anchor, namespace)
            # The positive control: what has served is known now.
            assert again.edge_tokens >= longest or longest < ASKED

    def path(self, node):
        _, parent, tokens, _ = self.nodes[node]
        return (self.path(parent) if parent is not None else []) + list(tokens)

    def content(self, namespace):
        return {
            slot: token
            for ns, _, tokens, slots in self.nodes.values()
            if ns == namespace
            for token, slot in zip(tokens, slots.tolist(), strict=True)
            if slot not in self.dead_slots
        }

    @invariant()
    def no_edge_dangles(self):
        content = {ns: self.content(ns) for ns in (b"a", b"b")}
        count = 0
        for edge in self.edges:
            count += 1
            donor = self.index.around(edge.last_slot, edge.length - 1, 0)
            assert (donor.position, len(donor.slots)) == (edge.source, edge.length)
            assert all(slot in content[edge.namespace] for slot in donor.slots.tolist())
        assert count == len(self.edges) or not self.checked
        per_node = {}
        for edge in self.edges:
            key = edge.anchor, edge.namespace
            per_node[key] = per_node.get(key, 0) + 1
        assert all(number <= 4 for number in per_node.values())


EdgesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEdges = EdgesMachine.TestCase


def test_of_two_edges_that_begin_together_the_longer_serves():
    index, edges = donors(PASSAGE[:20], PASSAGE)
    edges.used(ANCHOR, b"a", [Span(5, 0, np.arange(0, 20)), Span(5, 0, np.arange(20, 60))])
    (span,) = planned(index, edges, PROMPT).spans
    assert span.slots.tolist() == list(range(20, 60))
