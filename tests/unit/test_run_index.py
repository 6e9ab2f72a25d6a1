"""The run index against a slow, clear oracle, while the tree under it grows, splits and shrinks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from run_oracle import Oracle, answered, covering, ints

from sglang_kvshare.matching import extents, run_index, window_table
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex

pytestmark = pytest.mark.unit

SHORTEST = 4
POOL = 256
EVERYTHING = 10_000


@pytest.fixture(autouse=True, scope="module")
def small_tables():
    """Tables that grow and merge after a few changes already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "_FIRST_ROWS", 2)
        patch.setattr(window_table, "_SMALL_ENTRIES", 8)
        patch.setattr(run_index, "_DEAD_ENTRIES", 32)
        yield


class Both:
    """The index and the oracle, told the same."""

    def __init__(self, slots=POOL, shortest=SHORTEST):
        self.shortest = shortest
        self.index, self.oracle = RunIndex(slots, shortest), Oracle()

    def insert(self, node, namespace, tokens, slots, parent_slot=-1, **where):
        self.index.insert(node, namespace, ints(tokens), ints(slots), parent_slot, **where)
        self.oracle.insert(node, namespace, list(tokens), list(slots), parent_slot, **where)

    def reassign(self, node, slots):
        self.index.reassign(node, ints(slots))
        self.oracle.reassign(node, slots)

    def remove(self, slots, how="remove"):
        getattr(self.index, how)(ints(slots))
        self.oracle.remove(slots)

    def check(self, tokens, namespace=b"a", max_depth=0, limit=EVERYTHING, position=0):
        """Compare, and return what both say."""
        where = {"max_depth": max_depth, "position": position}
        expected = self.oracle.runs(tokens, namespace, self.shortest, **where)
        runs = self.index.find_runs(ints(tokens), namespace, limit, **where)
        assert answered(self.index, runs) == expected
        for run, (_, _, _, slots) in zip(runs, expected, strict=True):
            assert run.source == self.oracle.cached[slots[0]].position
            assert run.last_slot == slots[-1]
        best = self.index.find_runs(ints(tokens), namespace, limit, **where, covering=True)
        assert answered(self.index, best) == covering(expected)
        return expected

    def check_around(self, slot, before, after):
        """Backwards along the path as far as asked; forwards to a neighbour at a time."""
        cached = self.oracle.cached
        if slot not in cached:
            with pytest.raises(KeyError):
                self.index.around(slot, before, after)
            return
        found = self.index.around(slot, before, after)
        slots, at = found.slots.tolist(), slot
        where = slots.index(slot)
        for expected in slots[:where][::-1]:
            at = cached[at].before
            assert at == expected
        assert where == before or cached[slots[0]].before == -1
        assert len(slots) - where - 1 <= after
        for one, following in pairwise(slots[where:]):
            assert cached[following].before == one
        assert found.tokens.tolist() == [cached[one].token for one in slots]
        assert found.position == cached[slots[0]].position
        assert found.depth == max(cached[one].depth for one in slots)

    def check_state(self, slots=POOL):
        cached, index = self.oracle.cached, self.index
        assert index.live_tokens == len(cached)
        nodes = [cached[slot].node if slot in cached else -1 for slot in range(slots)]
        assert index.nodes_of(np.arange(slots)).tolist() == nodes
        assert all(index.position_of(slot) == one.position for slot, one in cached.items())
        assert index.namespaces == len({one.namespace for one in cached.values()})
        assert index.entries <= index.most_entries
        # Three arrays of 32 bits a slot, rows of extents, table entries: nothing else grows.
        rows = max(64, 2 * index._arena.extents.rows) * 44
        assert index.nbytes <= 12 * slots + rows + 8 * index._arena.extents.rows + (
            12 * index.most_entries
        )
        check_arena(index)


def check_arena(index):
    """Cells are free or have one owner, and all columns of the extents agree."""
    arena, ext = index._arena, index._arena.extents
    free = np.zeros(arena.slot.shape[0], dtype=bool)
    stretches = arena.holes.stretches()
    for (start, length), after in zip(stretches, [*stretches[1:], None], strict=True):
        assert after is None or start + length < after[0], "free stretches that touch are one"
        free[start : start + length] = True
    assert (free == (arena.slot == -1)).all()
    assert int((~free).sum()) == arena.live_tokens
    cells = np.flatnonzero(~free)
    extents = arena.extent_of[arena.slot[cells]]
    assert ((ext.start[extents] <= cells) & (cells < (ext.start + ext.length)[extents])).all()
    used = np.unique(extents)
    assert len(used) == len(ext)
    assert ext.length[used].sum() == arena.live_tokens
    parents = ext.parent[used]
    for one, parent in zip(used, parents, strict=True):
        assert parent == -1 or parent in used
        above = 0 if parent == -1 else ext.reach[parent] + ext.length[parent]
        assert ext.reach[one] == min(above, index.window - 1)
        assert parent == -1 or ext.position[one] == (ext.position + ext.length)[parent]
        assert ext.children[one] == (parents == one).sum()


