"""Copying stored numbers as words of bits, and telling from the bits whether all are finite.

A number is not finite when the bits behind its sign, as an integer, reach those of infinity (for
E4M3, which has none, those of NaN). Adding what is missing from there to the sign's place carries
into the sign's place exactly then, for all numbers of a word at once:

    bf16, two in a word     s eeeeeeee mmmmmmm   s eeeeeeee mmmmmmm
    & magnitude             0 11111111 0000000   0 01111111 0000000     infinity, a finite one
    + distance              1 00000000 0000000   0 11111111 0000000     0x8000 - 0x7f80 = 0x80
    & sign                  1                    0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: The least magnitude, as an integer, that is not finite.
_FIRST_NOT_FINITE = {
    torch.float32: 0x7F80_0000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
}
#: What a KV pool may hold.
POOL_DTYPES = tuple(_FIRST_NOT_FINITE)
WORD_BITS = 32


@dataclass(frozen=True)
class Words:
    """How a run of numbers is read.

    Attributes:
        bits: of a word: 32, or those of one number where the run does not fill words of 32.
        count: words of the run.
        magnitude, distance, sign: see the module.
    """

    bits: int
    count: int
    magnitude: int
    distance: int
    sign: int


def words_of(dtype: torch.dtype, numbers: int) -> Words:
    """The words of ``numbers`` consecutive ones of a pool's dtype."""
    width = 8 * dtype.itemsize
    bits = WORD_BITS if numbers * width % WORD_BITS == 0 else width
    sign = 1 << (width - 1)
    everywhere = sum(1 << place for place in range(0, bits, width))
    return Words(
        bits=bits,
        count=numbers * width // bits,
        magnitude=(sign - 1) * everywhere,
        distance=(sign - _FIRST_NOT_FINITE[dtype]) * everywhere,
        sign=sign * everywhere,
    )
