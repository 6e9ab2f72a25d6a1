"""The bits of a mask by position, against NumPy's packing of the mask itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.kernels.pack_mask import PackedMask, pack_mask

pytestmark = pytest.mark.unit


def dense(entries: list[tuple[list[int], int]]) -> list[np.ndarray]:
    """bool ``[rows, keys]`` of each entry."""
    return [np.arange(keys) <= np.array(rows)[:, None] for rows, keys in entries]


def packed(entries: list[tuple[list[int], int]]) -> PackedMask:
    positions = torch.tensor([p for rows, _ in entries for p in rows], dtype=torch.int64)
    return pack_mask(positions, [len(rows) for rows, _ in entries], [keys for _, keys in entries])


@st.composite
def entries(draw):
    keys = draw(st.lists(st.integers(1, 37), min_size=1, max_size=5))
    return [
        (draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9).map(sorted)), n) for n in keys
    ]


@settings(max_examples=60)
@given(entries())
def test_it_is_numpy_s_packing_of_the_mask(entries):
    mask = packed(entries)
    wanted = [np.packbits(each, axis=None, bitorder="little") for each in dense(entries)]
    assert mask.bits.dtype == torch.uint8
    assert mask.indptr.dtype == torch.int32
    np.testing.assert_array_equal(mask.bits.numpy(), np.concatenate(wanted))
    np.testing.assert_array_equal(mask.indptr.numpy(), np.cumsum([0, *map(len, wanted)]))


def test_the_drawing_of_the_module():
    mask = packed([([1, 3], 5)])
    assert mask.bits.tolist() == [0xE3, 0x01]
    assert mask.indptr.tolist() == [0, 2]


def test_entries_begin_at_bytes_of_their_own():
    mask = packed([([0], 1), ([0, 1], 2)])
    assert mask.indptr.tolist() == [0, 1, 2]
    assert mask.bits.tolist() == [0b1, 0b1101]
