"""The bits of a mask by position, against NumPy's packing of the mask itself."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention import mask_packing
from sglang_kvshare.attention.mask_packing import best_pack_mask, pack_mask_reference

pytestmark = pytest.mark.unit


def dense(entries: list[tuple[list[int], int]]) -> list[np.ndarray]:
    """bool ``[rows, keys]`` of each entry."""
    return [np.arange(keys) <= np.array(rows)[:, None] for rows, keys in entries]


def tensors(entries: list[tuple[list[int], int]]) -> tuple[torch.Tensor, ...]:
    counts = [len(rows) for rows, _ in entries]
    return (
        torch.tensor([p for rows, _ in entries for p in rows], dtype=torch.int64),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int64),
        torch.tensor([keys for _, keys in entries], dtype=torch.int64),
    )


@st.composite
def entries(draw):
    keys = draw(st.lists(st.integers(1, 37), min_size=1, max_size=5))
    return [
        (draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9).map(sorted)), n) for n in keys
    ]


@pytest.mark.parametrize("pack", [pack_mask_reference, best_pack_mask()], ids=["reference", "best"])
@settings(max_examples=60, deadline=None)
@given(entries())
def test_it_is_numpy_s_packing_of_the_mask(pack, entries):
    packed, indptr = pack(*tensors(entries))
    wanted = [np.packbits(mask, axis=None, bitorder="little") for mask in dense(entries)]
    assert packed.dtype == torch.uint8
    assert indptr.dtype == torch.int32
    np.testing.assert_array_equal(packed.numpy(), np.concatenate(wanted))
    np.testing.assert_array_equal(indptr.numpy(), np.cumsum([0, *map(len, wanted)]))


def test_a_mask_that_is_made_in_parts(monkeypatch):
    drawn = [([3, 50, 99], 100), ([0, 64], 65)]
    whole, _ = pack_mask_reference(*tensors(drawn))
    monkeypatch.setattr(mask_packing, "_BLOCK_BYTES", 3)
    parts, _ = pack_mask_reference(*tensors(drawn))
    assert torch.equal(whole, parts)


def test_the_drawing_of_the_module():
    packed, indptr = pack_mask_reference(*tensors([([1, 3], 5)]))
    assert packed.tolist() == [0xE3, 0x01]
    assert indptr.tolist() == [0, 2]


def test_entries_begin_at_bytes_of_their_own():
    packed, indptr = pack_mask_reference(*tensors([([0], 1), ([0, 1], 2)]))
    assert indptr.tolist() == [0, 1, 2]
    assert packed.tolist() == [0b1, 0b1101]


def test_a_kernel_takes_the_reference_s_place_where_there_is_one(monkeypatch):
    seen = []

    def kernel(positions, counts, kv_lengths):
        seen.append((positions.tolist(), counts, kv_lengths))
        bits, indptr = pack_mask_reference(*tensors([([1, 3], 5), ([0], 2)]))
        return SimpleNamespace(bits=bits, indptr=indptr)

    module = ModuleType("pack_mask")
    module.pack_mask = kernel
    monkeypatch.setattr(mask_packing, "import_module", lambda name: module)
    packed, indptr = best_pack_mask()(*tensors([([1, 3], 5), ([0], 2)]))
    assert seen == [([1, 3, 0], [2, 1], [5, 2])]
    assert (packed.tolist(), indptr.tolist()) == ([0xE3, 0x01, 0b1], [0, 2, 3])


@pytest.mark.parametrize("missing", ["triton", "sglang_kvshare.attention.kernels"])
def test_only_a_build_without_the_kernel_goes_without(monkeypatch, missing):
    def absent(name):
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(mask_packing, "import_module", absent)
    if missing == "triton":
        with pytest.raises(ModuleNotFoundError):
            best_pack_mask()
    else:
        assert best_pack_mask() is pack_mask_reference
