"""Gather, rotate and scatter of donor keys and values, for all layers of a pool in one launch.

Values and keys of layers without a rotation are copied bit for bit, other keys are rotated from the
donor's position to the new one in fp32 and rounded once (:mod:`sglang_kvshare.recompute.rope`).

Each stored byte is read once and written once. Cosine and sine of the move come from the model's
table inside the kernel, once for :data:`GROUP_LAYERS` layers, which is cheaper than a launch that
prepares them. For a token of 8 heads of 128 in bf16:

    keys and values, read and written, of 4 layers      32 KiB
    two rows of the table, read once for 4 layers        1 KiB    3 %, and mostly from the L2 cache
    prepared: written once, one row read for each layer  2.5 KiB

Seam: ``MHATokenToKVPool`` keeps one buffer ``[slots, heads, dim]`` a layer, so that the kernel is
given where they are: how far from the first one, in units of 16 bytes, which lets the compiler see
that every access can be 16 bytes wide. Of an address out of a table it could not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_kvshare.attention.kernels.slots import gather, scatter
from sglang_kvshare.attention.kernels.stored_words import POOL_DTYPES
from sglang_kvshare.attention.kernels.where import takes_kernel
from sglang_kvshare.recompute.rope import KeyMove, Rotation, plan_move, rotate_, rounded

#: Layers of one rotation that share cosines and sines.
GROUP_LAYERS = 4
#: Addresses and rows are multiples of it, so that a thread moves 16 bytes at once.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, eq=False)
class Launch:
    """Layers that one launch serves: all that rotate alike, and those that do not rotate.

    Attributes:
        half: pairs of dimensions that are rotated; 0 when no layer rotates.
        gptj: the pairing; see :mod:`sglang_kvshare.recompute.rope`.
        table: one of the fp32 tables, or any fp32 tensor when no layer rotates.
        key_offsets, value_offsets: int64 ``[layers]``, from the pool's first key and value buffer,
            in units of :data:`ALIGNMENT_BYTES`.
        table_offsets: int64 ``[groups]``, from ``table``, in the same units.
        groups: int32 ``[groups, 3]``, first layer and the one behind the last, all of one rotation,
            and 1, or 0 for no rotation.
        squares: fp32 ``[groups]``, the square of the scale that the group's table carries.
    """

    half: int
    gptj: bool
    table: torch.Tensor
    key_offsets: torch.Tensor
    value_offsets: torch.Tensor
    table_offsets: torch.Tensor
    groups: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, eq=False)
class PoolLayers:
    """The buffers of a pool and where they are; made once, by :func:`pool_layers`.

    Attributes:
        keys, values: of each layer, ``[slots, heads, dim]``; kept so that the addresses stay valid.
        rotations: of each layer; ``None`` for one without.
        launches: one, unless layers differ in pairing or in the rotated part of a head.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    rotations: tuple[Rotation | None, ...]
    launches: tuple[Launch, ...]


def pool_layers(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    rotations: Sequence[Rotation | None],
) -> PoolLayers:
    """Prepare layers of a pool for :func:`copy_rotate`; some of them, to copy in several steps.

    Args:
        keys: ``[slots, heads, head_dim]`` each, contiguous, alike in shape and dtype.
        values: the same with their own ``value_dim``.
        rotations: their tables are on the pool's device.

    Raises:
        ValueError: a dtype, a shape or an alignment that the kernel does not read.
    """
    if not len(keys) == len(values) == len(rotations):
        raise ValueError(
            f"{len(keys)} key buffers, {len(values)} value buffers and {len(rotations)} rotations"
        )
    for buffer, like in [(b, keys[0]) for b in keys] + [(b, values[0]) for b in values]:
        _check(buffer, like)
    if keys and (keys[0].dtype, keys[0].shape[:2]) != (values[0].dtype, values[0].shape[:2]):
        raise ValueError("keys and values differ in dtype, slots or heads")
    for rotation in rotations:
        if rotation is not None:
            _check_table(rotation, keys[0])
    kinds: dict[tuple[int, bool], list[int]] = {}
    for number, rotation in enumerate(rotations):
        if rotation is not None:
            kinds.setdefault(_kind(rotation), []).append(number)
    plain = [number for number, rotation in enumerate(rotations) if rotation is None]
    if plain:
        # They ride along with whatever else is launched.
        kinds.setdefault(next(iter(kinds), (0, False)), []).extend(plain)
    launches = [_launch(kind, numbers, keys, values, rotations) for kind, numbers in kinds.items()]
    return PoolLayers(tuple(keys), tuple(values), tuple(rotations), tuple(launches))


def copy_rotate(
    layers: PoolLayers,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    source_positions: torch.Tensor,
    target_positions: torch.Tensor,
    faults: torch.Tensor,
    *,
    kernel: bool | None = None,
) -> None:
    """Copy ``n`` tokens within the pool, on the current stream; nothing waits for the device.

    Args:
        source_slots, target_slots: int64 ``[n]``; none is both, no target is named twice.
        source_positions, target_positions: int64 ``[n]``, each below the length of every table.
        faults: int32 ``[1]``, becomes 1 when a value or a rotated key is not finite (or larger
            than the pool's dtype holds, but for FP8, where it saturates), and is left alone
            otherwise. What was copied must be computed then; in place of what is not finite, and
            perhaps of what is beside it, 0 is written, so that nothing that runs in the meantime
            meets it.
        kernel: see :func:`sglang_kvshare.attention.kernels.where.takes_kernel`.
    """
    if not layers.keys or not source_slots.shape[0]:
        return
    slots, positions = (source_slots, target_slots), (source_positions, target_positions)
    if takes_kernel(layers.keys[0], kernel):
        from sglang_kvshare.attention.kernels.device import copy_rotate as device

        for launch in layers.launches:
            device.run(layers, launch, slots, positions, faults)
    else:
        copy_rotate_reference(layers, *slots, *positions, faults)