def test_a_passage_is_found_at_any_offset_and_twice_in_one_prompt():
    both = Both(64)
    passage = [5, 6, 7, 8, 9, 10]
    both.insert(0, b"a", [1, 2, *passage, 3], range(10, 19))
    prompt = [9, *passage, 4, 4, *passage, 1]
    slots = tuple(range(12, 18))
    assert both.check(prompt) == [(1, 7, 0, slots), (9, 15, 0, slots)]
    plan = plan_reuse(both.index, ints(prompt), 0, b"a", limit=8)
    assert [(s.start, s.end, s.source) for s in plan.spans] == [(1, 7, 2), (9, 15, 2)]
    assert plan.new_tokens == len(prompt) - 12


@pytest.mark.parametrize("shortest", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33])
def test_each_run_of_the_shortest_length_is_found_wherever_it_lies(shortest):
    both = Both(512, shortest)
    both.insert(0, b"a", range(1000, 1000 + 3 * shortest + 5), range(3 * shortest + 5))
    for offset in range(2 * shortest + 5):
        run = range(1000 + offset, 1000 + offset + shortest)
        assert len(both.check([1, *run, 2])) == 1
        assert both.check([1, *run[:-1], 2]) == []


def test_namespaces_are_apart_and_the_same_one_does_match():
    both = Both(64)
    both.insert(0, b"tenant-1", range(10), range(10))
    assert both.check(range(10), b"tenant-2") == []
    assert len(both.check(range(10), b"tenant-1")) == 1


def test_the_last_token_is_never_matched_and_the_prefix_is_left_alone():
    index = RunIndex(64, SHORTEST)
    index.insert(0, b"a", ints(range(20)), ints(range(20)), -1)
    plan = plan_reuse(index, ints(range(20)), 0, b"a", limit=8)
    assert [(s.start, s.end) for s in plan.spans] == [(0, 19)]
    plan = plan_reuse(index, ints(range(20)), 6, b"a", limit=8)
    assert [(s.start, s.end, s.source) for s in plan.spans] == [(6, 19, 6)]
    assert plan_reuse(index, ints(range(20)), 17, b"a", limit=8).spans == ()


def test_the_longest_run_wins_and_the_rest_is_cut_to_what_is_free():
    index = RunIndex(128, SHORTEST)
    index.insert(0, b"a", ints([1, 2, 3, 4, 5, 6, 7, 8]), ints(range(0, 8)), -1)
    index.insert(1, b"a", ints([50, 5, 6, 7, 8, 9, 10, 11, 12, 13]), ints(range(20, 30)), -1)
    plan = plan_reuse(index, ints([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0]), 0, b"a", 8)
    assert [(s.start, s.end, int(s.slots[0])) for s in plan.spans] == [(0, 4, 0), (4, 13, 21)]


# --- provenance ------------------------------------------------------------------------------


def test_deeper_tokens_serve_only_who_accepts_them_and_a_run_may_mix():
    both = Both(64)
    both.insert(0, b"a", range(8), range(8))
    both.insert(1, b"a", range(8, 16), range(8, 16), 7, depth=1)
    both.insert(2, b"a", range(16, 24), range(16, 24), 15, depth=2)
    for max_depth, length in [(0, 8), (1, 16), (2, 24), (3, 24)]:
        [run] = both.check(range(24), max_depth=max_depth)
        assert (run[1], run[2]) == (length, min(max_depth, 2))
    plan = plan_reuse(both.index, ints([*range(24), 0]), 0, b"a", 8, max_depth=1)
    assert ([span.depth for span in plan.spans], plan.depth) == ([1], 1)
    assert plan_reuse(both.index, ints([*range(24), 0]), 0, b"a", 8).depth == 0
    assert plan_reuse(both.index, ints([50] * 9), 0, b"a", 8).depth == 0


