"""The table of fingerprints and the free list, each against a list."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.matching.holes import Holes
from sglang_kvshare.matching.window_hash import fingerprints, seed_of, window_sums
from sglang_kvshare.matching.window_table import WindowTable

pytestmark = pytest.mark.unit


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_newest_living_entries_come_first(data):
    dead: set[int] = set()

    def alive(cells, stamps):
        return np.array([int(cell) not in dead for cell in cells], dtype=bool)

    table = WindowTable(alive, 16)
    entries: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        # 2**30 apart, so that the filter tells them apart; four different ones.
        prints = data.draw(st.lists(st.integers(0, 3), max_size=30))
        cells = list(range(len(entries), len(entries) + len(prints)))
        entries += zip(prints, cells, strict=True)
        table.add(
            np.array(prints, dtype=np.uint32) << np.uint32(30),
            np.array(cells, dtype=np.int32),
            np.ones(len(cells), dtype=np.int32),
        )
        if entries:
            dead.update(data.draw(st.lists(st.integers(0, len(entries) - 1), max_size=8)))
        if data.draw(st.booleans()):
            table.sweep(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9)))
        if data.draw(st.booleans()):
            table.compact(data.draw(st.integers(0, 2 * len(entries))))
        limit = data.draw(st.integers(1, 6))
        queries = np.array([0, 1, 2, 3], dtype=np.uint32) << np.uint32(30)
        query, cell = table.lookup(queries, limit, alive)
        for number in range(4):
            living = [c for p, c in entries if p == number and c not in dead]
            assert sorted(cell[query == number].tolist()) == living[-limit:]
    table.compact(0)
    assert len(table) == sum(cell not in dead for _, cell in entries)
    table.clear()
    assert len(table) == 0


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=40))
def test_cells_are_taken_once_and_neighbours_grow_together(cells, steps):
    holes, taken = Holes(cells), []
    free = set(range(cells))
    for take, number in steps:
        if take and number > len(free):
            with pytest.raises(ValueError, match="full"):
                holes.take(number)
        elif take:
            fits = [s for s in holes.stretches() if s[1] >= number]
            pieces = holes.take(number)
            assert len(pieces) == (1 if fits and number else len(pieces))
            for start, length in pieces:
                assert set(range(start, start + length)) <= free
                free -= set(range(start, start + length))
            taken += pieces
        elif taken:
            start, length = taken.pop(number % len(taken))
            holes.give(start, length)
            free |= set(range(start, start + length))
        expected = sorted(free)
        stretches = holes.stretches()
        assert [c for start, length in stretches for c in range(start, start + length)] == expected
        assert all(a + n < b for (a, n), (b, _) in pairwise(stretches))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 24))
def test_windows_are_hashed_by_their_tokens_alone(tokens, window):
    base, word = 0x9E3779B97F4A7C15, 1 << 64

    def mixed(value):
        value = (value + base) % word
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % word
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % word
        return value ^ (value >> 31)

    expected = []
    for begin in range(len(tokens) - window + 1):
        total = 0
        for token in tokens[begin : begin + window]:
            total = (total * base + mixed(token)) % word
        expected.append(total)
    sums = window_sums(np.array(tokens, dtype=np.int64), window)
    assert sums.tolist() == expected
    seed = seed_of(b"tenant", 1)
    prints = [(total + seed) % word >> 32 for total in expected]
    assert fingerprints(sums, seed).tolist() == prints


def test_seeds_differ_by_domain_and_depth():
    seeds = {seed_of(domain, depth) for domain in (b"", b"a", b"a\0") for depth in range(3)}
    assert len(seeds) == 9
