"""The decompositions of a narrowed attention, against a mask that is written down in full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.launches import (
    AttentionPlan,
    Form,
    Launch,
    Sees,
    in_runs,
    in_two_parts,
    with_mask,
)

pytestmark = pytest.mark.unit


@st.composite
def kept_rows(draw, requests=4, tokens=40):
    """Positions of the kept rows of some requests, and how many each has."""
    parts = draw(
        st.lists(
            st.sets(st.integers(0, tokens - 1), min_size=1, max_size=tokens).map(sorted),
            min_size=1,
            max_size=requests,
        )
    )
    return np.concatenate([np.array(part, dtype=np.int64) for part in parts]), list(map(len, parts))


def seen_by(launch: Launch, plan: AttentionPlan, keys: int) -> np.ndarray:
    """int ``[rows, keys]``: how often the launch has each row look at each key of its request."""
    seen = np.zeros((len(plan.positions), keys), dtype=int)
    for entry in range(launch.entries):
        rows = range(int(launch.row_indptr[entry]), int(launch.row_indptr[entry + 1]))
        start, end = int(launch.key_starts[entry]), int(launch.key_ends[entry])
        for number, row in enumerate(rows):
            for key in range(start, end):
                if launch.sees is Sees.ALL:
                    looks = True
                elif launch.sees is Sees.MASKED:
                    looks = key <= plan.positions[row]
                else:
                    # A causal kernel aligns the last row with the last key.
                    looks = key - start <= (end - start) - len(rows) + number
                seen[row, key] += looks
    return seen


def requests_by(launch: Launch) -> np.ndarray:
    return np.repeat(launch.requests, launch.row_counts)


FORMS = (in_runs, lambda p, c: with_mask(p, c, 3), lambda p, c: in_two_parts(p, c, 3))


@pytest.mark.parametrize("make", FORMS, ids=["runs", "mask", "two parts"])
@settings(max_examples=60, deadline=None)
@given(kept_rows())
def test_each_row_sees_each_key_up_to_its_position_once(make, rows):
    positions, counts = rows
    plan = make(positions, counts)
    wanted = (np.arange(41) <= positions[:, None]).astype(int)
    found = sum(seen_by(launch, plan, 41) for launch in plan.launches)
    np.testing.assert_array_equal(found, wanted)
    for launch in plan.launches:
        np.testing.assert_array_equal(requests_by(launch), np.repeat(range(len(counts)), counts))
        assert launch.row_indptr[0] == 0
        assert launch.row_indptr[-1] == len(positions)
        assert launch.row_counts.min() > 0


def test_the_oracle_sees_a_wrong_decomposition():
    """Control: one run of rows that do not follow each other is not causal by itself."""
    positions = np.array([3, 5], dtype=np.int64)
    launch = Launch(*(np.array(x) for x in ([0], [0, 2], [0], [6])), Sees.CAUSAL)
    plan = AttentionPlan(Form.RUNS, positions, (launch,))
    wanted = np.arange(6) <= positions[:, None]
    assert (seen_by(launch, plan, 6) != wanted).any()


def test_the_drawing_of_the_module():
    positions, counts = np.array([3, 4, 5, 9, 11, 12]), [6]
    (runs,) = in_runs(positions, counts).launches
    assert runs.row_indptr.tolist() == [0, 3, 4, 6]
    assert runs.key_ends.tolist() == [6, 10, 13]
    (mask,) = with_mask(positions, counts, 4).launches
    assert mask.row_indptr.tolist() == [0, 4, 6]
    assert mask.key_ends.tolist() == [10, 13]
    before, among = in_two_parts(positions, counts, 4).launches
    assert before.key_starts.tolist() == [0, 0]
    assert before.key_ends.tolist() == among.key_starts.tolist() == [3, 11]
    assert among.key_ends.tolist() == [10, 13]


def test_runs_of_two_requests_do_not_join():
    """Position 4 of one request and 5 of the next follow each other among the rows."""
    (launch,) = in_runs(np.array([3, 4, 5, 6]), [2, 2]).launches
    assert launch.requests.tolist() == [0, 1]
    assert launch.row_indptr.tolist() == [0, 2, 4]


@settings(max_examples=40, deadline=None)
@given(kept_rows(), st.integers(1, 70))
def test_blocks_are_no_higher_than_they_may_be(rows, height):
    for launch in (*with_mask(*rows, height).launches, *in_two_parts(*rows, height).launches):
        assert launch.row_counts.max() <= height
        # And no lower than they need to be: a request has one that is not full at most.
        blocks = np.bincount(launch.requests)
        assert blocks.tolist() == [-(-count // height) for count in rows[1]]


@settings(max_examples=40, deadline=None)
@given(kept_rows())
def test_mask_bytes_are_those_of_packed_bits(rows):
    for launch in in_two_parts(*rows, 5).launches:
        sizes = [
            len(np.packbits(np.ones(int(count) * int(keys), dtype=bool)))
            for count, keys in zip(launch.row_counts, launch.key_counts, strict=True)
        ]
        assert launch.mask_bytes == (sum(sizes) if launch.sees is Sees.MASKED else 0)
