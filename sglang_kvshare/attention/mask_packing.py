"""A mask by position, in the bits that FlashInfer reads.

    entry with rows at positions 1, 3 and 5 keys      bits (row 0: 11000, row 1: 11110)
    in one sequence, lowest bit first                 11000111 10|000000
    bytes                                             0xE3 0x01

The bits of an entry follow each other without gaps between its rows; every entry begins with a byte
of its own (``segment_packbits(..., bitorder="little")``, and ``DefaultAttention`` in FlashInfer's
``variants.cuh``, which reads bit ``row * kv_len + key`` behind the entry's ``mask_indptr``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

#: ``(positions, row_indptr, kv_lens) -> (packed, mask_indptr)``, see :func:`pack_mask_reference`.
PackMask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: Bytes made at a time: eight numbers of eight bytes for each.
_BLOCK_BYTES = 1 << 18


def pack_mask_reference(
    positions: torch.Tensor, row_indptr: torch.Tensor, kv_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row at position ``p`` sees the keys ``0 .. p`` of its entry.

    Args:
        positions: int64 ``[rows]``, among the keys of its entry; on the device.
        row_indptr: int64 ``[entries + 1]``, rows of each entry; on the host, so that the size is
            known without waiting for the device.
        kv_lens: int64 ``[entries]``, keys of each; on the host.

    Returns:
        ``packed``, uint8 ``[bytes]``, and ``mask_indptr``, int32 ``[entries + 1]``, where the bytes
        of each entry begin; both on the device of ``positions``. Bits behind an entry's last are 0.
    """
    bits = row_indptr.diff() * kv_lens
    indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int64)
    torch.cumsum((bits + 7) // 8, 0, out=indptr[1:])
    packed = torch.zeros(int(indptr[-1]), dtype=torch.uint8, device=positions.device)
    weights = (1 << torch.arange(8, device=positions.device)).to(torch.uint8)
    for entry, keys in enumerate(kv_lens.tolist()):
        rows = positions[int(row_indptr[entry]) : int(row_indptr[entry + 1])]
        begin, end = int(indptr[entry]), int(indptr[entry + 1])
        for first in range(begin, end, _BLOCK_BYTES):
            last = min(first + _BLOCK_BYTES, end)
            bit = torch.arange((first - begin) * 8, (last - begin) * 8, device=positions.device)
            row = bit // keys
            inside = row < len(rows)
            seen = (bit % keys <= rows[row.clamp_(max=len(rows) - 1)]) & inside
            packed[first:last] = (seen.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return packed, indptr.to(torch.int32).to(positions.device)


def best_pack_mask() -> PackMask:
    """The kernel where this build has one, which takes a reference for tensors on a CPU."""
    try:
        kernel = import_module("sglang_kvshare.attention.kernels.pack_mask").pack_mask
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("sglang_kvshare"):
            raise
        return pack_mask_reference

    def pack(
        positions: torch.Tensor, row_indptr: torch.Tensor, kv_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = kernel(positions, row_indptr.diff().tolist(), kv_lens.tolist())
        return mask.bits, mask.indptr

    return pack
