"""Moved keys against keys rotated from scratch, in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.recompute.rope import Rotation, move_keys, plan_move, rounded

pytestmark = pytest.mark.unit
POSITIONS, HEAD_DIM = 4096, 32
PAIRINGS = ("neox", "gptj")


def rotation(rotary_dim=HEAD_DIM, pairing="neox", scale=1.0, base=10_000.0):
    frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    angles = torch.arange(POSITIONS, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
    return Rotation(table, pairing, scale)


def rotate_from_scratch(keys, positions, rotation):
    """RoPE as defined, one token, head and pair at a time."""
    half = rotation.table.shape[1] // 2
    out = keys.double().clone()
    for i, position in enumerate(positions.tolist()):
        cos, sin = rotation.table[position].double().chunk(2)
        for pair in range(half):
            a, b = (pair, pair + half) if rotation.pairing == "neox" else (2 * pair, 2 * pair + 1)
            first, second = keys[i, :, a].double(), keys[i, :, b].double()
            out[i, :, a] = first * cos[pair] - second * sin[pair]
            out[i, :, b] = second * cos[pair] + first * sin[pair]
    return out


@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(
        st.tuples(
            st.integers(0, POSITIONS - 1) | st.sampled_from([0, POSITIONS - 1]),
            st.integers(0, POSITIONS - 1) | st.sampled_from([0, POSITIONS - 1]),
        ),
        min_size=1,
        max_size=12,
    ),
    rotary_dim=st.sampled_from([HEAD_DIM, HEAD_DIM // 2, 2]),
    pairing=st.sampled_from(PAIRINGS),
    scale=st.sampled_from([1.0, 1.1386, 0.7]),
    seed=st.integers(0, 1000),
)
def test_moved_keys_equal_keys_rotated_from_scratch(ends, rotary_dim, pairing, scale, seed):
    how = rotation(rotary_dim, pairing, scale)
    source, target = torch.tensor(ends).T
    bare = torch.randn(len(ends), 3, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    cached = rotate_from_scratch(bare, source, how).float()
    moved = move_keys(cached, plan_move(how, source, target))
    expected = rotate_from_scratch(bare, target, how)
    assert (moved.double() - expected).abs().max() < 1e-5
    # Partial rotary: the rest is untouched, to the bit.
    assert torch.equal(moved[..., rotary_dim:], bare[..., rotary_dim:])


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_the_positions_the_pairing_and_the_scale_matter(pairing, scale):
    """The control of the test above: each of the three, taken wrongly, is far off."""
    how = rotation(pairing=pairing, scale=scale)
    bare = torch.randn(20, 2, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    source, target = torch.arange(20), torch.arange(20) + 900
    cached = rotate_from_scratch(bare, source, how).float()
    expected = rotate_from_scratch(bare, target, how)
    other = {"neox": "gptj", "gptj": "neox"}[pairing]
    wrong = [
        cached,
        move_keys(cached, plan_move(how, target, source)),
        move_keys(cached, plan_move(Rotation(how.table, other, scale), source, target)),
        move_keys(cached, plan_move(Rotation(how.table, pairing, scale * 1.1), source, target)),
    ]
    for keys in wrong:
        assert (keys.double() - expected).abs().max() > 0.1


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("scale", [1.0, 1.3, 0.7])
def test_a_key_moved_again_and_again_keeps_its_length(pairing, scale):
    how = rotation(pairing=pairing, scale=scale)
    keys = torch.randn(50, 2, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    at = torch.arange(50)
    moved = keys
    for step in (700, 3, 1999):
        moved = move_keys(moved, plan_move(how, at, at + step))
        at = at + step
    torch.testing.assert_close(moved.norm(dim=-1), keys.norm(dim=-1), atol=0, rtol=1e-5)
    # Three moves are one, and back is where it began.
    torch.testing.assert_close(
        moved, move_keys(keys, plan_move(how, torch.arange(50), at)), atol=2e-5, rtol=0
    )
    torch.testing.assert_close(
        move_keys(moved, plan_move(how, at, torch.arange(50))), keys, atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_donor_is_left_as_it_is_and_the_result_is_rounded_once(pairing, dtype):
    keys = torch.randn(5, 2, HEAD_DIM).to(dtype)
    before = keys.clone()
    positions = torch.arange(5)
    move = plan_move(rotation(pairing=pairing), positions, positions + 100)
    moved = move_keys(keys, move)
    assert moved.dtype == dtype
    assert torch.equal(keys.float(), before.float())
    assert not torch.equal(moved.float(), before.float())
    exact = move_keys(keys.float(), move)
    assert torch.equal(moved.float(), exact.to(dtype).float())


def test_no_distance_is_no_rotation():
    keys = torch.randn(7, 2, HEAD_DIM)
    positions = torch.randint(0, POSITIONS, (7,))
    moved = move_keys(keys, plan_move(rotation(scale=1.2), positions, positions))
    torch.testing.assert_close(moved, keys, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates_and_keeps_what_is_not_a_number(dtype):
    limit = torch.finfo(dtype).max
    values = torch.tensor([limit * 1.4, -limit * 1.4, 1.0, float("nan")])
    stored = rounded(values, dtype).float()
    assert stored[:3].tolist() == [limit, -limit, 1.0]
    assert stored[3].isnan()
