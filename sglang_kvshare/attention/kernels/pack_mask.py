"""The mask by position as bits, the way FlashInfer reads it, without a dense boolean.

The row at position ``p`` of a request sees its keys ``0 .. p``. A request's rows are laid end to
end, ``kv_length`` bits each, the first bit of a byte in its lowest place; each request begins at a
byte:

    request of 2 rows at positions 1 and 3, 5 keys:     1 1 0 0 0   1 1 1 1 0
    bytes                                               11000111 10------    = 0xe3, 0x01

Seam: FlashInfer 0.7.2, ``segment_packbits(..., bitorder="little")`` and
``attention/variants.cuh``, which reads bit ``row * kv_length + key`` behind
``mask_indptr[request]`` bytes. A trap there: ``BatchPrefillWithPagedKVCacheWrapper.plan`` given
``packed_custom_mask`` alone takes ``mask_indptr`` in bits where the kernel wants bytes, so that for
more than one request ``wrapper._mask_indptr_buf`` must be set to :attr:`PackedMask.indptr` after
planning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_kvshare.attention.kernels.where import takes_kernel

#: FlashInfer keeps where a request's bytes begin as int32.
MOST_BYTES = 2**31 - 1


@dataclass(frozen=True)
class PackedMask:
    """
    Attributes:
        bits: uint8 ``[bytes]``; bits behind a request's last are 0.
        indptr: int32 ``[requests + 1]``, where each request begins in ``bits``.
    """

    bits: torch.Tensor
    indptr: torch.Tensor


@dataclass(frozen=True)
class MaskLayout:
    """Where each request's rows and bytes are: one small copy to the device.

    Attributes:
        rows: int64 ``[requests + 1]``, where each request begins among the rows.
        kv_lengths: int64 ``[requests]``.
        begins: int64 ``[requests + 1]``, where each begins in the mask.
        bytes_in_all, bytes_of_largest: on the host.
    """

    rows: torch.Tensor
    kv_lengths: torch.Tensor
    begins: torch.Tensor
    bytes_in_all: int
    bytes_of_largest: int


def mask_bytes(counts: Sequence[int], kv_lengths: Sequence[int]) -> int:
    """What a mask takes, for the choice whether to make one."""
    return sum(-(-c * n // 8) for c, n in zip(counts, kv_lengths, strict=True))


def pack_mask(
    positions: torch.Tensor,
    counts: Sequence[int],
    kv_lengths: Sequence[int],
    out: torch.Tensor | None = None,
    *,
    kernel: bool | None = None,
) -> PackedMask:
    """Make the mask on the device of ``positions``.

    Args:
        positions: int64 ``[rows]``, of each request's rows, request after request.
        counts: rows of each request.
        kv_lengths: keys of each request, at least 1.
        out: uint8 with room for the mask, of which the first bytes are used.
        kernel: see :func:`sglang_kvshare.attention.kernels.where.takes_kernel`.

    Raises:
        ValueError: the counts do not fit ``positions``, or the mask does not fit ``out`` or int32.
    """
    if sum(counts) != positions.shape[0]:
        raise ValueError(f"{sum(counts)} rows, but {positions.shape[0]} positions")
    if min(kv_lengths, default=1) < 1:
        raise ValueError("a request without keys")
    layout = _layout(counts, kv_lengths, positions.device)
    if layout.bytes_in_all > MOST_BYTES:
        raise ValueError(f"a mask of {layout.bytes_in_all} bytes, more than {MOST_BYTES}")
    if out is None:
        out = torch.empty(layout.bytes_in_all, dtype=torch.uint8, device=positions.device)
    if out.dtype != torch.uint8 or out.dim() != 1 or out.shape[0] < layout.bytes_in_all:
        raise ValueError(f"no room for {layout.bytes_in_all} bytes in {out.dtype} {out.shape}")
    bits = out[: layout.bytes_in_all]
    if layout.bytes_in_all and takes_kernel(positions, kernel):
        from sglang_kvshare.attention.kernels.device import pack_mask as device

        device.run(positions, layout, bits)
    else:
        bits.copy_(pack_mask_reference(positions, counts, kv_lengths))
    return PackedMask(bits, layout.begins.to(torch.int32))


def pack_mask_reference(
    positions: torch.Tensor, counts: Sequence[int], kv_lengths: Sequence[int]
) -> torch.Tensor:
    """The bits of :func:`pack_mask` from a dense boolean, one request at a time."""
    packed = [torch.empty(0, dtype=torch.uint8, device=positions.device)]
    places = torch.arange(8, device=positions.device, dtype=torch.uint8)
    for part, keys in zip(positions.split(list(counts)), kv_lengths, strict=True):
        dense = torch.arange(keys, device=positions.device) <= part[:, None]
        bits = torch.nn.functional.pad(dense.flatten(), (0, -dense.numel() % 8)).view(-1, 8)
        packed.append((bits.to(torch.uint8) << places).sum(1, dtype=torch.uint8))
    return torch.cat(packed)


def _layout(counts: Sequence[int], kv_lengths: Sequence[int], device: torch.device) -> MaskLayout:
    sizes = [mask_bytes([c], [n]) for c, n in zip(counts, kv_lengths, strict=True)]
    rows, begins = [0], [0]
    for count, size in zip(counts, sizes, strict=True):
        rows.append(rows[-1] + count)
        begins.append(begins[-1] + size)
    told = torch.tensor([*rows, *begins, *kv_lengths], dtype=torch.int64)
    if device.type == "cuda":
        # From pinned memory nothing waits for the copy.
        told = told.pin_memory()
    on_device = told.to(device, non_blocking=True)
    ends = len(rows)
    return MaskLayout(
        rows=on_device[:ends],
        begins=on_device[ends : 2 * ends],
        kv_lengths=on_device[2 * ends :],
        bytes_in_all=begins[-1],
        bytes_of_largest=max(sizes, default=0),
    )
