"""Similar donors: what is found is there, equal and alike; most of what is there is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_kvshare.matching.gaps import GapSettings
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex, SimilaritySettings
from sglang_kvshare.matching.sketch import Sketcher

pytestmark = pytest.mark.unit

VOCABULARY, DIMS, POOL = 600, 48, 4096
TABLE = np.random.default_rng(0).standard_normal((VOCABULARY, DIMS)).astype(np.float32)
ANY = SimilaritySettings(min_similarity=0.3)


class Cache:
    """Both indices as the engine keeps them, and what is in them in plain lists."""

    def __init__(self, wanted=ANY):
        self.runs = RunIndex(POOL, 16)
        self.similar = SemanticIndex(self.runs, Sketcher(TABLE, size_tokens=16, dims=DIMS), wanted)
        self.token_of: dict[int, int] = {}
        self.free = list(range(POOL))
        self.node = 0

    def insert(self, tokens, namespace=b"a", depth=0, parent=-1):
        slots, self.free = self.free[: len(tokens)], self.free[len(tokens) :]
        ids, where = np.array(tokens, dtype=np.int64), np.array(slots, dtype=np.int64)
        place = {} if parent >= 0 else {"position": 0}
        self.runs.insert(self.node, namespace, ids, where, parent, depth=depth, **place)
        self.similar.insert(namespace, ids, where)
        self.node += 1
        self.token_of.update(zip(slots, ids.tolist(), strict=True))
        return slots

    def remove(self, slots):
        gone = np.array(slots, dtype=np.int64)
        self.similar.remove(gone)
        self.runs.remove(gone)
        for slot in slots:
            if self.token_of.pop(slot, None) is not None:
                self.free.append(slot)

    def find(self, tokens, namespace=b"a", covered=None, **further):
        ids = np.array(tokens, dtype=np.int64)
        mask = np.zeros(len(ids), dtype=np.bool_) if covered is None else covered
        wanted = self.similar.settings
        found = self.similar.find(ids, namespace, mask, **further)
        for run in found:
            assert run.length >= wanted.min_run_tokens
            assert run.similarity >= wanted.min_similarity
            expected = ids[run.start : run.end].tolist()
            assert [self.token_of[slot] for slot in run.slots.tolist()] == expected
        keys = [(-run.length, -run.similarity, run.start) for run in found]
        assert keys == sorted(keys)
        return found


def text(seed, length=200):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length)


def edited(tokens, share, seed=0):
    """Replaced, inserted and dropped tokens, and which of the result are the old ones."""
    random, told, kept = np.random.default_rng(seed), [], []
    for token in tokens.tolist():
        what = random.random()
        if what < share:
            other = int(random.integers(VOCABULARY))
            more = [[], [other], [other, token]][int(random.integers(3))]
            told += more
            kept += [False, True][: len(more)]
        else:
            told.append(token)
            kept.append(True)
    return np.array(told), np.array(kept)


def told_of(span):
    return span.start, span.source, span.slots.tolist(), span.similarity, span.depth, span.kind


def shared(found, length):
    mask = np.zeros(length, dtype=np.bool_)
    for run in found:
        mask[run.start : run.end] = True
    return mask


@pytest.mark.parametrize("offset", [0, 5, 40])
def test_an_edited_passage_is_found_nearly_whole(offset):
    cache, passages = Cache(), [text(seed) for seed in range(8)]
    for passage in passages:
        cache.insert(passage)
    told = total = carried_on = 0
    for seed, passage in enumerate(passages):
        changed, kept = edited(passage, 0.1, seed)
        prompt = np.concatenate([text(100 + seed, offset), changed])
        found = cache.find(prompt)
        told += int((shared(found, len(prompt))[offset:] & kept).sum())
        total += int(kept.sum())
        carried_on += plan(cache, [*prompt, 0], gaps=GapSettings()).matched_tokens
    assert told > 0.7 * total
    assert carried_on > 0.85 * total
    strangers = cache.find(text(999, 400))
    assert not strangers, "a text that shares nothing is like none"


def test_few_equal_tokens_in_a_window_do_not_count():
    """A block that is long enough, in a window of which the rest is other text."""
    passage, prompt = text(0, 64), text(1, 64)
    prompt[20:25] = passage[20:25]
    for coverage, counts in ((0.5, False), (0.1, True)):
        cache = Cache(SimilaritySettings(min_similarity=-1.0, min_coverage=coverage, donors=4))
        cache.insert(passage)
        assert shared(cache.find(prompt), 64)[20:25].all() == counts


def test_other_namespaces_and_deeper_tokens_do_not_serve():
    cache, passage = Cache(), text(0)
    cache.insert(passage, b"a", depth=1)
    changed, _ = edited(passage, 0.05)
    assert not cache.find(changed)
    assert not cache.find(changed, b"b", max_depth=1)
    assert cache.find(changed, max_depth=1), "the control"


def test_what_others_cache_does_not_change_what_is_found():
    """Similarity is compared with a gate: weights from elsewhere would show through it."""
    told = []
    for others in ([], [text(seed) for seed in range(10, 22)]):
        cache = Cache()
        for passage in others:
            cache.insert(passage, b"b")
        cache.insert(text(0))
        changed, _ = edited(text(0), 0.1)
        found = cache.find(changed)
        told.append([(r.start, r.length, r.source, r.similarity) for r in found])
    assert told[0]
    assert told[0] == told[1]
    assert cache.find(edited(text(12), 0.1)[0], b"b"), "the control"


def test_nothing_is_left_of_a_namespace_without_windows():
    cache = Cache()
    empty = cache.similar.nbytes
    slots = cache.insert(text(0), b"a")
    cache.insert(text(1), b"b")
    assert cache.similar.nbytes > empty
    cache.remove(slots)
    assert set(cache.similar._rarity) == {b"b"}
    cache.similar.clear()
    assert cache.similar.nbytes == empty
    assert not cache.similar._rarity


def test_what_is_covered_is_not_asked_for():
    cache, passage = Cache(), text(0)
    cache.insert(passage)
    covered = np.zeros(200, dtype=np.bool_)
    covered[:100] = True
    found = cache.find(passage, covered=covered)
    assert found
    assert all(run.end > 84 for run in found)
    assert not cache.find(passage, covered=np.ones(200, dtype=np.bool_))


def test_neighbouring_windows_give_runs_that_meet():
    cache, passage = Cache(), text(0)
    slots = cache.insert(passage)
    runs = sorted(cache.find(passage), key=lambda run: run.start)
    assert all(run.start == run.source for run in runs)
    assert [slot for run in runs for slot in run.slots.tolist()] == slots


def test_what_follows_a_node_is_a_window_of_its_own_node():
    """Chunks of one prompt are inserted one by one."""
    cache, passage = Cache(), text(0)
    slots = cache.insert(passage[:90])
    slots += cache.insert(passage[90:], parent=slots[-1])
    found = cache.find(passage)
    # But for the rest of a window that its first donor covers most of.
    assert shared(found, 200).sum() >= 192
    placed = {run.start + i: slot for run in found for i, slot in enumerate(run.slots.tolist())}
    assert all(slot == slots[i] for i, slot in placed.items())


class Machine(RuleBasedStateMachine):
    """Windows come and go with their tokens, from the end of a path; lookups change nothing."""

    @initialize()
    def begin(self):
        self.cache = Cache()
        self.sequences: list[tuple[bytes, list[int]]] = []

    @rule(seed=st.integers(0, 5), length=st.integers(1, 90), space=st.sampled_from([b"a", b"b"]))
    def insert(self, seed, length, space):
        if len(self.cache.free) >= length:
            self.sequences.append((space, self.cache.insert(text(seed)[:length], space)))

    @rule(data=st.data(), keep=st.integers(0, 80))
    def evict_from_the_end(self, data, keep):
        if self.sequences:
            space, slots = self.sequences.pop(
                data.draw(st.integers(0, len(self.sequences) - 1), label="which")
            )
            self.cache.remove(slots[keep:])
            if slots[:keep]:
                self.sequences.append((space, slots[:keep]))

    @rule(data=st.data())
    def discard_amid(self, data):
        """A donor whose values are not finite leaves; its neighbours stay."""
        if self.sequences:
            space, slots = data.draw(st.sampled_from(self.sequences))
            gone = data.draw(st.lists(st.sampled_from(slots), max_size=3, unique=True))
            self.cache.remove(gone)
            self.sequences.remove((space, slots))
            if rest := [slot for slot in slots if slot not in gone]:
                self.sequences.append((space, rest))

    @rule()
    def flush(self):
        self.cache.runs.clear()
        self.cache.similar.clear()
        self.begin()

    @rule(seed=st.integers(0, 5), share=st.sampled_from([0.0, 0.1, 0.3]))
    def ask(self, seed, share):
        prompt, _ = edited(text(seed), share, seed)
        for space in (b"a", b"b"):
            mine = {slot for name, slots in self.sequences if name == space for slot in slots}
            found = self.cache.find(prompt, space)
            assert all(set(run.slots.tolist()) <= mine for run in found)
            again = self.cache.find(prompt, space)
            assert list(map(told_of, again)) == list(map(told_of, found))

    @invariant()
    def every_window_ends_in_a_living_token(self):
        lengths = self.cache.similar._length
        ends = np.flatnonzero(lengths).tolist()
        assert set(ends) <= set(self.cache.token_of)
        assert self.cache.similar.windows == len(ends)
        if not self.cache.token_of:
            assert self.cache.similar.windows == 0


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99))
def test_equal_histories_give_equal_answers(seed):
    """As on the ranks of a tensor-parallel group."""
    told = []
    for _ in range(2):
        cache = Cache()
        for number in range(6):
            cache.insert(text(seed + number, 60 + number))
        prompt, _ = edited(text(seed + 2, 62), 0.2)
        found = cache.find(prompt)
        told.append([(r.start, r.similarity, r.slots.tolist()) for r in found])
    assert told[0] == told[1]


def test_what_is_relearned_is_what_a_cache_without_the_forgotten_would_know():
    cache, other = Cache(), Cache()
    gone = cache.insert(text(0), namespace=b"g")
    for seed in (1, 2):
        for one in (cache, other):
            one.insert(text(seed), namespace=b"g")
    cache.insert(text(5), namespace=b"h")
    before = cache.similar._rarity[b"h"].weights(np.arange(VOCABULARY))
    cache.remove(gone)
    tokens = np.arange(VOCABULARY)
    weights = [one.similar._rarity[b"g"].weights(tokens) for one in (cache, other)]
    assert not np.allclose(*weights), "the control: the forgotten text still weighs"
    cache.similar.relearn([b"g", b"unknown"])
    assert np.allclose(cache.similar._rarity[b"g"].weights(tokens), weights[1])
    assert np.allclose(cache.similar._rarity[b"h"].weights(tokens), before)
    assert cache.find(text(1), namespace=b"g")


def plan(cache, prompt, prefix=0, similar=True, gaps=None):
    return plan_reuse(
        cache.runs,
        np.array(prompt, dtype=np.int64),
        prefix,
        b"a",
        100,
        similar=cache.similar if similar else None,
        gaps=gaps,
    )


@pytest.mark.parametrize("prefix", [0, 7])
def test_a_plan_takes_runs_first_and_then_what_similar_donors_have(prefix):
    cache, passages = Cache(), [text(seed) for seed in range(6)]
    for passage in passages:
        cache.insert(passage)
    parts = [edited(passages[i], 0.1, i) for i in (4, 1, 3)]
    prompt = np.concatenate([part for part, _ in parts] + [text(50, 20)])
    kept = np.concatenate([kept for _, kept in parts] + [np.zeros(20, dtype=np.bool_)])
    alone, both = plan(cache, prompt, prefix, similar=False), plan(cache, prompt, prefix)
    runs = [span for span in both.spans if span.kind == "exact_run"]
    assert [(s.start, s.slots.tolist()) for s in runs] == [
        (s.start, s.slots.tolist()) for s in alone.spans
    ]
    further = [span for span in both.spans if span.kind == "semantic"]
    assert further
    assert all(span.length >= 4 and ANY.min_similarity <= span.similarity <= 1 for span in further)
    for span in both.spans:
        expected = prompt[span.start : span.end].tolist()
        assert [cache.token_of[slot] for slot in span.slots.tolist()] == expected
    shared_tokens = int(kept[prefix:-1].sum())
    assert both.matched_tokens > 0.8 * shared_tokens
    assert alone.matched_tokens < 0.7 * shared_tokens, "the control"


def test_without_similar_donors_a_plan_is_the_same():
    cache = Cache()
    cache.insert(text(0))
    prompt = np.concatenate([text(9, 30), text(0)])
    one, other = plan(cache, prompt, similar=False), plan(cache, prompt)
    assert [(s.start, s.end, s.kind) for s in one.spans] == [
        (s.start, s.end, s.kind) for s in other.spans
    ]
