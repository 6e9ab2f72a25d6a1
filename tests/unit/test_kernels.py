"""What holds of the kernels' callables without Triton: when which side runs, and the references."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglang_kvshare.attention.kernels.check_scores import CheckLayer, check_scores
from sglang_kvshare.attention.kernels.compact_rows import compact_rows
from sglang_kvshare.attention.kernels.copy_rotate import copy_rotate, pool_layers
from sglang_kvshare.attention.kernels.pack_mask import mask_bytes, pack_mask
from sglang_kvshare.attention.kernels.stored_words import POOL_DTYPES, words_of
from sglang_kvshare.attention.layerwise_copy import Moves
from sglang_kvshare.engine.geometry import LayerGeometry
from sglang_kvshare.engine.placement import Placer
from sglang_kvshare.recompute.rope import Rotation, plan_move, rotate_, rounded

pytestmark = pytest.mark.unit
SLOTS, HEADS, DIM = 30, 2, 8


def rotation(pairing="neox", scale=1.0, dim=DIM):
    angles = torch.arange(100)[:, None] / torch.arange(1, dim // 2 + 1)
    return Rotation(torch.cat([angles.cos(), angles.sin()], 1) * scale, pairing, scale)


def buffers(dtype, layers=4, dim=DIM, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(layers, SLOTS, HEADS, dim, generator=generator).to(dtype).unbind(0))


class Pool:
    def __init__(self, keys, values):
        self.get_key_buffer, self.get_value_buffer = keys.__getitem__, values.__getitem__


@pytest.mark.parametrize("fault", [None, "keys", "values"])
@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_the_server_places_what_a_slow_copy_gives(dtype, fault):
    """Token by token, bit for bit, with the same verdict; and again when the pool has moved."""
    rotations = [rotation(), None, rotation("gptj", 1.3, 4), rotation()]
    drawn = buffers(dtype), buffers(dtype, seed=1)
    if fault is not None:
        drawn[fault == "values"][2][3, 1, 0] = float("nan")
    slots = torch.tensor([[3, 9, 11], [0, 20, 6]])
    positions = torch.tensor([[5, 99, 0], [70, 2, 0]])
    pool = Pool(*([x.clone() for x in each] for each in drawn))
    placer = Placer(pool, [LayerGeometry(number, each) for number, each in enumerate(rotations)])
    for _ in range(2):
        ours = [[x.clone() for x in each] for each in drawn]
        pool.get_key_buffer, pool.get_value_buffer = (each.__getitem__ for each in ours)
        assert placer.finite(placer.place(Moves(*slots, *positions))) == (fault is None)
        for number, how in enumerate(rotations):
            for at in range(slots.shape[1]):
                source, target = slots[:, at].tolist()
                key, value = (each[number][source] for each in drawn)
                if how is not None:
                    move = plan_move(how, positions[0, at, None], positions[1, at, None])
                    key = rounded(rotate_(key[None].float(), move), dtype)[0]
                for told, right in ((ours[0], key), (ours[1], value)):
                    told, right = told[number][target].float(), right.float()
                    # What is not finite has become 0.
                    right = torch.where(right.isfinite(), right, torch.zeros_like(right))
                    assert torch.equal(told, right), (number, at)


def test_nothing_to_copy_is_nothing_done():
    keys, values = buffers(torch.float32), buffers(torch.float32)
    before = [x.clone() for x in keys]
    none = torch.zeros(0, dtype=torch.int64)
    faults = torch.zeros(1, dtype=torch.int32)
    copy_rotate(pool_layers(keys, values, [rotation()] * 4), none, none, none, none, faults)
    assert all(torch.equal(a, b) for a, b in zip(before, keys, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v, r: (k[:3], v, r), "3 key buffers"),
        (lambda k, v, r: ([x.double() for x in k], v, r), "float64"),
        (lambda k, v, r: ([k[0].half(), *k[1:]], v, r), "differ in shape, dtype"),
        (lambda k, v, r: (k, [x.half() for x in v], r), "differ in dtype"),
        (lambda k, v, r: ([x.transpose(0, 1) for x in k], v, r), "stride"),
        (lambda k, v, r: ([x[:, :, 1:].contiguous() for x in k], v, r), "8 rotated of 7"),
        (lambda k, v, r: ([x.flatten()[1:-7].view(-1, 2, 4) for x in k], v, r), "16 bytes"),
        (lambda k, v, r: (k, v, [Rotation(r[0].table.half())] * 4), "float16"),
    ],
)
def test_a_pool_that_the_kernel_does_not_read_is_refused(change, message):
    given = buffers(torch.float32), buffers(torch.float32), [rotation()] * 4
    with pytest.raises(ValueError, match=message):
        pool_layers(*change(*given))
    pool_layers(*given)


def test_layers_of_one_rotation_share_groups():
    first, second = rotation(), rotation(scale=2.0)
    layers = pool_layers(
        buffers(torch.float32, 12),
        buffers(torch.float32, 12),
        [first, second] * 2 + [None] + [first] * 6 + [None],
    )
    (launch,) = layers.launches
    groups = launch.groups.tolist()
    # Every layer in one group, none of more than four, all of a group alike.
    assert sorted(n for a, b, _ in groups for n in range(a, b)) == list(range(12))
    assert sorted(b - a for a, b, _ in groups) == [2, 2, 4, 4]
    assert sorted(turns for _, _, turns in groups) == [0, 1, 1, 1]
    assert sorted(launch.squares.tolist()) == [1, 1, 1, 4]
    told = sorted((x * 16 + layers.keys[0].data_ptr()) for x in launch.key_offsets.tolist())
    assert told == sorted(x.data_ptr() for x in layers.keys)


@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("numbers", [4, 5])
def test_words_show_what_is_not_finite(dtype, numbers):
    """Every number of 16 bits or fewer, one by one among finite neighbours."""
    words = words_of(dtype, numbers)
    assert words.count * words.bits == numbers * 8 * dtype.itemsize
    width = 8 * dtype.itemsize
    each = torch.arange(2**16) if width == 16 else torch.arange(2**8)
    if width == 32:
        exponents = torch.arange(2**9) << 23
        each = torch.cat([exponents, exponents | 1, exponents | 0x7FFFFF])
    to = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]
    stored = each.to(to).view(dtype)
    per_word = words.bits // width
    largest = torch.full((), torch.finfo(dtype).max).to(dtype).view(to).item() & (2**width - 1)
    for place in range(per_word):
        word = each.clone() << (place * width)
        for other in range(per_word):
            if other != place:
                word = word | (largest << (other * width))
        seen = ((word & words.magnitude) + words.distance) & words.sign
        assert torch.equal(seen != 0, ~stored.float().isfinite())


def test_a_kernel_without_a_device_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows, index = torch.randn(3, 4), torch.tensor([2])
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        compact_rows(rows, rows, index, kernel=True)
    assert torch.equal(compact_rows(rows, rows, index)[1], rows[[2]])


def test_only_the_kernels_themselves_import_triton_and_none_the_engine():
    program = """
