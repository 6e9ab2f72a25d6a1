"""The donor index against brute force, under any order of changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_kvshare.matching.donor_index import NONE, DonorIndex

pytestmark = pytest.mark.unit

DIMS = 6
SPACES = (b"a", b"b")


def sketches(count, seed):
    """Few distinct ones, so that many are equal."""
    rows = np.random.default_rng(seed).integers(-1, 2, (count, DIMS)).astype(np.float32)
    rows[~rows.any(1), 0] = 1
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def brute(held, query, count):
    near = [(-round(float(sketch @ query), 5), number) for number, sketch in held.items()]
    return [number for _, number in sorted(near)[:count]]


class Machine(RuleBasedStateMachine):
    """``exact_windows`` is so small that the index is made anew all the time."""

    def __init__(self):
        super().__init__()
        self.index = DonorIndex(DIMS, exact_windows=10**6)
        self.cells = DonorIndex(DIMS, exact_windows=70)
        self.held = {space: {} for space in SPACES}
        self.next = 0

    @rule(space=st.sampled_from(SPACES), count=st.integers(0, 60), seed=st.integers(0, 999))
    def add(self, space, count, seed):
        rows = sketches(count, seed)
        numbers = np.arange(self.next, self.next + count)
        self.next += count
        for index in (self.index, self.cells):
            index.add(space, numbers, rows)
        self.held[space].update(zip(numbers.tolist(), rows, strict=True))

    @rule(share=st.floats(0, 1), seed=st.integers(0, 999))
    def remove(self, share, seed):
        everything = [number for held in self.held.values() for number in held]
        random = np.random.default_rng(seed)
        gone = [number for number in everything if random.random() < share]
        for index in (self.index, self.cells):
            index.remove(np.array([*gone, 10**9], dtype=np.int64))
        for held in self.held.values():
            for number in gone:
                held.pop(number, None)

    @rule(space=st.sampled_from(SPACES))
    def drop(self, space):
        for index in (self.index, self.cells):
            assert sorted(index.drop(space)) == sorted(self.held[space])
        self.held[space] = {}

    @rule()
    def clear(self):
        for index in (self.index, self.cells):
            index.clear()
        self.held = {space: {} for space in SPACES}

    @rule(seed=st.integers(0, 999), count=st.integers(1, 4))
    def search(self, seed, count):
        query = sketches(3, seed) + 1e-3 * np.arange(DIMS, dtype=np.float32)
        for space, held in self.held.items():
            found = self.index.search(space, query, count)
            for row in range(3):
                expected = brute(held, query[row], count)
                told = found.windows[row].tolist()
                near = found.similarity[row].tolist()
                assert len(told) == count
                assert all(number == NONE for number in told[len(expected) :])
                assert all(value == -np.inf for value in near[len(expected) :])
                # Beyond the spare ones, equals are told apart by FAISS.
                worst = near[len(expected) - 1] if expected else 0
                sure = [n for n, v in zip(expected, near, strict=False) if v > worst]
                assert told[: len(sure)] == sure
                assert near[: len(expected)] == pytest.approx(
                    [float(held[n] @ query[row]) for n in expected], abs=1e-4
                )
            # Cells may miss, but never make up.
            for row, told in enumerate(self.cells.search(space, query, count).windows.tolist()):
                assert all(number == NONE or number in held for number in told), row

    @invariant()
    def counts(self):
        for index in (self.index, self.cells):
            assert index.windows == sum(map(len, self.held.values()))
            assert index.namespaces == sum(bool(held) for held in self.held.values())
            assert index.nbytes > index.sketch_bytes >= index.windows * (DIMS * 4 + 8)


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase


def clustered(count, seed=0, dims=64):
    random = np.random.default_rng(seed)
    centres = random.standard_normal((40, dims))
    rows = centres[random.integers(0, 40, count)] + 0.7 * random.standard_normal((count, dims))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_cells_find_what_is_close():
    index, rows = DonorIndex(64, exact_windows=500), clustered(6000)
    for start in range(0, 6000, 50):
        index.add(b"", np.arange(start, start + 50), rows[start : start + 50])
    assert index.sketch_bytes == 6000 * (64 * 4 + 8), "the smaller index is gone"
    asked = np.random.default_rng(1).choice(6000, 300, replace=False)
    noise = 0.05 * np.random.default_rng(2).standard_normal((300, 64)).astype(np.float32)
    query = rows[asked] + noise
    query /= np.linalg.norm(query, axis=1, keepdims=True)
    found = index.search(b"", query, 1).windows[:, 0]
    assert (found == asked).mean() > 0.97


def test_it_shrinks_again():
    index, rows = DonorIndex(64, exact_windows=100), clustered(3000)
    index.add(b"", np.arange(3000), rows)
    for start in range(0, 2990, 10):
        index.remove(np.arange(start, start + 10))
    assert index.windows == 10
    assert index.sketch_bytes < 200 * (64 * 4 + 8)
    found = index.search(b"", rows[2990:], 1).windows[:, 0]
    assert found.tolist() == list(range(2990, 3000)), "exact again"


def test_equal_changes_make_equal_indices():
    """As on the ranks of a tensor-parallel group."""
    rows, query = clustered(2000), clustered(100, seed=1)
    told = []
    for _ in range(2):
        index = DonorIndex(64, exact_windows=300)
        for start in range(0, 2000, 40):
            index.add(b"", np.arange(start, start + 40), rows[start : start + 40])
            index.remove(np.arange(start, start + 7))
        told.append(index.search(b"", query, 4))
    assert (told[0].windows == told[1].windows).all()
    assert (told[0].similarity == told[1].similarity).all()


def test_the_models_threads_stay():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        index = DonorIndex(64)
        index.add(b"", np.arange(100), clustered(100))
        index.search(b"", clustered(100), 2)
        index.remove(np.arange(50))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_another_namespace_is_not_searched():
    index, rows = DonorIndex(64), clustered(10)
    index.add(b"mine", np.arange(10), rows)
    assert (index.search(b"mine", rows, 1).windows[:, 0] == np.arange(10)).all()
    assert (index.search(b"yours", rows, 1).windows == NONE).all()


@given(st.integers(1, 5))
@settings(max_examples=5, deadline=None)
def test_wrong_shapes_and_numbers_are_named(dims):
    index = DonorIndex(DIMS)
    with pytest.raises(ValueError, match=r"expected \(2, 6\)"):
        index.add(b"", np.arange(2), np.ones((2, DIMS + dims), dtype=np.float32))
    index.add(b"", np.arange(2), sketches(2, 0))
    with pytest.raises(ValueError, match="twice"):
        index.add(b"x", np.array([1]), sketches(1, 0))
