"""Alignments against the textbook's table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.matching.alignment import Block, align

pytestmark = pytest.mark.unit


def distance(one, other):
    """Wagner and Fischer."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def ints(values):
    return np.array(values, dtype=np.int64)


few = st.lists(st.integers(0, 5), max_size=40)


@settings(max_examples=300, deadline=None)
@given(few, few)
def test_it_is_an_alignment_of_fewest_edits(prompt, donor):
    found = align(ints(prompt), ints(donor))
    assert found.edits == distance(prompt, donor)
    edges, edits = (0, 0), 0
    for block in (*found.blocks, Block(len(prompt), len(donor), 0)):
        gap = block.start - edges[0], block.source - edges[1]
        assert min(gap) >= 0
        edits += max(gap)
        same = slice(block.start, block.end), slice(block.source, block.source + block.length)
        assert prompt[same[0]] == donor[same[1]]
        edges = block.end, block.source + block.length
    # What stands between the blocks is all that was edited.
    assert edits == found.edits
    assert all(block.length for block in found.blocks)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 999), st.integers(0, 12))
def test_tokens_around_an_edit_are_found(seed, changes):
    random = np.random.default_rng(seed)
    donor = random.integers(0, 50_000, 128)
    prompt = donor.copy()
    at = random.choice(128, changes, replace=False)
    prompt[at] = 60_000 + np.arange(changes)
    found = align(prompt, donor)
    assert sum(block.length for block in found.blocks) == 128 - changes
    assert all(block.start == block.source for block in found.blocks)
    long = align(prompt, donor, shortest=4).blocks
    assert long == tuple(block for block in found.blocks if block.length >= 4)
    assert sum(block.length for block in found.blocks if block not in long) <= 3 * (changes + 1)


def test_ids_beyond_32_bits_are_told_apart():
    assert align(ints([1, 2]), ints([1 + 2**32, 2])).blocks == (Block(1, 1, 1),)
