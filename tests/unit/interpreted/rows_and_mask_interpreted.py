"""Row compaction and mask packing under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.kernels.compact_rows import compact_rows
from sglang_kvshare.attention.kernels.pack_mask import pack_mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)


@settings(deadline=None, max_examples=15, database=None)
@given(
    rows=st.integers(1, 12),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 1100)),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    apart=st.integers(0, 3),
    begin=st.integers(0, 2),
    data=st.data(),
)
def test_rows_are_those_of_the_index(rows, widths, dtypes, apart, begin, data):
    index = data.draw(st.lists(st.integers(0, rows - 1), max_size=6))
    index = torch.tensor(index, dtype=torch.int64)
    given_ = []
    for width, dtype in zip(widths, dtypes, strict=True):
        whole = torch.randn(rows, begin + width + apart).mul_(50).to(dtype)
        given_.append(whole[:, begin : begin + width])
    for kernel in (True, False):
        told = compact_rows(*given_, index, kernel=kernel)
        for one, tensor in zip(told, given_, strict=True):
            assert torch.equal(one, tensor[index])


def test_what_is_beside_the_rows_is_left_alone():
    first, second = torch.randn(5, 7), torch.randn(5, 33).bfloat16()
    index = torch.tensor([4, 0, 4])
    around = torch.full((5, 7), 9.0), torch.full((5, 33), 9.0).bfloat16()
    out = around[0][1:4], around[1][1:4]
    told = compact_rows(first, second, index, out, kernel=True)
    assert told[0].data_ptr() == out[0].data_ptr()
    for whole, tensor in zip(around, (first, second), strict=True):
        assert torch.equal(whole[1:4], tensor[index])
        assert (whole[[0, 4]] == 9).all()


def packed_slowly(positions, counts, kv_lengths):
    """Bit by bit, by NumPy's packing, as FlashInfer documents its own."""
    told, begin = [], 0
    for count, keys in zip(counts, kv_lengths, strict=True):
        rows = positions[begin : begin + count]
        bits = [key <= position for position in rows for key in range(keys)]
        told.append(np.packbits(np.array(bits, dtype=bool), bitorder="little"))
        begin += count
    return np.concatenate([np.zeros(0, dtype=np.uint8), *told])


@st.composite
def requests(draw):
    told = []
    for _ in range(draw(st.integers(0, 4))):
        keys = draw(st.sampled_from([1, 2, 3, 7, 8, 9, 31, 64, 130]))
        few = st.lists(st.integers(0, keys - 1), max_size=min(keys, 40), unique=True)
        told.append((sorted(draw(few)), keys))
    return told


@settings(deadline=None, max_examples=25, database=None)
@given(requests())
def test_bits_are_those_that_flashinfer_packs(batch):
    positions = [p for rows, _ in batch for p in rows]
    counts, keys = [len(rows) for rows, _ in batch], [n for _, n in batch]
    expected = packed_slowly(positions, counts, keys)
    at = torch.tensor(positions, dtype=torch.int64)
    # Room that is larger: what is behind the mask is left alone.
    room = torch.full((len(expected) + 5,), 0xAA, dtype=torch.uint8)
    for kernel in (True, False):
        told = pack_mask(at, counts, keys, room, kernel=kernel)
        assert told.bits.tolist() == expected.tolist()
        assert (room[len(expected) :] == 0xAA).all()
        sizes = [(count * n + 7) // 8 for count, n in zip(counts, keys, strict=True)]
        assert told.indptr.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        assert told.indptr.dtype == torch.int32


def test_a_mask_of_several_blocks():
    positions = torch.arange(0, 900, 9)
    told = pack_mask(positions, [100], [901], kernel=True)
    assert told.bits.tolist() == packed_slowly(positions.tolist(), [100], [901]).tolist()
    assert len(told.bits) > 10_000
