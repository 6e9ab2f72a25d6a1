"""The run index against a slow, clear oracle, while the tree under it grows, splits and shrinks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex

pytestmark = pytest.mark.unit

WINDOW = 4
POOL = 256


def ints(values):
    return np.array(list(values), dtype=np.int64)


class Donor:
    """One cached sequence: tokens, slots and positions, as a path from the root."""

    def __init__(self, namespace, tokens, slots):
        self.namespace, self.tokens, self.slots = namespace, list(tokens), list(slots)


def oracle_runs(donors, tokens, namespace, window):
    """Every maximal run as (start, end, donor slots), by comparing all pairs of positions."""
    found = set()
    for donor in donors:
        if donor.namespace != namespace:
            continue
        for i in range(len(tokens)):
            for j in range(len(donor.tokens)):
                before = i > 0 and j > 0 and tokens[i - 1] == donor.tokens[j - 1]
                if before:
                    continue
                length = 0
                while (
                    i + length < len(tokens)
                    and j + length < len(donor.tokens)
                    and tokens[i + length] == donor.tokens[j + length]
                ):
                    length += 1
                if length >= window:
                    found.add((i, i + length, tuple(donor.slots[j : j + length])))
    # A run that is the beginning of a longer one on another branch of the tree is not maximal.
    return {
        run
        for run in found
        if not any(
            other != run and other[0] == run[0] and other[2][: len(run[2])] == run[2]
            for other in found
        )
    }


def found_runs(index, tokens, namespace):
    return {
        (run.start, run.end, tuple(index.run_slots(run).tolist()))
        for run in index.find_runs(ints(tokens), namespace, limit=64)
    }


def test_a_passage_is_found_at_any_offset_and_twice_in_one_prompt():
    index = RunIndex(64, WINDOW)
    passage = [5, 6, 7, 8, 9, 10]
    index.insert(0, b"a", ints([1, 2, *passage, 3]), ints(range(10, 19)), -1)
    prompt = [9, *passage, 4, 4, *passage, 1]
    assert found_runs(index, prompt, b"a") == {
        (1, 7, tuple(range(12, 18))),
        (9, 15, tuple(range(12, 18))),
    }
    plan = plan_reuse(index, ints(prompt), 0, b"a", limit=8)
    assert [(s.start, s.end, s.source) for s in plan.spans] == [(1, 7, 2), (9, 15, 2)]
    assert plan.new_tokens == len(prompt) - 12


def test_equal_hashes_of_unequal_tokens_do_not_match(monkeypatch):
    monkeypatch.setattr(
        "sglang_kvshare.matching.run_index.window_hashes",
        lambda tokens, window, seed: np.zeros(max(0, len(tokens) - window + 1), np.uint64) + 1,
    )
    index = RunIndex(64, WINDOW)
    index.insert(0, b"a", ints(range(8)), ints(range(8)), -1)
    assert found_runs(index, range(100, 108), b"a") == set()
    assert found_runs(index, range(2, 7), b"a") == {(0, 5, (2, 3, 4, 5, 6))}
    assert found_runs(index, range(2, 7), b"b") == set()


def test_namespaces_are_apart_and_the_same_one_does_match():
    index = RunIndex(64, WINDOW)
    index.insert(0, b"tenant-1", ints(range(10)), ints(range(10)), -1)
    assert found_runs(index, range(10), b"tenant-2") == set()
    assert found_runs(index, range(10), b"tenant-1") == {(0, 10, tuple(range(10)))}


def test_the_last_token_is_never_matched_and_the_prefix_is_left_alone():
    index = RunIndex(64, WINDOW)
    index.insert(0, b"a", ints(range(20)), ints(range(20)), -1)
    plan = plan_reuse(index, ints(range(20)), 0, b"a", limit=8)
    assert [(s.start, s.end) for s in plan.spans] == [(0, 19)]
    plan = plan_reuse(index, ints(range(20)), 6, b"a", limit=8)
    assert [(s.start, s.end, s.source) for s in plan.spans] == [(6, 19, 6)]
    assert plan_reuse(index, ints(range(20)), 17, b"a", limit=8).spans == ()


def test_the_longest_run_wins_and_the_rest_is_cut_to_what_is_free():
    index = RunIndex(128, WINDOW)
    index.insert(0, b"a", ints([1, 2, 3, 4, 5, 6, 7, 8]), ints(range(0, 8)), -1)
    index.insert(1, b"a", ints([50, 5, 6, 7, 8, 9, 10, 11, 12, 13]), ints(range(20, 30)), -1)
    plan = plan_reuse(index, ints([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0]), 0, b"a", 8)
    assert [(s.start, s.end, int(s.slots[0])) for s in plan.spans] == [(0, 4, 0), (4, 13, 21)]


def test_two_owners_of_one_slot_are_refused():
    index = RunIndex(16, WINDOW)
    index.insert(0, b"a", ints([1, 2]), ints([3, 4]), -1)
    with pytest.raises(ValueError, match="two owners"):
        index.insert(1, b"a", ints([1]), ints([4]), -1)


def test_matching_has_no_side_effects():
    index = RunIndex(64, WINDOW)
    index.insert(0, b"a", ints(range(20)), ints(range(20)), -1)
    state = (index.entries, index.live_tokens, index.namespaces)
    answers = [index.find_runs(ints(range(3, 15)), b"a", 8) for _ in range(5)]
    assert answers == [answers[0]] * 5
    assert (index.entries, index.live_tokens, index.namespaces) == state


def test_the_index_stays_bounded_when_the_same_content_comes_and_goes():
    index = RunIndex(128, WINDOW)
    for turn in range(400):
        index.insert(turn, b"n%d" % (turn % 3), ints(range(64)), ints(range(64)), -1)
        index.remove(ints(range(64)))
    index.insert(0, b"a", ints(range(64)), ints(range(64)), -1)
    assert index.entries <= 2 * 64 + 1024 + 64
    assert index.namespaces == 1
    assert found_runs(index, range(64), b"a") == {(0, 64, tuple(range(64)))}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
)
def test_separate_donors_equal_the_oracle(contents, prompt):
    index, donors, used = RunIndex(POOL, WINDOW), [], 0
    # Distinct first tokens, as in a tree: equal beginnings would be one node.
    for number, content in enumerate(contents):
        tokens = [100 + number, *content]
        slots = list(range(used, used + len(tokens)))[::-1]
        used += len(tokens)
        index.insert(number, b"a", ints(tokens), ints(slots), -1)
        donors.append(Donor(b"a", tokens, slots))
    assert found_runs(index, prompt, b"a") == oracle_runs(donors, prompt, b"a", WINDOW)


class Node:
    def __init__(self, number, parent, namespace, tokens, slots):
        self.number, self.parent, self.namespace = number, parent, namespace
        self.tokens, self.slots, self.children = tokens, slots, []


class TreeMachine(RuleBasedStateMachine):
    """Insert, split, evict and flush as a radix tree does; ask in between."""

    @initialize()
    def begin(self):
        self.index = RunIndex(POOL, WINDOW)
        self.free = list(range(POOL))
        self.nodes, self.count = [], 0

    def path(self, node):
        tokens, slots = [], []
        while node is not None:
            tokens, slots = node.tokens + tokens, node.slots + slots
            node = node.parent
        return tokens, slots

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14))
    def insert(self, data, tokens):
        if len(self.free) < len(tokens):
            return
        parent = data.draw(st.sampled_from([None, *self.nodes])) if self.nodes else None
        namespace = parent.namespace if parent else data.draw(st.sampled_from([b"a", b"b"]))
        # Children differ in their first token: make it unique to keep the oracle's paths apart.
        tokens = [1000 + self.count, *tokens]
        if len(self.free) < len(tokens):
            return
        picks = data.draw(st.permutations(range(len(self.free))))[: len(tokens)]
        slots = [self.free[i] for i in picks]
        self.free = [s for s in self.free if s not in set(slots)]
        node = Node(self.count, parent, namespace, tokens, slots)
        self.count += 1
        last = parent.slots[-1] if parent else -1
        self.index.insert(node.number, namespace, ints(tokens), ints(slots), last)
        if parent:
            parent.children.append(node)
        self.nodes.append(node)

    @rule(data=st.data())
    def split(self, data):
        long = [node for node in self.nodes if len(node.tokens) > 1]
        if not long:
            return
        node = data.draw(st.sampled_from(long))
        cut = data.draw(st.integers(1, len(node.tokens) - 1))
        upper = Node(self.count, node.parent, node.namespace, node.tokens[:cut], node.slots[:cut])
        self.count += 1
        upper.children = [node]
        if node.parent:
            node.parent.children.remove(node)
            node.parent.children.append(upper)
        node.parent, node.tokens, node.slots = upper, node.tokens[cut:], node.slots[cut:]
        self.nodes.append(upper)
        self.index.reassign(upper.number, ints(upper.slots))

    @rule(data=st.data())
    def evict(self, data):
        leaves = [node for node in self.nodes if not node.children]
        if not leaves:
            return
        node = data.draw(st.sampled_from(leaves))
        self.index.remove(ints(node.slots))
        self.free += node.slots
        self.nodes.remove(node)
        if node.parent:
            node.parent.children.remove(node)

    @rule()
    def flush(self):
        self.index.clear()
        self.free, self.nodes = list(range(POOL)), []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30), name=st.sampled_from("ab"))
    def ask(self, tokens, name):
        namespace = name.encode()
        donors = [
            Donor(node.namespace, *self.path(node)) for node in self.nodes if not node.children
        ]
        assert found_runs(self.index, tokens, namespace) == oracle_runs(
            donors, tokens, namespace, WINDOW
        )

    @invariant()
    def conserved(self):
        held = [slot for node in self.nodes for slot in node.slots]
        assert self.index.live_tokens == len(held) == POOL - len(self.free)
        assert all(self.index.node_of(s) == node.number for node in self.nodes for s in node.slots)
        assert not any(self.index.holds(slot) for slot in self.free)
        assert self.index.namespaces == len({node.namespace for node in self.nodes})


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTreeMachine = TreeMachine.TestCase


def test_its_bytes_are_told_without_a_scan():
    index = RunIndex(4096, WINDOW)
    empty = index.nbytes
    assert empty >= 4096
    index.insert(0, b"a", ints(range(4000)), ints(range(4000)), -1)
    assert index.nbytes > empty
    index.remove(ints(range(4000)))
    assert index.nbytes == empty
