"""Plans that may look in more namespaces than their own, against a slow definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_oracle import Oracle, ints

from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex, SimilaritySettings
from sglang_kvshare.matching.sketch import Sketcher

pytestmark = pytest.mark.unit

SHORTEST = 4
SLOTS = 512
OWN, PUBLIC, OTHER = b"own", b"public", b"other"


class Cache:
    """The index and the oracle, told the same; slots in order of coming."""

    def __init__(self):
        self.index, self.oracle, self.used = RunIndex(SLOTS, SHORTEST), Oracle(), 0

    def insert(self, namespace, tokens, *, depth=0, position=0):
        slots = list(range(self.used, self.used + len(tokens)))
        self.used += len(tokens)
        for one in (self.index, self.oracle):
            one.insert(
                slots[0],
                namespace,
                ints(tokens) if one is self.index else tokens,
                ints(slots) if one is self.index else slots,
                -1,
                position=position,
                depth=depth,
            )
        return slots

    def plan(self, prompt, shared=(), *, prefix=0, max_depth=0):
        return plan_reuse(
            self.index, ints(prompt), prefix, OWN, 10_000, max_depth=max_depth, shared=shared
        )

    def slow_plan(self, prompt, shared, prefix, max_depth):
        """Every run of every namespace, the best first, each where nothing lies yet."""
        body, told = prompt[prefix:-1], []
        for rank, namespace in enumerate((OWN, *shared)):
            for start, end, depth, slots in self.oracle.runs(
                body, namespace, SHORTEST, max_depth, prefix
            ):
                shift = abs(self.oracle.cached[slots[0]].position - start - prefix)
                worth = end - start - min(shift // 32, 8)
                told.append(((-worth, depth, rank, start, shift, slots[-1]), start, slots))
        covered, spans = set(), []
        for _, start, slots in sorted(told):
            at = 0
            while at < len(slots):
                stop = at
                while stop < len(slots) and start + stop not in covered:
                    stop += 1
                if stop - at >= SHORTEST:
                    spans.append((start + at + prefix, slots[at:stop]))
                at = max(stop, at + 1)
            covered |= {p for s, part in spans for p in range(s - prefix, s - prefix + len(part))}
        return sorted(spans)


def spans_of(plan):
    return [(span.start, tuple(span.slots.tolist())) for span in plan.spans]


texts = st.lists(st.integers(0, 2), min_size=SHORTEST, max_size=16)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_the_best_run_of_all_namespaces_wins_wherever_it_is(data):
    cache = Cache()
    for _ in range(data.draw(st.integers(1, 6))):
        cache.insert(
            data.draw(st.sampled_from([OWN, PUBLIC, OTHER])),
            data.draw(texts),
            depth=data.draw(st.integers(0, 1)),
            position=data.draw(st.sampled_from([0, 0, 3, 70, 400])),
        )
    prompt = data.draw(texts) + data.draw(texts)
    prefix = data.draw(st.integers(0, 6))
    max_depth = data.draw(st.integers(0, 1))
    for shared in ((), (PUBLIC,), (PUBLIC, OTHER)):
        plan = cache.plan(prompt, shared, prefix=prefix, max_depth=max_depth)
        assert spans_of(plan) == cache.slow_plan(prompt, shared, prefix, max_depth)
        # Asked again it says the same, and looking elsewhere has left nothing behind.
        again = cache.plan(prompt, shared, prefix=prefix, max_depth=max_depth)
        assert spans_of(again) == spans_of(plan)
        held = {slot for span in plan.spans for slot in span.slots.tolist()}
        assert {cache.oracle.cached[slot].namespace for slot in held} <= {OWN, *shared}


def test_of_equal_runs_the_own_one_serves_and_a_longer_one_elsewhere_is_taken():
    cache, passage = Cache(), list(range(10, 22))
    public = cache.insert(PUBLIC, passage)
    other = cache.insert(OTHER, passage)
    assert not cache.plan([*passage, 1]).spans
    assert spans_of(cache.plan([*passage, 1], (PUBLIC,))) == [(0, tuple(public))]
    own = cache.insert(OWN, passage)
    assert spans_of(cache.plan([*passage, 1], (PUBLIC,))) == [(0, tuple(own))]
    longer = cache.insert(PUBLIC, [*passage, 50])
    plan = cache.plan([*passage, 50, 1], (PUBLIC,))
    assert spans_of(plan) == [(0, tuple(longer))]
    assert not set(other) & {slot for span in plan.spans for slot in span.slots.tolist()}


def test_similar_donors_are_looked_for_there_as_well():
    rng = np.random.default_rng(3)
    embeddings = rng.standard_normal((200, 64)).astype(np.float32)

    def cache(*namespaces):
        index = RunIndex(4096, 16)
        similar = SemanticIndex(
            index, Sketcher(embeddings, size_tokens=64, dims=64), SimilaritySettings(0.1, 0.3, 4, 4)
        )
        for number, namespace in enumerate(namespaces):
            slots = np.arange(number * 128, number * 128 + 128)
            index.insert(number, namespace, text, slots, -1)
            similar.insert(namespace, text, slots)
        return index, similar

    def owners(index, similar, shared):
        plan = plan_reuse(index, prompt, 0, OWN, 8, similar=similar, shared=shared)
        assert all(span.kind == "semantic" for span in plan.spans)
        return {slot // 128 for span in plan.spans for slot in span.slots.tolist()}

    text = rng.integers(0, 200, 128)
    prompt = text.copy()
    # Every tenth token is another one: no run of 16 is left.
    prompt[::10] = (prompt[::10] + 1) % 200
    assert owners(*cache(PUBLIC), ()) == set()
    assert owners(*cache(PUBLIC), (PUBLIC,)) == {0}
    assert owners(*cache(PUBLIC, OWN), (PUBLIC,)) == {1}, "the own one of equal ones"
    assert owners(*cache(PUBLIC, OWN), (OTHER, PUBLIC)) == {1}
