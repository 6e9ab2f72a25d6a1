"""Stored numbers and fp32, in a kernel: exact, and rounded once to the nearest, ties to even.

Numbers are loaded and stored as unsigned integers of their width. ``BY_BITS`` converts with integer
arithmetic where the device has no instruction for it (FP8 before compute capability 8.9), and in
Triton's interpreter, which truncates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
E4M3 = tl.constexpr(3)
E5M2 = tl.constexpr(4)

FORMATS = {
    torch.float32: FP32.value,
    torch.bfloat16: BF16.value,
    torch.float16: FP16.value,
    torch.float8_e4m3fn: E4M3.value,
    torch.float8_e5m2: E5M2.value,
}
UNSIGNED = {8: tl.uint8, 16: tl.uint16, 32: tl.uint32, 64: tl.uint64}

#: From here on there are instructions for FP8.
_FP8_CAPABILITY = (8, 9)


def as_bits(stored: torch.Tensor) -> torch.Tensor:
    """``stored`` as a kernel takes it: FP8 pointers have no type before capability 8.9."""
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def by_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """``BY_BITS`` for ``dtype`` on ``device``; in the interpreter for all."""
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return bool(dtype.itemsize == 1 and capability < _FP8_CAPABILITY)


@triton.jit
def widened(bits, FORMAT: tl.constexpr, BY_BITS: tl.constexpr):
    """fp32 of stored ``bits``."""
    if FORMAT == FP32:
        return bits.to(tl.float32, bitcast=True)
    elif FORMAT == BF16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == FP16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == E5M2:
        # The upper half of an fp16 number.
        return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif BY_BITS:
        # An fp16 number with a smaller exponent: 2^8 of it.
        wide = bits.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)
    else:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def rounded(number, FORMAT: tl.constexpr, BY_BITS: tl.constexpr):
    """Bits of the fp32 ``number`` in the stored format; FP8 saturates."""
    if FORMAT == FP32:
        return number.to(tl.uint32, bitcast=True)
    elif FORMAT == FP16:
        return number.to(tl.float16).to(tl.uint16, bitcast=True)
    elif FORMAT == BF16:
        if BY_BITS:
            bits = number.to(tl.uint32, bitcast=True)
            up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(number != number, 0x7FC0, up).to(tl.uint16)
        else:
            return number.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    elif FORMAT == E4M3:
        # Not a number compares as false, and stays what it is.
        number = tl.where(number > 448.0, 448.0, number)
        number = tl.where(number < -448.0, -448.0, number)
        if BY_BITS:
            # The least normal number is 2^-6; below, adding 2^14 rounds to multiples of 2^-9.
            return _rounded_fp8(number, 3, 127 - 7, 0.015625, 16384.0)
        else:
            return number.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        number = tl.where(number > 57344.0, 57344.0, number)
        number = tl.where(number < -57344.0, -57344.0, number)
        if BY_BITS:
            # 2^-14, and 2^7 for multiples of 2^-16.
            return _rounded_fp8(number, 2, 127 - 15, 6.103515625e-05, 128.0)
        else:
            return number.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def _rounded_fp8(
    number,
    MANTISSA: tl.constexpr,
    EXPONENT_BIAS: tl.constexpr,
    LEAST_NORMAL: tl.constexpr,
    ROUNDER: tl.constexpr,
):
    """
    MANTISSA: its bits; EXPONENT_BIAS: what fp32's is larger by.
    ROUNDER: a power of 2 whose last fp32 place is the least number of the format.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = number.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    even = size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)
    normal = (even >> DROPPED) - (EXPONENT_BIAS << MANTISSA)
    magnitude = size.to(tl.float32, bitcast=True)
    base = tl.full(magnitude.shape, ROUNDER, tl.float32)
    small = (magnitude + base).to(tl.uint32, bitcast=True) - base.to(tl.uint32, bitcast=True)
    told = tl.where(magnitude < LEAST_NORMAL, small, normal)
    told = tl.where(number != number, 0x7F, told)
    return (sign | told).to(tl.uint8)
