"""Moving rotated keys to another position.

A key is cached after RoPE. Rotations compose, so that a key rotated for position ``s`` becomes the
key for position ``t`` by a rotation through the difference of the two angles:

    cos D = cos t cos s + sin t sin s        sin D = sin t cos s - cos t sin s

with cosine and sine taken from the model's own table, so that its rounding cancels. All arithmetic
is in fp32; the result is rounded to the pool's dtype once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyMove:
    """Rotation of ``n`` keys from their source to their target positions.

    Attributes:
        cos, sin: fp32 ``[n, 1, rotary_dim / 2]``, broadcast over heads.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.cos.shape[-1])


def plan_move(table: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> KeyMove:
    """Prepare a move; one per forward serves every layer that shares the table.

    Args:
        table: fp32 ``[max_positions, rotary_dim]``, cosines then sines
            (``RotaryEmbedding.cos_sin_cache`` of SGLang).
        source, target: int64 ``[n]``.
    """
    cos_s, sin_s = table.index_select(0, source).float().chunk(2, dim=-1)
    cos_t, sin_t = table.index_select(0, target).float().chunk(2, dim=-1)
    cos = torch.addcmul(cos_t * cos_s, sin_t, sin_s)
    sin = torch.addcmul(sin_t * cos_s, cos_t, sin_s, value=-1)
    return KeyMove(cos.unsqueeze(1), sin.unsqueeze(1))


def rotate_(keys: torch.Tensor, move: KeyMove) -> torch.Tensor:
    """Rotate fp32 ``keys`` (``[n, heads, head_dim]``, NeoX pairing) in place and return them.

    Dimensions past ``rotary_dim`` (partial rotary) carry no position and are left alone.
    """
    half = move.rotary_dim // 2
    first, second = keys[..., :half], keys[..., half : move.rotary_dim]
    rotated = torch.mul(first, move.cos).addcmul_(second, move.sin, value=-1)
    second.mul_(move.cos).addcmul_(first, move.sin)
    first.copy_(rotated)
    return keys


def move_keys(keys: torch.Tensor, move: KeyMove) -> torch.Tensor:
    """Rotated copy of ``keys`` in their own dtype; the donor's stored value stays as it is."""
    return rotate_(keys.to(torch.float32, copy=True), move).to(keys.dtype)
