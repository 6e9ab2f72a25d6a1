"""Sketches against their definition, word by word."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.matching.sketch import Sketcher, TokenRarity, projection, windows_of

pytestmark = pytest.mark.unit

VOCABULARY, DIM = 50, 12


def embeddings(seed=0, dim=DIM):
    return np.random.default_rng(seed).standard_normal((VOCABULARY, dim)).astype(np.float32) + 3


def tokens(count, seed):
    return np.random.default_rng(seed).integers(0, VOCABULARY, count)


@given(st.integers(0, 300), st.sampled_from([2, 3, 6, 16, 17, 64]))
def test_windows_cover_everything_and_overlap_by_half(count, size):
    windows = windows_of(count, size)
    pairs = list(zip(windows.start.tolist(), windows.end.tolist(), strict=True))
    if count == 0:
        assert pairs == []
        return
    assert pairs[0][0] == 0
    assert pairs[-1][1] == count
    assert all(end - start == min(size, count) for start, end in pairs)
    for (start, _), (following, _) in pairwise(pairs):
        assert 0 < following - start <= max(1, size // 2)


def slow_weights(seen_windows, token):
    seen = sum(token in window for window in seen_windows)
    return math.log((1 + len(seen_windows)) / (1 + seen)) + 1


def slow_table(table):
    """The mean and a quarter of the directions go, by frequency; each row has unit length."""
    weights = [1 / (50 + token) for token in range(len(table))]
    mean = sum(w * row for w, row in zip(weights, table, strict=True)) / sum(weights)
    centred = table.astype(np.float64) - mean
    spread = sum(w * np.outer(row, row) for w, row in zip(weights, centred, strict=True))
    for _ in range(DIM // 4):
        values, directions = np.linalg.eigh(spread)
        main = directions[:, np.argmax(values)]
        centred -= np.outer(centred @ main, main)
        spread -= values.max() * np.outer(main, main)
    return centred / np.linalg.norm(centred, axis=1, keepdims=True)


def parts(ids, size):
    windows = windows_of(len(ids), size)
    return [ids[a:b].tolist() for a, b in zip(windows.start, windows.end, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=3), st.integers(0, 90), st.integers(0, 999))
def test_a_sketch_equals_its_definition(earlier, count, seed):
    table, size = embeddings(), 16
    sketcher = Sketcher(table, size_tokens=size, dims=DIM)
    seen, rarity = [], TokenRarity()
    for number, length in enumerate(earlier):
        ids = tokens(length, 1000 + number)
        rarity.observe(ids, windows_of(length, size))
        seen += parts(ids, size)
    ids = tokens(count, seed)
    windows, sketches = sketcher.sketch(ids, rarity)
    centred = slow_table(table)
    expected = []
    for part in parts(ids, size):
        total = sum(slow_weights(seen, token) * centred[token].astype(np.float64) for token in part)
        expected.append(total / np.linalg.norm(total))
    assert len(windows) == len(expected)
    np.testing.assert_allclose(sketches, np.array(expected).reshape(-1, DIM), atol=5e-4)
    again = sketcher.sketch(ids, rarity)[1]
    assert (again == sketches).all(), "sketching changes nothing"


def test_a_projection_keeps_angles():
    random = np.random.default_rng(0)
    table = random.standard_normal((2000, 256)).astype(np.float32)
    whole, small = Sketcher(table, dims=256), Sketcher(table, dims=128)
    ids = random.integers(0, 2000, 64 * 20)
    # Windows of overlapping content, so that there are angles to keep.
    ids[64:128] = np.concatenate([ids[:48], ids[64:80]])
    one, other = (sketcher.sketch(ids, TokenRarity())[1] for sketcher in (whole, small))
    assert other.shape[1] == 128
    assert np.abs(one @ one.T - other @ other.T).max() < 0.3
    assert (one @ one.T)[0, 2] > 0.6
    assert (other @ other.T)[0, 2] > 0.5


def test_what_is_in_every_window_weighs_least():
    rarity = TokenRarity()
    for seed in range(30):
        ids = tokens(20, seed)
        ids[0] = 7
        ids[ids == 9] = 10
        rarity.observe(ids, windows_of(20, 20))
    weights = rarity.weights(np.arange(VOCABULARY))
    assert weights.argmin() == 7
    assert weights.argmax() == 9
    assert weights.min() > 0


def test_old_counts_fade(monkeypatch):
    monkeypatch.setattr("sglang_kvshare.matching.sketch._MOST_WINDOWS", 100)
    rarity = TokenRarity()
    for _ in range(90):
        rarity.observe(np.array([1]), windows_of(1, 2))
    before = rarity.weights(np.array([1, 2]))
    for _ in range(400):
        rarity.observe(np.array([2]), windows_of(1, 2))
    after = rarity.weights(np.array([1, 2]))
    assert before[0] < before[1]
    assert after[1] < after[0]
    assert rarity.windows <= 100


def test_a_window_that_says_nothing_is_left_out():
    table = np.ones((VOCABULARY, DIM), dtype=np.float32)
    windows, sketches = Sketcher(table, dims=DIM).sketch(tokens(100, 0), TokenRarity())
    assert len(windows) == 0
    assert sketches.shape == (0, DIM)


@pytest.mark.parametrize("size", [0, 1])
def test_a_window_is_no_single_token(size):
    with pytest.raises(ValueError, match="least is 2"):
        Sketcher(embeddings(), size_tokens=size)


def test_embeddings_may_be_projected_before():
    table, ids = embeddings(dim=40), tokens(100, 0)
    one = Sketcher(table, size_tokens=16, dims=8).sketch(ids, TokenRarity())[1]
    other = Sketcher(table @ projection(40, 8), size_tokens=16, dims=8).sketch(ids, TokenRarity())[
        1
    ]
    assert (one == other).all()
