"""See :mod:`sglang_kvshare.attention.kernels.compact_rows`; rows are copied as words of bits.

grid        kept rows  x  blocks of words; each program takes its block of both tensors
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_kvshare.attention.kernels.device.numbers import UNSIGNED

_BLOCK_WORDS = 1024
NUM_WARPS = 4


def constants(row_bytes: tuple[int, int], word_bits: tuple[int, int]) -> dict[str, Any]:
    """What the kernel compiles in, for each of the two tensors.

    Args:
        row_bytes: of one row.
        word_bits: of the words that it is copied in, of which addresses and strides are multiples.
    """
    words = [8 * size // bits for size, bits in zip(row_bytes, word_bits, strict=True)]
    return {
        "FIRST": words[0],
        "FIRST_WORD": UNSIGNED[word_bits[0]],
        "SECOND": words[1],
        "SECOND_WORD": UNSIGNED[word_bits[1]],
        "BLOCK": min(_BLOCK_WORDS, triton.next_power_of_2(max(*words, 1))),
    }


def run(
    first: torch.Tensor,
    second: torch.Tensor,
    index: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Launch once."""
    bits = _word_bits(first, out[0]), _word_bits(second, out[1])
    compiled_in = constants((_row_bytes(first), _row_bytes(second)), bits)
    widest = max(compiled_in["FIRST"], compiled_in["SECOND"])
    if not widest:
        return
    grid = (index.shape[0], triton.cdiv(widest, compiled_in["BLOCK"]))
    compact_rows_kernel[grid](
        first,
        second,
        index,
        *out,
        _stride_bytes(first) * 8 // bits[0],
        _stride_bytes(second) * 8 // bits[1],
        **compiled_in,
        num_warps=NUM_WARPS,
    )


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1] * tensor.dtype.itemsize)


def _stride_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.stride(0) * tensor.dtype.itemsize)


def _word_bits(tensor: torch.Tensor, out: torch.Tensor) -> int:
    """The widest word that rows, the distance between them and addresses are multiples of."""
    sizes = _row_bytes(tensor), _stride_bytes(tensor), tensor.data_ptr(), out.data_ptr()
    return 8 * math.gcd(4, *sizes)


@triton.jit
def compact_rows_kernel(
    first,
    second,
    index,
    first_out,
    second_out,
    first_stride,
    second_stride,
    FIRST: tl.constexpr,
    FIRST_WORD: tl.constexpr,
    SECOND: tl.constexpr,
    SECOND_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Strides and ``FIRST``, ``SECOND`` (words of a row) in words."""
    made = tl.program_id(0).to(tl.int64)
    row = tl.load(index + made)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(
        first.to(tl.pointer_type(FIRST_WORD)) + row * first_stride + word, mask=word < FIRST
    )
    b = tl.load(
        second.to(tl.pointer_type(SECOND_WORD)) + row * second_stride + word, mask=word < SECOND
    )
    tl.store(first_out.to(tl.pointer_type(FIRST_WORD)) + made * FIRST + word, a, mask=word < FIRST)
    tl.store(
        second_out.to(tl.pointer_type(SECOND_WORD)) + made * SECOND + word, b, mask=word < SECOND
    )
