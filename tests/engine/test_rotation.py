"""Keys moved by KVShare against keys that SGLang's own rotary classes rotate from scratch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary import CONTEXT, HEAD, KINDS, from_scratch, rope_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

#: Of numbers near 1: fp32 arithmetic in another order, over a table of thousands of positions.
FP32_ERROR = 2e-5


def move(rotation, keys, source, target):
    from sglang_kvshare.recompute.rope import move_keys, plan_move

    return move_keys(keys, plan_move(rotation, source, target))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_key_equals_one_rotated_from_scratch(kind, heads, neox):
    from sglang_kvshare.engine.geometry import rotation_of

    rope = rope_of(kind, is_neox_style=neox)
    rotation = rotation_of(rope, CONTEXT)
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(300, heads, HEAD, generator=generator)
    source, target = torch.randint(0, CONTEXT, (2, 300), generator=generator)
    target[:20] = source[:20]
    # From one end to the other, forwards and backwards.
    source[20:24] = torch.tensor([0, CONTEXT - 1, 0, CONTEXT - 1])
    target[20:24] = torch.tensor([CONTEXT - 1, 0, 0, CONTEXT - 1])
    donor = from_scratch(rope, source, keys)
    kept = donor.clone()
    moved = move(rotation, donor, source, target)
    torch.testing.assert_close(moved, from_scratch(rope, target, keys), atol=FP32_ERROR, rtol=0)
    # The donor's stored value stays as it is.
    assert torch.equal(donor, kept)
    # Positive control: the positions matter.
    assert (moved - donor).abs().max() > 0.5
    # Rotations compose, to the right length as well, although each copy is from the donor.
    again = move(rotation, moved, target, source.flip(0))
    torch.testing.assert_close(
        again, from_scratch(rope, source.flip(0), keys), atol=2 * FP32_ERROR, rtol=0
    )


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    neox=st.booleans(),
    source=st.integers(0, CONTEXT - 1),
    distance=st.integers(-CONTEXT, CONTEXT),
    seed=st.integers(0, 100),
)
def test_any_two_positions(sglang_cpu, kind, neox, source, distance, seed):
    from sglang_kvshare.engine.geometry import rotation_of

    rope = rope_of(kind, is_neox_style=neox)
    target = min(max(source + distance, 0), CONTEXT - 1)
    source, target = torch.tensor([source]), torch.tensor([target])
    keys = torch.randn(1, 2, HEAD, generator=torch.Generator().manual_seed(seed))
    moved = move(rotation_of(rope, CONTEXT), from_scratch(rope, source, keys), source, target)
    torch.testing.assert_close(moved, from_scratch(rope, target, keys), atol=FP32_ERROR, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keys_are_moved_in_fp32_and_rounded_once(kind, dtype):
    """SGLang keeps the table in the model's dtype here; ours is what it was rounded from."""
    from sglang_kvshare.engine.geometry import rotation_of

    exact, rope = rope_of(kind), rope_of(kind, dtype=dtype)
    rotation = rotation_of(rope, CONTEXT)
    assert rotation.table.dtype == torch.float32
    torch.testing.assert_close(
        rotation.table[:CONTEXT], rotation_of(exact, CONTEXT).table[:CONTEXT], atol=1e-6, rtol=0
    )
    keys = torch.randn(200, 2, HEAD, generator=torch.Generator().manual_seed(7))
    source = torch.arange(200)
    target = source.flip(0) * 7
    stored = from_scratch(exact, source, keys).to(dtype)
    moved = move(rotation, stored, source, target)
    assert moved.dtype == dtype
    # What is left is the rounding of the stored value and that of the result.
    error = (moved.float() - from_scratch(exact, target, keys)).abs().max()
    largest = stored.float().abs().max()
    assert error < 2.5 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keys_as_sglang_computes_them(kind, dtype):
    """SGLang rotates in half precision with its rounded table: a move is as close to that as two
    such rotations are to their exact values."""
    from sglang_kvshare.engine.geometry import rotation_of

    rope = rope_of(kind, dtype=dtype)
    keys = torch.randn(200, 2, HEAD, generator=torch.Generator().manual_seed(8)).to(dtype)
    source, target = torch.arange(200), torch.arange(200).flip(0) * 7
    moved = move(rotation_of(rope, CONTEXT), from_scratch(rope, source, keys), source, target)
    expected = from_scratch(rope, target, keys).float()
    error = (moved.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 2 * torch.finfo(dtype).eps


#: Largest error of one rounding, relative to the number: half a unit in the last place.
HALF_ULP = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
#: Half the smallest subnormal: what is lost near zero.
FLOOR = {torch.float8_e4m3fn: 2**-10, torch.float8_e5m2: 2**-17}


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_keys_lose_one_more_rounding(kind, dtype):
    """The bound that docs/how-it-works.md states: exact against the stored numbers but for one
    rounding; against fresh keys the root mean square error is at most 1.5 times as large."""
    from sglang_kvshare.engine.geometry import rotation_of

    rope = rope_of(kind)
    rotation = rotation_of(rope, CONTEXT)
    generator = torch.Generator().manual_seed(9)
    keys = torch.randn(500, 4, HEAD, generator=generator)
    source, target = torch.randint(0, CONTEXT, (2, 500), generator=generator)
    stored = from_scratch(rope, source, keys).to(dtype)
    moved = move(rotation, stored, source, target).float()
    unrounded = move(rotation, stored.float(), source, target)
    bound = HALF_ULP[dtype] * unrounded.abs() + FLOOR[dtype] + FP32_ERROR
    assert ((moved - unrounded).abs() <= bound).all()

    exact = from_scratch(rope, target, keys)
    fresh = exact.to(dtype).float()

    def relative(other):
        return float((other - exact).norm() / exact.norm())

    assert relative(fresh) > 0.01
    assert relative(moved) < 1.5 * relative(fresh)
    # The control: keys that were not moved are no such keys at all.
    assert relative(stored.float()) > 10 * relative(fresh)