def copy_rotate_reference(
    layers: PoolLayers,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    source_positions: torch.Tensor,
    target_positions: torch.Tensor,
    faults: torch.Tensor,
) -> None:
    """:func:`copy_rotate` in PyTorch, layer by layer."""
    moves: dict[int, KeyMove] = {}
    extremes: list[torch.Tensor] = []
    for keys, values, rotation in zip(layers.keys, layers.values, layers.rotations, strict=True):
        donors = gather(keys, source_slots)
        if rotation is not None:
            move = moves.get(id(rotation))
            if move is None:
                move = moves[id(rotation)] = plan_move(rotation, source_positions, target_positions)
            # fp32 indexing made a copy already; other dtypes are converted into one.
            turned = rotate_(donors.float(), move)
            extremes += torch.aminmax(turned)
            donors = rounded(turned, keys.dtype)
        else:
            extremes += _extremes(donors)
        scatter(keys, target_slots, donors)
        donors = gather(values, source_slots)
        extremes += _extremes(donors)
        scatter(values, target_slots, donors)
    # Not a number compares as false.
    finite = torch.stack(extremes).abs_().amax() <= largest(layers.keys[0].dtype)
    faults.logical_or_(~finite)
    if not finite:
        for buffer in (*layers.keys, *layers.values):
            rows = gather(buffer, target_slots)
            rows = torch.where(rows.float().isfinite(), rows, torch.zeros_like(rows))
            scatter(buffer, target_slots, rows)


def largest(dtype: torch.dtype) -> float:
    """A rotated key beyond it counts as infinite; FP8 saturates, so that only fp32 ends it."""
    return float(torch.finfo(torch.float32 if dtype.itemsize == 1 else dtype).max)


def _extremes(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 least and greatest value; either is NaN where one of them is."""
    wide = stored.float() if stored.dtype.itemsize == 1 else stored
    low, high = torch.aminmax(wide)
    return low.float(), high.float()


# --- the tables -----------------------------------------------------------------------------------


def _kind(rotation: Rotation) -> tuple[int, bool]:
    return int(rotation.table.shape[1]) // 2, rotation.pairing == "gptj"


def _launch(
    kind: tuple[int, bool],
    numbers: list[int],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    rotations: Sequence[Rotation | None],
) -> Launch:
    # Layers of one rotation side by side, so that they fall into groups.
    numbers = sorted(numbers, key=lambda number: id(rotations[number]))
    bounds: list[tuple[int, int]] = []
    for at, number in enumerate(numbers):
        rotation = rotations[number]
        first = bounds[-1][0] if bounds else 0
        if bounds and rotations[numbers[first]] is rotation and at - first < GROUP_LAYERS:
            bounds[-1] = (first, at + 1)
        else:
            bounds.append((at, at + 1))
    heads = [rotations[numbers[first]] for first, _ in bounds]
    device = keys[0].device
    squares = [1.0 if head is None else head.scale**2 for head in heads]
    squares_on_device = torch.tensor(squares, dtype=torch.float32, device=device)
    table = next((head.table for head in heads if head is not None), squares_on_device)

    def offsets(tensors: Sequence[torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        told = [(x.data_ptr() - base.data_ptr()) // ALIGNMENT_BYTES for x in tensors]
        return torch.tensor(told, dtype=torch.int64, device=device)

    return Launch(
        half=kind[0],
        gptj=kind[1],
        table=table,
        key_offsets=offsets([keys[number] for number in numbers], keys[0]),
        value_offsets=offsets([values[number] for number in numbers], values[0]),
        table_offsets=offsets([table if head is None else head.table for head in heads], table),
        groups=torch.tensor(
            [(*bound, int(head is not None)) for bound, head in zip(bounds, heads, strict=True)],
            dtype=torch.int32,
            device=device,
        ),
        squares=squares_on_device,
    )


def _check(buffer: torch.Tensor, like: torch.Tensor) -> None:
    if buffer.dtype not in POOL_DTYPES:
        raise ValueError(f"a KV buffer of {buffer.dtype}")
    if buffer.dim() != 3 or not buffer.is_contiguous():
        raise ValueError(f"a KV buffer of shape {tuple(buffer.shape)}, stride {buffer.stride()}")
    if (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
        raise ValueError("the layers' buffers differ in shape, dtype or device")
    _check_address(buffer)


def _check_table(rotation: Rotation, keys: torch.Tensor) -> None:
    table = rotation.table
    if table.dtype != torch.float32 or not table.is_contiguous() or table.device != keys.device:
        raise ValueError(f"a table of {table.dtype}, stride {table.stride()}, on {table.device}")
    if table.shape[1] % 2 or table.shape[1] > keys.shape[2]:
        raise ValueError(f"{table.shape[1]} rotated of {keys.shape[2]} dimensions")
    _check_address(table)


def _check_address(tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"an address that is no multiple of {ALIGNMENT_BYTES} bytes")