def test_exact_tokens_below_approximate_ones_are_found_up_to_the_seam():
    both = Both(64)
    both.insert(0, b"a", range(5), range(5), depth=1)
    both.insert(1, b"a", range(5, 20), range(5, 20), 4)
    assert both.check(range(20))[0][:3] == (5, 20, 0)
    assert both.check(range(20), max_depth=1)[0][:3] == (0, 20, 1)


def test_among_equal_runs_the_exact_one_serves():
    both = Both(64)
    both.insert(0, b"a", range(12), range(12), depth=1)
    both.insert(1, b"a", [90, *range(12)], range(20, 33))
    assert [run[2] for run in both.check([7, *range(12), 7], max_depth=1)] == [0, 1]
    plan = plan_reuse(both.index, ints([7, *range(12), 7]), 0, b"a", 8, max_depth=1)
    assert [(s.depth, s.source) for s in plan.spans] == [(0, 1)]


def test_approximate_copies_do_not_hide_an_exact_one():
    index = RunIndex(4096, SHORTEST)
    index.insert(0, b"a", ints(range(20)), ints(range(20)), -1)
    for copy in range(1, 100):
        index.insert(
            copy, b"a", ints(range(20)), ints(range(20 * copy, 20 * copy + 20)), -1, depth=1
        )
    [run] = index.find_runs(ints(range(20)), b"a", 2, covering=True)
    assert (run.length, run.depth, run.last_slot) == (20, 0, 19)


# --- fragments, discarded donors -------------------------------------------------------------


def test_a_fragment_knows_its_place_in_the_sequence():
    both = Both(64)
    both.insert(0, b"a", range(20), range(20), position=37)
    both.insert(1, b"a", range(20, 30), range(20, 30), 19)
    assert both.index.position_of(0) == 37
    assert both.index.position_of(29) == 66
    [run] = both.index.find_runs(ints(range(3, 28)), b"a", 8)
    assert (run.source, run.length) == (40, 25)
    both.check(range(3, 28))


def test_discarded_donors_are_gone_and_nothing_chains_through_them():
    both = Both(64)
    both.insert(0, b"a", range(20), range(20))
    both.insert(1, b"a", range(20, 40), range(20, 40), 19)
    both.remove([10, 11, 12], "discard")
    both.check_state(64)
    assert [run[:2] for run in both.check(range(40))] == [(13, 40), (0, 10)]
    # What the tree does later with the same node is harmless.
    both.reassign(5, list(range(15)))
    both.check_state(64)
    both.remove(list(range(20, 40)))
    both.remove(list(range(20)))
    both.check_state(64)
    assert both.index.live_tokens == both.index.fragments == 0


def test_slots_that_are_not_held_are_passed_over():
    both = Both(64)
    both.insert(0, b"a", range(10), range(10))
    both.remove(list(range(30, 40)))
    both.reassign(3, [*range(30, 34), 9, 8])
    both.check_state(64)
    assert both.index.nodes_of(ints([7, 8, 9, 30])).tolist() == [0, 3, 3, -1]
    both.remove([2, 3, 30, 31, 7])
    both.check_state(64)
    both.check(range(10))


def test_a_slot_that_comes_back_elsewhere_never_gives_its_old_position():
    """The entries of the first life are still in the table; stamps tell the lives apart."""
    for shift in range(1, 9):
        both = Both(64, 6)
        both.insert(1, b"a", range(100, 120), range(40, 60))
        both.insert(0, b"a", range(30), range(30))
        before = both.index.entries
        both.remove(list(range(30)))
        assert both.index.entries == before, "the test needs stale entries"
        both.insert(0, b"a", range(30), range(30), position=shift)
        [run] = both.index.find_runs(ints(range(5, 25)), b"a", 1)
        assert run.source == 5 + shift
        both.check(range(5, 25))


# --- what does not fit -----------------------------------------------------------------------


