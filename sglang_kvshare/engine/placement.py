"""Copying donor keys and values into a request's own slots, keys rotated to their new position.

Seams: ``MHATokenToKVPool.get_key_buffer`` and ``get_value_buffer`` (``[slots, heads, dim]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvshare.engine.geometry import LayerGeometry
from sglang_kvshare.recompute.rope import KeyMove, Rotation, plan_move, rotate_, rounded


@dataclass(frozen=True)
class DonorCopy:
    """``n`` values to copy: all int64 ``[n]`` on the pool's device."""

    source_slots: torch.Tensor
    target_slots: torch.Tensor
    source_positions: torch.Tensor
    target_positions: torch.Tensor


class Placer:
    """Copies within one KV pool.

    An FP8 pool stores a value divided by the layer's scale, or as it is where there is none. A
    rotation is linear, so that the scale would cancel: the stored numbers themselves are rotated.

    Args:
        pool: ``ModelRunner.token_to_kv_pool``.
        layers: those that need a donor; the ones before them are computed in full.
    """

    def __init__(self, pool: Any, layers: Sequence[LayerGeometry]) -> None:
        self._pool = pool
        self._layers = list(layers)

    def place(self, copy: DonorCopy) -> bool:
        """Copy on the current stream; whether all that was copied is finite.

        Reads every donor before it writes a target: a slot is never both, since targets were
        allocated while donors were in the tree. After ``False`` the targets hold what a faulty
        donor held, and must be computed.

        The check takes the extremes of what the copy has in hand, and reads one number back for
        all layers. On a CPU that is about a tenth of the copy's time (8 of 74 ms for 1,000 tokens
        in 30 layers, fp32, one thread; a seventh in FP8), on a GPU it is one synchronisation.
        """
        if not copy.source_slots.shape[0] or not self._layers:
            return True
        moves: dict[int, KeyMove] = {}
        extremes: list[torch.Tensor] = []
        for layer in self._layers:
            keys = self._pool.get_key_buffer(layer.layer_id)
            values = self._pool.get_value_buffer(layer.layer_id)
            donors = gather(keys, copy.source_slots)
            if layer.rotation is not None:
                move = _move(moves, layer.rotation, copy)
                # fp32 indexing made a copy already; other dtypes are converted into one.
                turned = rotate_(donors.float(), move)
                extremes += torch.aminmax(turned)
                donors = rounded(turned, keys.dtype)
            else:
                extremes += _extremes(donors)
            _scatter(keys, copy.target_slots, donors)
            donors = gather(values, copy.source_slots)
            extremes += _extremes(donors)
            _scatter(values, copy.target_slots, donors)
        # Not a number compares as false; what overflows when rounded to the pool's dtype counts
        # as infinite, but for FP8, where it saturates.
        fp8 = keys.dtype.itemsize == 1
        limit = torch.finfo(torch.float32 if fp8 else keys.dtype).max
        return bool(torch.stack(extremes).abs_().amax() <= limit)

    def invalid(self, slots: torch.Tensor) -> torch.Tensor:
        """int64: those of ``slots`` that hold a value that is not finite in some layer."""
        valid = torch.ones(slots.shape[0], dtype=torch.bool, device=slots.device)
        for layer in self._layers:
            for buffer in (self._pool.get_key_buffer, self._pool.get_value_buffer):
                rows = gather(buffer(layer.layer_id), slots).float()
                valid &= rows.flatten(1).isfinite().all(1)
        return slots[~valid]


def gather(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``buffer[slots]``, a copy, for every dtype of a pool."""
    return _indexable(buffer).index_select(0, slots).view(buffer.dtype)


def _scatter(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    _indexable(buffer).index_copy_(0, slots, _indexable(rows))


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch indexes FP8 tensors on some devices only, but bytes on all."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _extremes(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 least and greatest value; either is NaN where one of them is."""
    wide = stored.float() if stored.dtype.itemsize == 1 else stored
    low, high = torch.aminmax(wide)
    return low.float(), high.float()


def _move(moves: dict[int, KeyMove], rotation: Rotation, copy: DonorCopy) -> KeyMove:
    """Layers that share a rotation share its plan."""
    move = moves.get(id(rotation))
    if move is None:
        move = plan_move(rotation, copy.source_positions, copy.target_positions)
        moves[id(rotation)] = move
    return move
