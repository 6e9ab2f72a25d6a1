"""How much attention each key receives from some query rows; memory stays linear in the prompt.

Rows are taken in blocks, each looks at the keys up to its last position, and only sums over rows
are kept:

    keys      0 ............ p_0 ...... p_63 ..... p_127 .... n
    block 0   ###############\\\\\\\\\\\\\\
    block 1   ###########################\\\\\\\\\\\\\\
    mass      [n]                sum over rows, mean over heads
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCK_ROWS = 32


@dataclass(frozen=True)
class _Block:
    """Rows ``rows`` over the keys ``[0, seen)``.

    Attributes:
        queries: fp32 ``[kv_heads, group * rows, head_dim]``, scaled.
        weights: fp32 of the same rows, ``[kv_heads, group * rows, seen]``: softmax.
    """

    rows: slice
    seen: int
    queries: torch.Tensor
    weights: torch.Tensor


def attend_and_weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention by position, and what each key received of it.

    Args:
        query: ``[rows, query_heads, head_dim]``.
        key, value: ``[tokens, kv_heads, head_dim]``, entry ``j`` at position ``j``.
        positions: int64 ``[rows]``, strictly ascending, each below ``tokens``.
        scale: factor on the logits.

    Returns:
        the output ``[rows, query_heads, value_dim]`` in the query's dtype, and the mass by key
        head, fp32 ``[kv_heads, tokens]``, all of which sums to the number of rows.
    """
    rows, heads, _ = query.shape
    out = query.new_empty((rows, heads, value.shape[2]))
    mass = query.new_zeros((key.shape[1], key.shape[0]), dtype=torch.float32)
    values = value.float().movedim(0, 1)
    for block in _blocks(query, key, positions, scale):
        told = block.weights @ values[:, : block.seen]
        out[block.rows] = told.unflatten(1, (-1, _count(block.rows))).flatten(0, 1).movedim(0, 1)
        mass[:, : block.seen] += block.weights.sum(1) / heads
    return out, mass


def attention_mass(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """The mass of :func:`attend_and_weigh` alone, over all heads: fp32 ``[tokens]``."""
    mass = torch.zeros(key.shape[0], dtype=torch.float32, device=query.device)
    for block in _blocks(query, key, positions, scale):
        mass[: block.seen] += block.weights.sum((0, 1))
    return mass / query.shape[1]


def influence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_change: torch.Tensor,
    value_change: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """How far the rows' attention output moves, to first order, by a change of each key and value.

    With weights ``p`` and output ``o`` of a row and head, the change ``dk``, ``dv`` of one key and
    its value moves the output by ``p (dv + scale (q dk) (v - o))``; the sum of the lengths of both
    parts over rows and heads is told.

    Args:
        key, value: fresh ones, as in :func:`attend_and_weigh`.
        key_change, value_change: of each token; 0 for those that are not reused.

    Returns:
        fp32 ``[tokens]``, at least 0.
    """
    total = torch.zeros(key.shape[0], dtype=torch.float32, device=query.device)
    values = value.float().movedim(0, 1)
    key_changes, value_moves = key_change.float().movedim(0, 1), value_change.float().norm(dim=2)
    squares = values.square().sum(2)
    for block in _blocks(query, key, positions, scale):
        seen = block.seen
        out = block.weights @ values[:, :seen]
        # |v - o|, from |v|^2 - 2 v o + |o|^2.
        cross = out @ values[:, :seen].transpose(1, 2)
        apart = (squares[:, None, :seen] - 2 * cross + out.square().sum(2, keepdim=True)).clamp_(0)
        turned = (block.queries @ key_changes[:, :seen].transpose(1, 2)).abs_()
        moves = value_moves[:seen].T[:, None, :] + turned * apart.sqrt_()
        total[:seen] += (block.weights * moves).sum((0, 1))
    return total


def _blocks(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scale: float
) -> Iterator[_Block]:
    rows, heads, _ = query.shape
    kv_heads = key.shape[1]
    queries = (query.float() * scale).movedim(0, 1).unflatten(0, (kv_heads, heads // kv_heads))
    # One copy here makes every product below twice as fast.
    keys = key.float().movedim(0, 1).contiguous().transpose(1, 2)
    last = positions.tolist()
    for begin in range(0, rows, BLOCK_ROWS):
        part = slice(begin, min(begin + BLOCK_ROWS, rows))
        seen = last[part.stop - 1] + 1
        block = queries[:, :, part].flatten(1, 2)
        logits = block @ keys[:, :, :seen]
        # What stands before the block's first row is seen by all of its rows.
        first = last[begin] + 1
        hidden = torch.arange(first, seen, device=query.device) > positions[part, None]
        logits[:, :, first:].masked_fill_(hidden.repeat(heads // kv_heads, 1), float("-inf"))
        yield _Block(part, seen, block, logits.softmax(-1))


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)
