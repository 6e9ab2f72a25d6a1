"""Moved keys against keys rotated from scratch, in double precision."""

from __future__ import annotations

import pytest
import torch

from sglang_kvshare.recompute.rope import move_keys, plan_move

pytestmark = pytest.mark.unit
POSITIONS, HEAD_DIM = 4096, 32


def table(rotary_dim, base=10_000.0):
    frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    angles = torch.arange(POSITIONS, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate_from_scratch(keys, positions, cos_sin):
    """RoPE as defined, NeoX pairing, one token and head at a time."""
    half = cos_sin.shape[1] // 2
    out = keys.double().clone()
    for i, position in enumerate(positions.tolist()):
        cos, sin = cos_sin[position].double().chunk(2)
        for head in range(keys.shape[1]):
            first, second = keys[i, head, :half].double(), keys[i, head, half : 2 * half].double()
            out[i, head, :half] = first * cos - second * sin
            out[i, head, half : 2 * half] = second * cos + first * sin
    return out


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_moved_keys_equal_keys_rotated_from_scratch(rotary_dim):
    generator = torch.Generator().manual_seed(3)
    bare = torch.randn(200, 3, HEAD_DIM, generator=generator)
    source = torch.randint(0, POSITIONS, (200,), generator=generator)
    target = torch.randint(0, POSITIONS, (200,), generator=generator)
    cos_sin = table(rotary_dim)
    cached = rotate_from_scratch(bare, source, cos_sin).float()
    expected = rotate_from_scratch(bare, target, cos_sin)
    moved = move_keys(cached, plan_move(cos_sin, source, target))
    assert (moved.double() - expected).abs().max() < 1e-5
    # The control: without the move the keys are far off.
    assert (cached.double() - expected).abs().max() > 0.1


def test_the_donor_is_left_as_it_is_and_the_dtype_stays():
    keys = torch.randn(5, 2, HEAD_DIM).to(torch.bfloat16)
    before = keys.clone()
    positions = torch.arange(5)
    moved = move_keys(keys, plan_move(table(HEAD_DIM), positions, positions + 100))
    assert moved.dtype == torch.bfloat16
    assert torch.equal(keys, before)
    assert not torch.equal(moved, before)


def test_no_distance_is_no_rotation():
    keys = torch.randn(7, 2, HEAD_DIM)
    positions = torch.randint(0, POSITIONS, (7,))
    moved = move_keys(keys, plan_move(table(HEAD_DIM), positions, positions))
    torch.testing.assert_close(moved, keys, atol=1e-6, rtol=0)
