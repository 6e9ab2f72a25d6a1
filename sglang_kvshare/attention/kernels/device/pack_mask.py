"""See :mod:`sglang_kvshare.attention.kernels.pack_mask`; a program makes a block of bytes.

grid        blocks of bytes of the largest mask  x  requests
byte        eight bits from row and key of its first one on: key + 1, and behind a row's last
            key the next row
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_kvshare.attention.kernels.pack_mask import MaskLayout

_BLOCK_BYTES = 512
NUM_WARPS = 4


def constants() -> dict[str, Any]:
    """What the kernel compiles in."""
    return {"BLOCK": _BLOCK_BYTES}


def run(positions: torch.Tensor, layout: MaskLayout, bits: torch.Tensor) -> None:
    """Launch once."""
    compiled_in = constants()
    blocks = triton.cdiv(layout.bytes_of_largest, compiled_in["BLOCK"])
    pack_mask_kernel[(blocks, layout.kv_lengths.shape[0])](
        positions,
        layout.rows,
        layout.kv_lengths,
        layout.begins,
        bits,
        **compiled_in,
        num_warps=NUM_WARPS,
    )


@triton.jit
def pack_mask_kernel(positions, rows, kv_lengths, begins, bits, BLOCK: tl.constexpr):
    """Arguments: see ``pack_mask`` and ``MaskLayout``."""
    request = tl.program_id(1)
    begin = tl.load(begins + request)
    size = tl.load(begins + request + 1) - begin
    first_row = tl.load(rows + request)
    count = (tl.load(rows + request + 1) - first_row).to(tl.int32)
    kv_length = tl.load(kv_lengths + request)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < size:
        byte = start + tl.arange(0, BLOCK)
        live = byte < size
        at = byte * 8 // kv_length
        # From here on 32 bits are enough.
        key = (byte * 8 - at * kv_length).to(tl.int32)
        row = at.to(tl.int32)
        length = kv_length.to(tl.int32)
        own = positions + first_row
        seen = tl.load(own + row, mask=live & (row < count), other=-1).to(tl.int32)
        packed = tl.zeros([BLOCK], tl.int32)
        for place in tl.static_range(8):
            packed |= tl.where(key <= seen, 1 << place, 0)
            # Behind a row's last key the next row begins; almost no lane loads.
            over = key + 1 == length
            row += tl.where(over, 1, 0)
            key = tl.where(over, 0, key + 1)
            following = tl.load(own + row, mask=live & over & (row < count), other=-1)
            seen = tl.where(over, following.to(tl.int32), seen)
        tl.store(bits + begin + byte, packed.to(tl.uint8), mask=live)