def test_what_cannot_be_right_is_refused_by_name():
    index = RunIndex(16, SHORTEST)
    index.insert(0, b"a", ints([1, 2]), ints([3, 4]), -1)
    with pytest.raises(ValueError, match="two owners"):
        index.insert(1, b"a", ints([1]), ints([4]), -1)
    with pytest.raises(ValueError, match="slot 9 is not in the run index"):
        index.insert(1, b"a", ints([1]), ints([5]), 9)
    with pytest.raises(ValueError, match="another namespace"):
        index.insert(1, b"b", ints([1]), ints([5]), 4)
    with pytest.raises(ValueError, match="position 7 after a parent that ends at 2"):
        index.insert(1, b"a", ints([1]), ints([5]), 4, position=7)
    with pytest.raises(ValueError, match="2 tokens for 1 slots"):
        index.insert(1, b"a", ints([1, 2]), ints([5]), 4)
    for token in (-1, 2**31):
        with pytest.raises(ValueError, match=f"allowed are 0 to {2**31 - 1}"):
            index.insert(1, b"a", ints([token]), ints([5]), -1)
        with pytest.raises(ValueError, match=f"allowed are 0 to {2**31 - 1}"):
            index.find_runs(ints([token] * 9), b"a", 8)
    with pytest.raises(ValueError, match="KV pool"):
        RunIndex(2**31, SHORTEST)
    with pytest.raises(ValueError, match="min_run_tokens=0"):
        RunIndex(16, 0)
    with pytest.raises(KeyError):
        index.position_of(9)
    assert index.live_tokens == 2
    check_arena(index)


# --- hashes that agree although the tokens do not --------------------------------------------


def all_equal(sums, seed):
    return np.full(sums.shape[0], 7, dtype=np.uint32)


def in_fours(sums, seed):
    return (sums >> np.uint64(61)).astype(np.uint32) & np.uint32(3)


@pytest.fixture(params=[all_equal, in_fours], ids=lambda f: f.__name__)
def colliding(request, monkeypatch):
    for module in ("run_index", "run_search"):
        monkeypatch.setattr(f"sglang_kvshare.matching.{module}.fingerprints", request.param)


@pytest.mark.usefixtures("colliding")
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_colliding_fingerprints_change_nothing(data):
    both, used, ends = Both(), 0, []
    for node in range(data.draw(st.integers(1, 5))):
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=20))
        namespace = data.draw(st.sampled_from([b"a", b"b"]))
        mine = [end for end, name in ends if name == namespace]
        parent = data.draw(st.sampled_from([-1, *mine]))
        slots = range(used, used + len(tokens))
        depth = data.draw(st.integers(0, 1))
        both.insert(node, namespace, tokens, slots, parent, depth=depth)
        used += len(tokens)
        ends.append((used - 1, namespace))
    prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
    for max_depth in (0, 1):
        both.check(prompt, b"a", max_depth)


# --- the limit -------------------------------------------------------------------------------


def seeded(both, prompt, limit):
    """(end, slot) of the newest ``limit`` indexed windows of each window of the prompt."""
    cached, w = both.oracle.cached, both.index.window
    for end in range(w - 1, len(prompt)):
        window, places = list(prompt[end - w + 1 : end + 1]), []
        for slot, one in cached.items():
            if one.position % w != w - 1:
                continue
            path, at = [], slot
            while at != -1 and len(path) < w:
                path.insert(0, cached[at].token)
                at = cached[at].before
            if path == window:
                places.append(slot)
        # Dictionaries keep the order of insertion.
        yield from ((end, slot) for slot in places[::-1][:limit])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=30), min_size=1, max_size=6),
    st.lists(st.integers(0, 1), min_size=4, max_size=40),
    st.integers(1, 3),
)
def test_whatever_the_limit_each_run_that_holds_a_seed_is_found(contents, prompt, limit):
    both, used = Both(), 0
    for number, tokens in enumerate(contents):
        both.insert(number, b"a", tokens, range(used, used + len(tokens)))
        used += len(tokens)
    everything = both.oracle.runs(prompt, b"a", SHORTEST)
    seeds = set(seeded(both, prompt, limit))
    expected = [
        run
        for run in everything
        if any((run[0] + i, slot) in seeds for i, slot in enumerate(run[3]))
    ]
    found = answered(both.index, both.index.find_runs(ints(prompt), b"a", limit))
    # No run here has branches, and none is long enough to be cut short.
    assert [run for run in found if run not in everything] == []
    assert found == expected


def test_a_long_run_is_found_behind_newer_short_ones():
    """Every window of its first half is hidden by newer copies; the second half leads to it."""
    both = Both(4096, 8)
    passage = list(range(100, 300))
    both.insert(0, b"a", passage, range(200))
    for copy in range(1, 12):
        both.insert(copy, b"a", passage[:100], range(100 + 100 * copy, 200 + 100 * copy))
    for copy in range(12, 20):
        both.insert(
            copy, b"a", passage[120:], range(3000 + 80 * (copy - 12), 3080 + 80 * (copy - 12))
        )
    [run] = both.index.find_runs(ints([1, *passage, 1]), b"a", 2, covering=True)
    assert (run.start, run.length, run.last_slot) == (1, 200, 199)