import pkgutil, sys, importlib
import sglang_kvshare.attention as attention
names = [m.name for m in pkgutil.walk_packages(attention.__path__, "sglang_kvshare.attention.")]
apart = [n for n in names if ".kernels.device" not in n]
assert "sglang_kvshare.attention.kernels.copy_rotate" in apart
for name in apart:
    importlib.import_module(name)
assert "triton" not in sys.modules
assert not [n for n in sys.modules if n == "sglang" or n.startswith("sglang_kvshare.engine")]
importlib.import_module("sglang_kvshare.attention.kernels.device.copy_rotate")
assert "triton" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_masks_that_do_not_fit_are_refused():
    positions = torch.tensor([0, 3])
    with pytest.raises(ValueError, match="3 rows, but 2"):
        pack_mask(positions, [3], [4])
    with pytest.raises(ValueError, match="without keys"):
        pack_mask(positions, [1, 1], [4, 0])
    with pytest.raises(ValueError, match="no room"):
        pack_mask(positions, [2], [5], torch.empty(1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="more than"):
        pack_mask(positions, [2], [2**34])
    assert pack_mask(positions, [2], [5]).bits.tolist() == [0xE1, 0x01]
    assert mask_bytes([2, 1], [5, 9]) == 4


def test_rows_that_cannot_be_copied_are_refused():
    rows, index = torch.randn(3, 4), torch.tensor([2, 0])
    with pytest.raises(ValueError, match="stride"):
        compact_rows(rows.T, rows, index)
    with pytest.raises(ValueError, match="out of shape"):
        compact_rows(rows, rows, index, (torch.empty(2, 4), torch.empty(2, 3)))


def test_a_check_layer_that_does_not_fit_is_refused():
    def layer(**changes):
        rows = torch.randn(6, 2, 8)
        given = {
            **dict.fromkeys(("query", "fresh_keys", "fresh_values"), rows),
            **dict.fromkeys(("stored_keys", "stored_values"), torch.randn(9, 2, 8)),
            "slots": torch.arange(6),
            "fresh_rows": torch.arange(6, dtype=torch.int32),
            **dict.fromkeys(("probe_rows", "probe_positions"), torch.tensor([5])),
            "reused": torch.tensor([1, 2]),
            "scale": 0.3,
        }
        return CheckLayer(**{**given, **changes})

    assert check_scores(layer()).attention.shape == (2,)
    for changes, message in (
        ({"query": torch.randn(6, 3, 8)}, "3 query heads"),
        ({"query": torch.randn(6, 2, 8).half()}, "float32"),
        ({"fresh_keys": torch.randn(6, 8, 2).transpose(1, 2)}, "stride"),
        ({"stored_keys": torch.randn(9, 2, 7)}, "for rows of"),
        ({"stored_values": torch.randn(9, 2, 8).double()}, "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            check_scores(layer(**changes))


def test_what_is_timed_runs():
    """With the references, on a CPU."""
    from kvshare_eval.device.timed_cases import copy_case, mask_case, rows_case, score_case

    cases = [
        copy_case(32, layers=2, device="cpu"),
        score_case(64, device="cpu"),
        rows_case(20, 0.25, device="cpu"),
        mask_case(40, 0.1, device="cpu"),
    ]
    for case in cases:
        case.run(None)
        case.run(False)
    assert [case.moved_bytes for case in cases] == [
        2 * 32 * 2 * 2 * 8 * 128 * 2,
        5 * 64 * 8 * 128 * 2,
        2 * 2 * 5 * 4096 * 2,
        4 * 40 // 8 + 4 * 8,
    ]
