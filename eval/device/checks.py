"""Each kernel against its definition in fp64, on fresh random numbers, at sizes that fit no tile.

An error is the largest difference of one number, as a share of the root mean square of what is
right: one wrong number shows among many. On a CPU the kernels' references in PyTorch are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvshare_eval.device import references
from kvshare_eval.device.attention_rows import FORM_COSTS, RowsCase, scattered
from kvshare_eval.device.flashinfer_setup import MakeWrapper, adapter
from kvshare_eval.device.kv_pool import KVPool, PoolBackend
from kvshare_eval.device.model_shapes import SMALL, TINY, ModelShape
from sglang_kvshare.attention.kernels.check_scores import TOLD, CheckLayer, check_scores
from sglang_kvshare.attention.kernels.compact_rows import compact_rows
from sglang_kvshare.attention.kernels.copy_rotate import copy_rotate, pool_layers
from sglang_kvshare.attention.kernels.pack_mask import pack_mask
from sglang_kvshare.attention.launch_choice import AttentionCosts, choose
from sglang_kvshare.attention.launches import Form
from sglang_kvshare.attention.merging import merge_parts
from sglang_kvshare.engine.row_attention import PositionMaskRows, RowAttention
from sglang_kvshare.recompute.rope import Pairing, Rotation

#: Half a unit in the last place of a number five times the root mean square, and some room.
ROUNDING = {
    torch.float32: 1e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 0.32,
    torch.float8_e5m2: 0.64,
}


@dataclass(frozen=True)
class Check:
    """
    Attributes:
        error: 0 where bits must be equal and are; not a number never passes.
        limit: the largest error that passes.
        beside: what else was seen.
    """

    name: str
    error: float
    limit: float
    beside: str = ""

    @property
    def passes(self) -> bool:
        return self.error <= self.limit


#: A check that is still to be run.
Pending = tuple[str, Callable[[], Check]]


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """See the module; infinite where something is not finite."""
    difference = (found.double() - wanted.double()).abs().max()
    size = wanted.double().square().mean().sqrt().clamp(min=1e-300)
    told = float(difference / size)
    return told if np.isfinite(told) else float("inf")


def equal(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """0 for the same bits, else infinite."""
    same = found.shape == wanted.shape and torch.equal(
        found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )
    return 0.0 if same else float("inf")


def kernel_checks(device: str) -> Iterator[Pending]:
    heads, dim = (8, 128) if device == "cuda" else (2, 16)
    pairings: tuple[Pairing, ...] = ("neox", "gptj")
    for dtype, pairing in product(ROUNDING, pairings):
        name = f"copy_rotate, {_short(dtype)}, {pairing}"
        yield name, partial(_copy, name, device, dtype, pairing, heads, dim)
    for dtype, stored in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ):
        name = f"check_scores, {_short(dtype)}, stored {_short(stored)}"
        yield name, partial(_scores, name, device, dtype, stored, heads, dim)
    yield "compact_rows", partial(_rows, "compact_rows", device)
    yield "pack_mask", partial(_mask, "pack_mask", device)
    yield "merge_parts", partial(_merge, "merge_parts", device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(
    name: str, device: str, dtype: torch.dtype, pairing: Pairing, heads: int, dim: int
) -> Check:
    generator = torch.Generator().manual_seed(1)
    layers, slots, tokens = 5, 512, 193
    angles = torch.arange(4096)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)

    def rotation(scale: float, rotary: int) -> Rotation:
        told = angles[:, : rotary // 2].double()
        table = (torch.cat([told.cos(), told.sin()], 1) * scale).float()
        return Rotation(table.to(device), pairing, scale)

    whole, part = rotation(1.0, dim), rotation(1.3, dim // 2)
    rotations = [whole, part, None, whole, part]

    def buffers() -> list[torch.Tensor]:
        drawn = torch.randn(layers, slots, heads, dim, generator=generator)
        return list(drawn.to(device).to(dtype).unbind(0))

    keys, values = buffers(), buffers()
    before = [[x.float() for x in each] for each in (keys, values)]
    places = torch.randperm(slots, generator=generator).to(device)
    source, target = places[:tokens], places[tokens : 2 * tokens]
    at = [torch.randint(4096, (tokens,), generator=generator).to(device) for _ in range(2)]
    faults = torch.zeros(1, dtype=torch.int32, device=device)
    prepared = pool_layers(keys, values, rotations)
    copy_rotate(prepared, source, target, *at, faults)
    worst = float(faults[0])
    others = torch.ones(slots, dtype=torch.bool, device=device)
    others[target] = False
    for layer, turning in enumerate(rotations):
        key, value = keys[layer].float(), values[layer].float()
        moved = before[0][layer][source]
        if turning is None:
            worst = max(worst, equal(key[target], moved))
        else:
            worst = max(worst, error_of(key[target], references.rotated(moved, turning, *at)))
        worst = max(
            worst,
            equal(value[target], before[1][layer][source]),
            equal(key[others], before[0][layer][others]),
            equal(value[others], before[1][layer][others]),
        )
    # A number that is not finite in a donor must be told of; in FP8 these bits are none.
    if dtype.itemsize == 1:
        values[3].view(torch.uint8)[source[7]] = 0x7F
    else:
        values[3][source[7]] = float("nan")
    copy_rotate(prepared, source, target, *at, faults)
    worst = worst if int(faults[0]) == 1 else float("inf")
    return Check(name, worst, ROUNDING[dtype], "values and other slots by bits; a fault is told")


def _scores(
    name: str, device: str, dtype: torch.dtype, stored: torch.dtype, heads: int, dim: int
) -> Check:
    generator = torch.Generator().manual_seed(2)
    tokens, prefix, probes, slots = 301, 40, 19, 400

    def drawn(rows: int, count: int, to: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(rows, count, dim, generator=generator).to(device).to(to)

    fresh_rows = torch.arange(tokens) - prefix
    fresh_rows[:prefix] = -1
    looks = torch.arange(tokens - probes, tokens)
    layer = CheckLayer(
        query=drawn(tokens - prefix, 4 * heads),
        fresh_keys=drawn(tokens - prefix, heads),
        fresh_values=drawn(tokens - prefix, heads),
        stored_keys=drawn(slots, heads, stored),
        stored_values=drawn(slots, heads, stored),
        slots=torch.randperm(slots, generator=generator)[:tokens].to(device),
        fresh_rows=fresh_rows.int().to(device),
        probe_rows=(looks - prefix).to(device),
        probe_positions=looks.to(device),
        reused=torch.arange(prefix + 3, tokens - probes - 5, 2).to(device),
        scale=dim**-0.5,
        key_scale=0.5 if stored.itemsize == 1 else 1.0,
        value_scale=1.5 if stored.itemsize == 1 else 1.0,
    )
    out = torch.full((len(TOLD), len(layer.reused)), float("nan"), device=device)
    check_scores(layer, out)
    # PyTorch indexes FP8 on some devices only.
    wide = CheckLayer(
        **vars(layer)
        | {
            "stored_keys": layer.stored_keys.float(),
            "stored_values": layer.stored_values.float(),
        }
    )
    wanted = references.scores(wide)
    errors = [error_of(a, b) for a, b in zip(out, wanted, strict=True)]
    told = ", ".join(f"{n} {e:.1e}" for n, e in zip(TOLD, errors, strict=True))
    # Inputs are exact in fp32, which everything is added up in.
    return Check(name, max(errors), 1e-3, told)


def _rows(name: str, device: str) -> Check:
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for widths, dtype in (((4096, 4096), torch.bfloat16), ((96, 333), torch.float32)):
        first, second = (
            torch.randn(211, width, generator=generator).to(device).to(dtype) for width in widths
        )
        index = torch.randperm(211, generator=generator)[:57].sort().values.to(device)
        found = compact_rows(first, second, index)
        worst = max(worst, equal(found[0], first[index]), equal(found[1], second[index]))
    return Check(name, worst, 0.0, "by bits")


def _mask(name: str, device: str) -> Check:
    generator = torch.Generator().manual_seed(4)
    counts, kv_lengths = [1, 37, 64, 5], [1, 411, 1000, 77]
    parts = [
        torch.randperm(keys, generator=generator)[:count].sort().values
        for count, keys in zip(counts, kv_lengths, strict=True)
    ]
    positions = torch.cat(parts)
    found = pack_mask(positions.to(device), counts, kv_lengths)
    return Check(
        name,
        equal(found.bits.cpu(), references.packed(positions, counts, kv_lengths)),
        0.0,
        "by bits",
    )


def _merge(name: str, device: str) -> Check:
    generator = torch.Generator().manual_seed(5)
    out = [torch.randn(40, 4, 16, generator=generator).to(device) for _ in range(2)]
    lse = [(torch.randn(40, 4, generator=generator) * 9).to(device) for _ in range(2)]
    # A part without keys says nothing of its output.
    lse[0][:7], out[0][:7] = float("-inf"), float("nan")
    share = torch.softmax(torch.stack(lse).double() * np.log(2), 0).unsqueeze(-1)
    wanted = torch.nan_to_num(out[0].double()) * share[0] + out[1].double() * share[1]
    return Check(name, error_of(merge_parts(out[0], lse[0], out[1], lse[1]), wanted), 1e-5)


def attention_checks(device: str, make: MakeWrapper | None) -> Iterator[Pending]:
    """The rows' attention in every form against fp64, with PyTorch's masked one beside it."""
    shape: ModelShape = SMALL if device == "cuda" else TINY
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    name = f"rows by position_mask, {_short(dtype)}"
    yield (
        name,
        lambda: _attention(name, _case(shape, dtype, device), lambda _: PositionMaskRows()),
    )
    if make is None:
        return
    for form, costs in FORM_COSTS.items():
        title = f"rows by FlashInfer, {form.value}, {_short(dtype)}"
        yield title, partial(_in_form, title, shape, dtype, device, make, form, costs)


def _in_form(
    name: str,
    shape: ModelShape,
    dtype: torch.dtype,
    device: str,
    make: MakeWrapper,
    form: Form,
    costs: AttentionCosts,
) -> Check:
    case = _case(shape, dtype, device)
    counts = case.narrowed.kept.counts
    taken = choose(case.positions, counts, group=shape.group, costs=costs).form
    if taken is not form:
        return Check(name, float("nan"), 0.0, f"took {taken.value}")
    return _attention(name, case, lambda backend: adapter(make, backend, costs))


def _case(shape: ModelShape, dtype: torch.dtype, device: str) -> RowsCase:
    return RowsCase(shape, KVPool(shape, 700, dtype, device), scattered(637, 0.4, seed=6), seed=6)


def _attention(name: str, case: RowsCase, rows: Callable[[PoolBackend], RowAttention]) -> Check:
    queries, keys, values = case.parts()
    positions = case.narrowed.kept.positions
    wanted = references.attention(queries, keys, values, positions, case.shape.scale)
    found = case.attend(rows(PoolBackend.of(case.pool)))
    mask = torch.arange(len(keys), device=keys.device) <= positions[:, None]
    sdpa = scaled_dot_product_attention(
        *(x.movedim(0, 1).unsqueeze(0) for x in (queries, keys, values)),
        attn_mask=mask,
        scale=case.shape.scale,
        enable_gqa=True,
    )[0].movedim(0, 1)
    limit = 2 * ROUNDING[queries.dtype]
    beside = f"masked SDPA {error_of(sdpa, wanted):.1e}, from it {error_of(found, sdpa):.1e}"
    return Check(name, error_of(found, wanted), limit, beside)