def test_the_dead_do_not_hide_the_living(monkeypatch):
    monkeypatch.setattr(run_index, "_DEAD_ENTRIES", 1024)
    index = RunIndex(20_000, 16)
    index.insert(0, b"a", ints(range(64)), ints(range(64)), -1)
    for copy in range(1, 50):
        index.insert(copy, b"a", ints(range(64)), ints(range(64 * copy, 64 * copy + 64)), -1)
    index.remove(ints(range(64, 64 * 50)))
    assert index.entries > 100, "the test needs dead entries"
    [run] = index.find_runs(ints(range(64)), b"a", 1)
    assert (run.length, run.last_slot) == (64, 63)


# --- worst cases -----------------------------------------------------------------------------


def test_one_token_repeated_is_covered_by_one_run():
    index = RunIndex(40_000, 16)
    for node in range(10):
        index.insert(node, b"a", ints([7] * 4000), ints(range(4000 * node, 4000 * node + 4000)), -1)
    plan = plan_reuse(index, ints([7] * 4000), 0, b"a", 8)
    assert [(span.start, span.end) for span in plan.spans] == [(0, 3999)]


def test_pages_that_branch_late_give_the_longest_branch():
    both = Both(4096, 8)
    both.insert(0, b"a", range(50), range(50))
    for child in range(1, 40):
        tokens = [*range(50, 50 + child), 999, *range(2000, 2000 + child)]
        slots = range(100 * child, 100 * child + len(tokens))
        both.insert(child, b"a", tokens, slots, 49)
    [run] = both.check([5, *range(20, 80)])
    assert run[:2] == (1, 61)


# --- memory, time, purity --------------------------------------------------------------------


def test_matching_has_no_side_effects():
    both = Both(64)
    both.insert(0, b"a", range(20), range(20))
    arrays = [a.copy() for a in (both.index._arena.token, both.index._arena.slot)]
    state = (both.index.entries, both.index.live_tokens, both.index.namespaces)
    answers = [both.index.find_runs(ints(range(3, 15)), b"a", 8) for _ in range(5)]
    assert answers == [answers[0]] * 5
    assert (both.index.entries, both.index.live_tokens, both.index.namespaces) == state
    for was, now in zip(arrays, (both.index._arena.token, both.index._arena.slot), strict=True):
        assert (was == now).all()


def test_of_two_donors_the_one_closer_to_the_place_serves():
    """A token less is as bad as 32 positions more, and no distance counts more than 8 tokens."""
    passage = list(range(100, 140))
    for longer, far, chosen in [(0, 33, 1), (1, 31, 0), (1, 65, 1), (7, 5000, 1), (9, 5000, 0)]:
        both = Both(256)
        # The first donor is longer and stood elsewhere; the second stood just here.
        both.insert(0, b"a", [*passage, *range(longer)], range(40 + longer), position=500 + far)
        both.insert(1, b"a", passage, range(100, 140), position=500)
        prompt = [*passage, *range(longer), 7777]
        both.check(prompt, position=500)
        tokens = ints([*range(9000, 9500), *prompt])
        # What the longer one has beyond is a span of its own, where it is long enough.
        span = plan_reuse(both.index, tokens, 500, b"a", 8).spans[0]
        assert (int(span.slots[0]) == 100) == bool(chosen), (longer, far)


def test_the_index_stays_bounded_when_the_same_content_comes_and_goes():
    both = Both(128)
    for turn in range(150):
        both.insert(turn, b"n%d" % (turn % 3), range(64), range(64))
        both.remove(list(range(64)))
        assert both.index.entries <= both.index.most_entries
    both.insert(0, b"a", range(64), range(64))
    both.check_state(128)
    assert both.index.entries <= 1024 + 64
    both.check(range(64))


def test_its_bytes_are_told_without_a_scan():
    index = RunIndex(4096, SHORTEST)
    empty = index.nbytes
    assert empty >= 4096
    index.insert(0, b"a", ints(range(4000)), ints(range(4000)), -1)
    assert index.nbytes > empty
    index.remove(ints(range(4000)))
    assert index.nbytes == empty


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(0, 300),
)
def test_separate_donors_equal_the_oracle(contents, prompt, shortest, apart):
    both, used = Both(POOL, shortest), 0
    for number, tokens in enumerate(contents):
        slots = list(range(used, used + len(tokens)))[::-1]
        used += len(tokens)
        both.insert(number, b"a", tokens, slots, position=number * apart)
    both.check(prompt, position=apart)
    plan = plan_reuse(both.index, ints(prompt), 0, b"a", EVERYTHING)
    for position, slot in zip(plan.positions(), plan.slots(), strict=True):
        assert both.oracle.cached[int(slot)].token == prompt[position]
    for source, slot in zip(plan.sources(), plan.slots(), strict=True):
        assert both.oracle.cached[int(slot)].position == source


