"""Attention of scattered query rows over a request's whole KV row, masked by position.

The row at position ``p`` sees exactly the keys at positions ``0 .. p``, whichever other rows run
beside it. Rows are taken in blocks of ascending position, and a block looks only at keys up to its
last position, so that the work follows the triangle and memory stays linear in the prompt:

    keys      0 ............ p_0 ...... p_63 ..... p_127 .... n
    block 0   ###############\\\\\\\\\\\\\\
    block 1   ###########################\\\\\\\\\\\\\\
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 64


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    block_rows: int = BLOCK_ROWS,
    block_ends: list[int] | None = None,
) -> torch.Tensor:
    """Causal attention by position.

    Args:
        query: ``[rows, query_heads, head_dim]``.
        key, value: ``[tokens, kv_heads, head_dim]``, entry ``j`` at position ``j``.
        positions: int64 ``[rows]``, strictly ascending, each below ``tokens``.
        scale: factor on the logits.
        block_ends: host copy of the last position of every block, to spare a device
            synchronisation in each layer (see :func:`last_positions`).

    Returns:
        ``[rows, query_heads, value_dim]`` in the query's dtype.
    """
    rows = query.shape[0]
    if block_ends is None:
        block_ends = last_positions(positions, block_rows)
    grouped = query.shape[1] != key.shape[1]
    heads_first = query.movedim(0, 1).unsqueeze(0)
    keys = key.to(query.dtype).movedim(0, 1).unsqueeze(0)
    values = value.to(query.dtype).movedim(0, 1).unsqueeze(0)
    out = query.new_empty((rows, query.shape[1], value.shape[2]))
    for block, last in enumerate(block_ends):
        begin, end = block * block_rows, min((block + 1) * block_rows, rows)
        seen = last + 1
        mask = torch.arange(seen, device=query.device) <= positions[begin:end, None]
        result = scaled_dot_product_attention(
            heads_first[:, :, begin:end],
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )
        out[begin:end] = result[0].movedim(0, 1)
    return out


def last_positions(positions: torch.Tensor, block_rows: int = BLOCK_ROWS) -> list[int]:
    """The last position of every block of rows, on the host."""
    rows = positions.shape[0]
    ends = torch.arange(block_rows, rows + block_rows, block_rows).clamp_(max=rows) - 1
    return [int(p) for p in positions[ends.to(positions.device)].tolist()]
