"""The copy under Triton's interpreter, against its reference and a rotation in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.kernels.copy_rotate import copy_rotate, pool_layers
from sglang_kvshare.recompute.rope import Rotation

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8)
POSITIONS, SLOTS = 600, 96


def rotation(rotary_dim, pairing="neox", scale=1.0, base=10_000.0):
    frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    table = (torch.cat([angles.cos(), angles.sin()], dim=-1) * scale).float()
    return Rotation(table, pairing, scale)


def pool_of(dtype, rotations, heads, key_dim, value_dim, seed):
    generator = torch.Generator().manual_seed(seed)

    def buffers(dim):
        drawn = torch.randn(len(rotations), SLOTS, heads, dim, generator=generator)
        return [each.contiguous() for each in drawn.to(dtype)]

    return pool_layers(buffers(key_dim), buffers(value_dim), rotations)


def cloned(layers):
    return pool_layers(
        [x.clone() for x in layers.keys], [x.clone() for x in layers.values], layers.rotations
    )


def slots_of(count, page, seed):
    """Slots of donors and targets, no two alike, in runs of a page."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(SLOTS // page, generator=generator)
    slots = (pages[:, None] * page + torch.arange(page)).flatten()
    return slots[:count], slots[count : 2 * count]


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


def turned_exactly(keys, source, target, rotation):
    """One pair of dimensions at a time: by the angles themselves, in double precision."""
    out = keys.double().clone()
    half = rotation.table.shape[1] // 2
    table = rotation.table.double() / rotation.scale
    for i, (s, t) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        for pair in range(half):
            angle_s, angle_t = (torch.atan2(table[p, half + pair], table[p, pair]) for p in (s, t))
            cos, sin = (angle_t - angle_s).cos(), (angle_t - angle_s).sin()
            a, b = (pair, pair + half) if rotation.pairing == "neox" else (2 * pair, 2 * pair + 1)
            x, y = keys[i, :, a].double(), keys[i, :, b].double()
            out[i, :, a], out[i, :, b] = x * cos - y * sin, y * cos + x * sin
    return out


def half_unit(exact, dtype):
    """Half a unit in the last place of the numbers nearest to ``exact``."""
    info = torch.finfo(dtype)
    size = exact.abs().clamp(min=info.tiny)
    return info.eps * torch.exp2(size.log2().floor()) / 2


@settings(deadline=None, max_examples=12, database=None)
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 3, 4]),
    key_dim=st.sampled_from([12, 16]),
    value_dim=st.sampled_from([6, 16]),
    rotary_dim=st.sampled_from([2, 8, 12]),
    pairing=st.sampled_from(["neox", "gptj"]),
    scale=st.sampled_from([1.0, 1.1386]),
    shape=st.sampled_from(["same", "other", "none", "both pairings"]),
    count=st.integers(1, 9),
    page=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_every_layer_is_moved_by_its_own_rotation(
    dtype, heads, key_dim, value_dim, rotary_dim, pairing, scale, shape, count, page, seed
):
    main = rotation(rotary_dim, pairing, scale)
    other = {
        "same": main,
        "other": rotation(rotary_dim, pairing, base=500.0),
        "none": None,
        "both pairings": rotation(4, "gptj" if pairing == "neox" else "neox"),
    }[shape]
    # More of one rotation than share cosines and sines.
    rotations = [main, None, main, other, main, main, main]
    ours = pool_of(dtype, rotations, heads, key_dim, value_dim, seed)
    before, theirs = cloned(ours), cloned(ours)
    assert len(ours.launches) == (2 if shape == "both pairings" else 1)
    sources, targets = slots_of(count, page, seed)
    source, target = torch.randint(
        0, POSITIONS, (2, count), generator=torch.Generator().manual_seed(seed)
    )
    faults = torch.zeros(2, 1, dtype=torch.int32)
    copy_rotate(ours, sources, targets, source, target, faults[0], kernel=True)
    copy_rotate(theirs, sources, targets, source, target, faults[1], kernel=False)
    assert faults.tolist() == [[0], [0]]
    rest = torch.ones(SLOTS, dtype=torch.bool)
    rest[targets] = False
    for number, how in enumerate(rotations):
        old, key, value = before.keys[number], ours.keys[number], ours.values[number]
        assert torch.equal(raw(value), raw(theirs.values[number]))
        assert torch.equal(raw(value)[targets], raw(before.values[number])[sources])
        assert torch.equal(raw(key)[rest], raw(old)[rest])
        if how is None:
            assert torch.equal(raw(key)[targets], raw(old)[sources])
            continue
        exact = turned_exactly(old[sources].float(), source, target, how)
        slack = half_unit(exact, dtype) + 4e-6
        for told in (key, theirs.keys[number]):
            assert ((told.float()[targets].double() - exact).abs() <= slack).all()
        turned = how.table.shape[1]
        assert torch.equal(raw(key[..., turned:])[targets], raw(old[..., turned:])[sources])


