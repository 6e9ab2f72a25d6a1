"""Moving rotated keys to another position.

A key is cached after RoPE. Rotations compose, so that a key rotated for position ``s`` becomes the
key for position ``t`` by a rotation through the difference of the two angles:

    cos D = cos t cos s + sin t sin s        sin D = sin t cos s - cos t sin s

with cosine and sine taken from the model's own table, so that its rounding cancels. A table may
carry a factor ``m`` on top (YaRN's attention scale); the key has it already, and the products above
have it twice, so that they are divided by ``m * m``. All arithmetic is in fp32; the result is
rounded to the pool's dtype once.

Which two dimensions form a pair, for a rotary dimension of 8:

    neox    0 1 2 3 | 4 5 6 7     first half with second half
    gptj    0 1  2 3  4 5  6 7    even with odd
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Pairing = Literal["neox", "gptj"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """How the keys of one layer are rotated; compared by identity.

    Attributes:
        table: fp32 ``[max_positions, rotary_dim]``, cosines then sines, times ``scale``.
        pairing: see the module.
        scale: factor that the table carries on top of a rotation, 1 for most kinds.
    """

    table: torch.Tensor
    pairing: Pairing = "neox"
    scale: float = 1.0


@dataclass(frozen=True)
class KeyMove:
    """Rotation of ``n`` keys from their source to their target positions; it changes no length.

    Attributes:
        cos, sin: fp32 ``[n, 1, rotary_dim / 2]``, broadcast over heads.
        pairing: which dimensions form a pair.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pairing: Pairing = "neox"

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.cos.shape[-1])


def plan_move(rotation: Rotation, source: torch.Tensor, target: torch.Tensor) -> KeyMove:
    """Prepare a move; one per forward serves every layer with the same rotation.

    Args:
        source, target: int64 ``[n]``, each below the table's length.
    """
    cos_s, sin_s = rotation.table.index_select(0, source).float().chunk(2, dim=-1)
    cos_t, sin_t = rotation.table.index_select(0, target).float().chunk(2, dim=-1)
    cos = torch.addcmul(cos_t * cos_s, sin_t, sin_s)
    sin = torch.addcmul(sin_t * cos_s, cos_t, sin_s, value=-1)
    if rotation.scale != 1:
        cos.div_(rotation.scale**2)
        sin.div_(rotation.scale**2)
    return KeyMove(cos.unsqueeze(1), sin.unsqueeze(1), rotation.pairing)


def rotate_(keys: torch.Tensor, move: KeyMove) -> torch.Tensor:
    """Rotate fp32 ``keys`` (``[n, heads, head_dim]``) in place and return them.

    Dimensions past ``rotary_dim`` (partial rotary) carry no position and are left alone.
    """
    turning = keys[..., : move.rotary_dim]
    if move.pairing == "neox":
        first, second = turning.chunk(2, dim=-1)
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
    rotated = torch.mul(first, move.cos).addcmul_(second, move.sin, value=-1)
    second.mul_(move.cos).addcmul_(first, move.sin)
    first.copy_(rotated)
    return keys


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 ``values`` in the pool's dtype, rounded once.

    A rotation may make one dimension of a pair larger than both were (by up to the square root of
    2). In FP8 that can exceed the range, and becomes the largest value instead of NaN or infinity.
    """
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def move_keys(keys: torch.Tensor, move: KeyMove) -> torch.Tensor:
    """Rotated copy of ``keys`` in their own dtype; the donor's stored value stays as it is."""
    return rounded(rotate_(keys.to(torch.float32, copy=True), move), keys.dtype)
