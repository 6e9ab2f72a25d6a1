"""Stored numbers to fp32 and back by bits, against PyTorch: every FP8 number, and every tie."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sglang_kvshare.attention.kernels.device.numbers import FORMATS, UNSIGNED, rounded, widened

DTYPES = tuple(FORMATS)


@triton.jit
def widen_kernel(bits, out, COUNT: tl.constexpr, FORMAT: tl.constexpr, WORD: tl.constexpr):
    at = tl.arange(0, COUNT)
    number = widened(tl.load(bits.to(tl.pointer_type(WORD)) + at), FORMAT, True)
    tl.store(out + at, number)


@triton.jit
def round_kernel(numbers, out, COUNT: tl.constexpr, FORMAT: tl.constexpr, WORD: tl.constexpr):
    at = tl.arange(0, COUNT)
    told = rounded(tl.load(numbers + at), FORMAT, True)
    tl.store(out.to(tl.pointer_type(WORD)) + at, told)


def all_numbers(dtype):
    """Every number of 16 bits or fewer; of fp32 a mixture."""
    width = 8 * dtype.itemsize
    if width == 32:
        generator = torch.Generator().manual_seed(2)
        return torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator).int().view(dtype)
    bits = torch.arange(2**width, dtype=torch.int32)
    return bits.to(torch.uint8 if width == 8 else torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_widened_exactly(dtype):
    numbers = all_numbers(dtype)
    out = torch.empty(numbers.shape[0])
    word = UNSIGNED[8 * dtype.itemsize]
    widen_kernel[(1,)](numbers, out, numbers.shape[0], FORMATS[dtype], word)
    assert torch.equal(out.isnan(), numbers.float().isnan())
    assert torch.equal(out.nan_to_num(0.125), numbers.float().nan_to_num(0.125))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_to_the_nearest_and_ties_to_even(dtype):
    finite = all_numbers(dtype).float()
    finite = finite[finite.isfinite()].unique()
    # Each number, what is halfway to the next, and the fp32 numbers beside that.
    halfway = (finite[1:].double() + finite[:-1].double()).div(2).float()
    halfway = halfway[torch.linspace(0, len(halfway) - 1, 2000).long().unique()]
    beside = [halfway.nextafter(torch.tensor(end)) for end in (float("inf"), -float("inf"))]
    chosen = finite[torch.linspace(0, len(finite) - 1, 500).long().unique()]
    limit = torch.finfo(dtype).max
    beyond = torch.tensor([limit * 1.5, -limit * 1.5, limit * 1.01]) if dtype.itemsize == 1 else []
    special = torch.tensor([float("nan"), 0.0, -0.0, 1e-30, -1e-30, *beyond])
    numbers = torch.cat([chosen, halfway, *beside, special])
    numbers = torch.nn.functional.pad(numbers, (0, 8192 - len(numbers)))
    out = torch.empty(8192, dtype=dtype)
    round_kernel[(1,)](numbers, out, 8192, FORMATS[dtype], UNSIGNED[8 * dtype.itemsize])
    expected = numbers.clamp(-limit, limit) if dtype.itemsize == 1 else numbers
    expected = expected.to(dtype).float()
    told = out.float()
    assert torch.equal(told.isnan(), expected.isnan())
    assert torch.equal(told.nan_to_num(0.125), expected.nan_to_num(0.125))
    assert torch.equal(told.signbit()[~told.isnan()], expected.signbit()[~told.isnan()])
