"""What the kernels must give, written down in fp64 by their definitions, with nothing of theirs.

Slow, and quadratic in memory: for checks of a few hundred tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from sglang_kvshare.attention.kernels.check_scores import CheckLayer
from sglang_kvshare.recompute.rope import Rotation


def rotated(
    keys: torch.Tensor, rotation: Rotation, source: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """fp64 ``[n, heads, dim]``: ``keys``, rotated for ``source``, as they are for ``target``.

    By complex numbers: pairs of dimensions are turned back, and on.
    """
    table = rotation.table.double() / rotation.scale
    half = table.shape[1] // 2
    turns = torch.complex(table[:, :half], table[:, half:])
    turn = (turns[target] * turns[source].conj()).unsqueeze(1)
    out = keys.double().clone()
    part = out[..., : 2 * half]
    if rotation.pairing == "neox":
        pairs = torch.complex(part[..., :half], part[..., half:]) * turn
        out[..., : 2 * half] = torch.cat([pairs.real, pairs.imag], -1)
    else:
        pairs = torch.complex(part[..., ::2].contiguous(), part[..., 1::2].contiguous()) * turn
        out[..., : 2 * half] = torch.stack([pairs.real, pairs.imag], -1).flatten(-2)
    return out


def weights(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """fp64 ``[rows, query_heads, tokens]``: softmax over the keys up to each row's position."""
    keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = torch.einsum("rhd,khd->rhk", query.double(), keys) * scale
    hidden = torch.arange(key.shape[0], device=key.device) > positions[:, None]
    return logits.masked_fill_(hidden[:, None], float("-inf")).softmax(2)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """fp64 ``[rows, query_heads, dim]``; arguments as of ``position_mask.attend``."""
    values = value.double().repeat_interleave(query.shape[1] // value.shape[1], 1)
    return torch.einsum("rhk,khd->rhd", weights(query, key, positions, scale), values)


def scores(layer: CheckLayer) -> torch.Tensor:
    """fp64 ``[5, reused]``, ordered as ``check_scores.TOLD``."""
    runs = layer.fresh_rows >= 0
    keys = layer.stored_keys[layer.slots].double() * layer.key_scale
    stored_keys = keys.clone()
    keys[runs] = layer.fresh_keys[layer.fresh_rows[runs].long()].double()
    looked = weights(layer.query[layer.probe_rows], keys, layer.probe_positions, layer.scale)
    values = layer.stored_values[layer.slots].double() * layer.value_scale
    rows = layer.fresh_rows[layer.reused].long()
    fresh_values = layer.fresh_values[rows].double()
    change = values[layer.reused] - fresh_values
    key_change = stored_keys[layer.reused] - layer.fresh_keys[rows].double()
    return torch.stack(
        [
            looked.mean(1).sum(0)[layer.reused],
            change.abs().sum((1, 2)),
            change.square().sum((1, 2)),
            fresh_values.abs().sum((1, 2)),
            key_change.square().sum((1, 2)),
        ]
    )


def packed(positions: torch.Tensor, counts: list[int], kv_lengths: list[int]) -> torch.Tensor:
    """uint8 ``[bytes]``: the bits of a mask by position, lowest first, by NumPy."""
    parts = []
    for part, keys in zip(positions.cpu().split(counts), kv_lengths, strict=True):
        dense = np.arange(keys) <= part.numpy()[:, None]
        parts.append(np.packbits(dense.ravel(), bitorder="little"))
    return torch.from_numpy(np.concatenate(parts))
