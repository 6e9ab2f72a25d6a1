"""How much of a prompt is cached, estimated at a glance, against what a search for runs finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.matching.glance import cached_of, glance
from sglang_kvshare.matching.run_index import RunIndex

pytestmark = pytest.mark.unit

SHORTEST = 16


def index_of(*passages, namespace=b"a", depth=0, slots=100_000):
    index = RunIndex(slots, SHORTEST)
    at = 0
    for node, tokens in enumerate(passages):
        where = np.arange(at, at + len(tokens), dtype=np.int64)
        index.insert(node, namespace, tokens, where, -1, position=0, depth=depth)
        at += len(tokens)
    return index


def passage(rng, tokens):
    return rng.integers(0, 50_000, tokens).astype(np.int64)


def estimated(index, prompt, namespaces=(b"a",), after=0, max_depth=0):
    seen = glance(prompt, index.window, b"a")
    return cached_of(index, seen, namespaces, after, max_depth).tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(100, 600)), min_size=1, max_size=12))
def test_the_estimate_is_near_what_the_search_finds(parts):
    rng = np.random.default_rng(len(parts))
    cached = [passage(rng, tokens) for held, tokens in parts if held]
    index = index_of(*cached)
    held = iter(cached)
    prompt = np.concatenate([next(held) if is_held else passage(rng, n) for is_held, n in parts])
    found = sum(run.length for run in index.find_runs(prompt, b"a", 8))
    # Of long prompts one stretch in eight is looked at: what is seen of a passage's ends varies.
    spread = 0.05 * len(prompt) + 8 * index.window * len(parts) ** 0.5
    assert abs(estimated(index, prompt) - found) <= spread


def test_nothing_of_another_namespace_is_seen_and_published_text_is():
    rng = np.random.default_rng(1)
    text = passage(rng, 400)
    index = index_of(text)
    assert estimated(index, text) == 400
    assert estimated(index, text, namespaces=(b"b",)) == 0
    assert estimated(index, text, namespaces=(b"b", b"a")) == 400
    assert estimated(index, text, namespaces=(b"a", b"a")) == 400


def test_what_is_too_deep_is_not_seen():
    rng = np.random.default_rng(2)
    text = passage(rng, 400)
    index = index_of(text, depth=2)
    assert estimated(index, text, max_depth=1) == 0
    assert estimated(index, text, max_depth=2) == 400


def test_a_prefix_is_left_out():
    rng = np.random.default_rng(3)
    front, back = passage(rng, 800), passage(rng, 800)
    index = index_of(front)
    prompt = np.concatenate([front, back])
    assert estimated(index, prompt) == pytest.approx(800, abs=40)
    assert estimated(index, prompt, after=800) == 0
    assert estimated(index, prompt, after=1600) == 0


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 15])
def test_prompts_shorter_than_a_run_are_no_trouble(tokens):
    index = index_of(np.arange(100, dtype=np.int64))
    assert 0 <= estimated(index, np.arange(tokens, dtype=np.int64)) <= tokens


def test_keys_are_of_the_content_and_of_the_namespace():
    rng = np.random.default_rng(4)
    text = passage(rng, 3000)
    alone = set(glance(text, 8, b"a").keys)
    behind = glance(np.concatenate([passage(rng, 33), text]), 8, b"a").keys
    assert len(alone) > 20
    assert len(alone & set(behind)) >= len(alone) - 1
    assert not alone & set(glance(text, 8, b"b").keys)
    assert not alone & set(glance(passage(rng, 3000), 8, b"a").keys)


def test_keys_are_bounded():
    rng = np.random.default_rng(5)
    assert len(glance(passage(rng, 60_000), 8, b"a").keys) == 256


def test_keys_of_what_is_cached_are_not_new():
    rng = np.random.default_rng(6)
    old, new = passage(rng, 2000), passage(rng, 2000)
    index = index_of(old)
    seen = glance(np.concatenate([old, new]), index.window, b"a")
    found = cached_of(index, seen, (b"a",), 0, 0)
    of_new = set(glance(new, index.window, b"a").keys)
    assert len(found.new_keys) > 15
    # Windows on the border are of both.
    assert len(set(found.new_keys) - of_new) <= 2
    assert len(of_new - set(found.new_keys)) <= 2
    # To whom the index may not serve, all behind the prefix is new.
    nothing = cached_of(index, seen, (), 2000, 0)
    assert nothing.tokens == 0
    assert set(nothing.new_keys) == of_new
    assert cached_of(index, seen, (), 4000, 0).new_keys == ()