@pytest.mark.parametrize("pairing", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found_wherever_it_is(dtype, pairing):
    how = rotation(8, pairing)
    sources, targets = slots_of(3, 1, 5)
    positions = torch.tensor([[3, 90, 7], [450, 2, 7]])
    fault = [float("nan"), float("inf"), -float("inf")][: 1 if dtype == FP8[0] else 3]
    # Layer, keys or values, dimension, and what is there.
    places = [(0, 0, 1, f) for f in fault] + [(0, 0, 11, fault[-1]), (0, 1, 5, fault[-1])]
    places += [(1, 0, 2, fault[-1]), (1, 1, 0, fault[0])]
    for place in places:
        layer, where, dim, number = place
        # The control: as much beside the donors.
        for slot, expected in ((sources[1], 1), (targets[0], 0))[: 2 if place == places[0] else 1]:
            layers = pool_of(dtype, [how, None], 2, 12, 6, 8)
            (layers.keys, layers.values)[where][layer][slot, 1, dim] = number
            faults = torch.zeros(2, 1, dtype=torch.int32)
            for kernel in (True, False):
                told = cloned(layers)
                copy_rotate(told, sources, targets, *positions, faults[int(kernel)], kernel=kernel)
                # It goes no further.
                for buffer in (*told.keys, *told.values):
                    assert buffer[targets[: 2 if expected else 0]].float().isfinite().all()
            assert faults.tolist() == [[expected], [expected]], (layer, where, dim, number, slot)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_may_leave_the_range(dtype):
    """FP8 saturates, as the reference does; for the others it is a fault."""
    how = rotation(8)
    sources, targets = slots_of(4, 1, 5)
    source, target = torch.tensor([[0, 0, 0, 9], [1, 2, 5, 9]])
    layers = pool_of(dtype, [how], 1, 8, 4, 8)
    layers.keys[0][sources] = torch.full((), torch.finfo(dtype).max).to(dtype)
    theirs, faults = cloned(layers), torch.zeros(2, 1, dtype=torch.int32)
    copy_rotate(layers, sources, targets, source, target, faults[0], kernel=True)
    copy_rotate(theirs, sources, targets, source, target, faults[1], kernel=False)
    assert faults.tolist() == [[int(dtype not in FP8)]] * 2
    if dtype in FP8:
        told = layers.keys[0][targets].float()
        assert told.isfinite().all()
        assert (told == torch.finfo(dtype).max).any()
        assert torch.equal(raw(layers.keys[0]), raw(theirs.keys[0]))


def test_a_fault_stays_told():
    layers = pool_of(torch.float32, [rotation(8)], 1, 8, 4, 8)
    sources, targets = slots_of(2, 1, 5)
    faults = torch.ones(1, dtype=torch.int32)
    for kernel in (True, False):
        copy_rotate(layers, sources, targets, sources, targets, faults, kernel=kernel)
        assert faults.tolist() == [1]
