"""Copying donor keys and values into a request's own slots, keys rotated to their new position.

Seams: ``MHATokenToKVPool.get_key_buffer`` and ``get_value_buffer`` (``[slots, heads, dim]``),
``RotaryEmbedding.cos_sin_cache``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvshare.engine.support import decoder_layers
from sglang_kvshare.recompute.rope import plan_move, rotate_


@dataclass(frozen=True)
class DonorCopy:
    """``n`` values to copy: all int64 ``[n]`` on the pool's device."""

    source_slots: torch.Tensor
    target_slots: torch.Tensor
    source_positions: torch.Tensor
    target_positions: torch.Tensor


class Placer:
    """Copies within one KV pool for the layers from ``first_layer`` on.

    Args:
        pool: ``ModelRunner.token_to_kv_pool``.
        model: ``ModelRunner.model``.
        first_layer: layers before it are computed in full and need no donor.
    """

    def __init__(self, pool: Any, model: Any, first_layer: int) -> None:
        self._pool = pool
        layers = decoder_layers(model)
        self._layers = [
            (layer.self_attn.attn.layer_id, layer.self_attn.rotary_emb)
            for layer in list(layers)[first_layer:]
        ]

    def place(self, copy: DonorCopy) -> bool:
        """Enqueue the copies on the current stream. Reads every donor before it writes a target:
        a slot is never both, since targets were allocated while donors were in the tree.

        Returns:
            whether all copied values are finite.
        """
        finite = []
        moves: dict[int, Any] = {}
        for layer_id, rope in self._layers:
            move = moves.get(id(rope))
            if move is None:
                move = moves[id(rope)] = plan_move(
                    fp32_table(rope), copy.source_positions, copy.target_positions
                )
            keys = self._pool.get_key_buffer(layer_id)
            values = self._pool.get_value_buffer(layer_id)
            moved = rotate_(keys.index_select(0, copy.source_slots).float(), move)
            keys.index_copy_(0, copy.target_slots, moved.to(keys.dtype))
            copied = values.index_select(0, copy.source_slots)
            values.index_copy_(0, copy.target_slots, copied)
            # A sum is finite only if every value is.
            finite.append(moved.sum() + copied.sum())
        return bool(torch.stack(finite).isfinite().all())

    def invalid(self, slots: torch.Tensor) -> torch.Tensor:
        """int64: those of ``slots`` that hold a value that is not finite in some layer."""
        valid = torch.ones(slots.shape[0], dtype=torch.bool, device=slots.device)
        for layer_id, _ in self._layers:
            for buffer in (self._pool.get_key_buffer, self._pool.get_value_buffer):
                rows = buffer(layer_id).index_select(0, slots).float()
                valid &= rows.flatten(1).isfinite().all(1)
        return slots[~valid]


def fp32_table(rope: Any) -> torch.Tensor:
    """fp32 ``[positions, rotary_dim]``: cosines then sines of a ``RotaryEmbedding``.

    SGLang may keep the table in the model's dtype; then it is computed once more in fp32.
    """
    table: torch.Tensor = rope.cos_sin_cache
    if table.dtype == torch.float32:
        return table
    kept = getattr(rope, "_kvshare_table", None)
    if kept is None or kept.shape[0] < table.shape[0]:
        kept = rope._compute_cos_sin_cache().to(torch.float32).to(table.device)
        rope._kvshare_table = kept
    return kept