class Node:
    def __init__(self, number, parent, namespace, slots):
        self.number, self.parent, self.namespace, self.slots = number, parent, namespace, slots
        self.children = []


class TreeMachine(RuleBasedStateMachine):
    """Insert, split, evict, discard and flush as a radix tree does; ask in between."""

    shortest = SHORTEST

    @initialize()
    def begin(self):
        self.both = Both(POOL, self.shortest)
        self.free = list(range(POOL))
        self.nodes, self.count = [], 0

    def take(self, data, count):
        picks = data.draw(st.permutations(range(len(self.free))))[:count]
        slots = [self.free[i] for i in picks]
        self.free = [s for s in self.free if s not in set(slots)]
        return slots

    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        depth=st.sampled_from([0, 0, 0, 1, 2]),
        amid=st.integers(0, 9) | st.integers(0, 400),
    )
    def insert(self, data, tokens, depth, amid):
        """A child of any node; one that cannot be linked is a fragment. Equal ones may be."""
        if len(self.free) < len(tokens):
            return
        parent = data.draw(st.sampled_from([None, *self.nodes])) if self.nodes else None
        namespace = parent.namespace if parent else data.draw(st.sampled_from([b"a", b"b"]))
        slots = self.take(data, len(tokens))
        node = Node(self.count, parent, namespace, slots)
        self.count += 1
        last = parent.slots[-1] if parent else -1
        if last not in self.both.oracle.cached:
            self.both.insert(node.number, namespace, tokens, slots, position=amid, depth=depth)
        else:
            self.both.insert(node.number, namespace, tokens, slots, last, depth=depth)
        if parent:
            parent.children.append(node)
        self.nodes.append(node)

    @rule(data=st.data())
    def split(self, data):
        long = [node for node in self.nodes if len(node.slots) > 1]
        if not long:
            return
        node = data.draw(st.sampled_from(long))
        cut = data.draw(st.integers(1, len(node.slots) - 1))
        upper = Node(self.count, node.parent, node.namespace, node.slots[:cut])
        self.count += 1
        upper.children = [node]
        if node.parent:
            node.parent.children.remove(node)
            node.parent.children.append(upper)
        node.parent, node.slots = upper, node.slots[cut:]
        self.nodes.append(upper)
        self.both.reassign(upper.number, upper.slots)

    @rule(data=st.data())
    def evict(self, data):
        leaves = [node for node in self.nodes if not node.children]
        if not leaves:
            return
        node = data.draw(st.sampled_from(leaves))
        self.both.remove(node.slots)
        self.free += node.slots
        self.nodes.remove(node)
        if node.parent:
            node.parent.children.remove(node)

    @rule(data=st.data())
    def discard(self, data):
        if not self.nodes:
            return
        node = data.draw(st.sampled_from(self.nodes))
        self.both.remove(data.draw(st.lists(st.sampled_from(node.slots), max_size=4)), "discard")

    @rule(slots=st.lists(st.integers(0, POOL - 1), max_size=20))
    def discard_anything(self, slots):
        self.both.remove(slots, "discard")

    @rule()
    def flush(self):
        self.both.index.clear()
        self.both.oracle = Oracle()
        self.free, self.nodes = list(range(POOL)), []

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
        name=st.sampled_from("ab"),
        max_depth=st.integers(0, 2),
        position=st.integers(0, 400),
    )
    def ask(self, tokens, name, max_depth, position):
        self.both.check(tokens, name.encode(), max_depth, position=position)

    @rule(slot=st.integers(0, POOL - 1), before=st.integers(0, 20), after=st.integers(0, 20))
    def look_around(self, slot, before, after):
        held = sorted(self.both.oracle.cached) or [slot]
        for one in (slot, held[slot % len(held)]):
            self.both.check_around(one, before, after)

    @invariant()
    def conserved(self):
        self.both.check_state()


class LongerTreeMachine(TreeMachine):
    shortest = 7


for machine in (TreeMachine, LongerTreeMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTreeMachine = TreeMachine.TestCase
TestLongerTreeMachine = LongerTreeMachine.TestCase
