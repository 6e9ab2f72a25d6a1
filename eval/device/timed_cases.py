"""Each kernel as something to time on a device: a call, what it moves, and its reference.

Nothing here needs SGLang or a server. The shapes are those of Llama-3-8B: 32 layers, 8 key heads
and 32 query heads of 128, hidden states of 4,096, bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_kvshare.attention.kernels.check_scores import CheckLayer, check_scores
from sglang_kvshare.attention.kernels.compact_rows import compact_rows
from sglang_kvshare.attention.kernels.copy_rotate import copy_rotate, pool_layers
from sglang_kvshare.attention.kernels.pack_mask import mask_bytes, pack_mask
from sglang_kvshare.recompute.rope import Rotation

_KV_HEADS, _QUERY_HEADS, _DIM, _HIDDEN, _PROBES = 8, 32, 128, 4096, 32


@dataclass(frozen=True)
class Timed:
    """
    Attributes:
        run: runs it once, on the current stream; ``run(False)`` is the reference.
        moved_bytes: the least that must be read and written.
        operations: floating-point ones of matrix products, 0 where memory alone bounds it.
    """

    name: str
    run: Callable[[bool | None], object]
    moved_bytes: int
    operations: int = 0


def copy_case(
    tokens: int, *, layers: int = 32, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> Timed:
    """Copy ``tokens`` (a multiple of 16), pages of 16 slots in random order, to slots in order."""
    generator = torch.Generator().manual_seed(1)
    slots = 2 * tokens
    keys, values = (
        [torch.randn(slots, _KV_HEADS, _DIM, device=device).to(dtype) for _ in range(layers)]
        for _ in range(2)
    )
    angles = torch.arange(slots)[:, None] * 5e5 ** (-torch.arange(0, _DIM, 2) / _DIM)
    table = torch.cat([angles.cos(), angles.sin()], 1).float().to(device)
    prepared = pool_layers(keys, values, [Rotation(table)] * layers)
    pages = torch.randperm(tokens // 16, generator=generator)
    source = (pages[:, None] * 16 + torch.arange(16)).flatten()
    at = [
        x.to(device)
        for x in (source, torch.arange(len(source)) + tokens, source, torch.arange(len(source)))
    ]
    faults = torch.zeros(1, dtype=torch.int32, device=device)
    row_bytes = 2 * _KV_HEADS * _DIM * dtype.itemsize
    return Timed(
        f"copy_rotate {tokens} tokens, {layers} layers",
        lambda kernel: copy_rotate(prepared, *at, faults, kernel=kernel),
        2 * len(source) * layers * row_bytes,
    )


def score_case(tokens: int, *, device: str = "cuda") -> Timed:
    """The check layer of a prompt of which all but the last 32 tokens are reused."""
    dtype, reused = torch.bfloat16, tokens - _PROBES

    def drawn(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, _DIM, device=device).to(dtype)

    rows = torch.arange(tokens, device=device)
    layer = CheckLayer(
        query=drawn(tokens, _QUERY_HEADS),
        fresh_keys=drawn(tokens, _KV_HEADS),
        fresh_values=drawn(tokens, _KV_HEADS),
        stored_keys=drawn(tokens, _KV_HEADS),
        stored_values=drawn(tokens, _KV_HEADS),
        slots=rows,
        fresh_rows=rows.int(),
        probe_rows=rows[reused:],
        probe_positions=rows[reused:],
        reused=rows[:reused],
        scale=_DIM**-0.5,
    )
    out = torch.empty(5, reused, device=device)
    return Timed(
        f"check_scores {tokens} tokens",
        lambda kernel: check_scores(layer, out, kernel=kernel),
        # Fresh keys twice, since the softmax needs all before the first; the rest once.
        5 * tokens * _KV_HEADS * _DIM * dtype.itemsize,
        2 * 2 * _PROBES * _QUERY_HEADS * _DIM * tokens,
    )


def rows_case(tokens: int, ratio: float, *, device: str = "cuda") -> Timed:
    """Hidden states and residual of ``ratio`` of the rows."""
    first, second = (torch.randn(tokens, _HIDDEN, device=device).bfloat16() for _ in range(2))
    index = torch.arange(0, tokens, max(1, round(1 / ratio)), device=device)
    out = tuple(torch.empty_like(x[: len(index)]) for x in (first, second))
    return Timed(
        f"compact_rows {len(index)} of {tokens}",
        lambda kernel: compact_rows(first, second, index, (out[0], out[1]), kernel=kernel),
        2 * 2 * len(index) * _HIDDEN * first.dtype.itemsize,
    )


def mask_case(tokens: int, ratio: float, *, device: str = "cuda") -> Timed:
    """The mask of ``ratio`` of a prompt's rows."""
    positions = torch.arange(0, tokens, max(1, round(1 / ratio)), device=device)
    counts, keys = [len(positions)], [tokens]
    room = torch.empty(mask_bytes(counts, keys), dtype=torch.uint8, device=device)
    return Timed(
        f"pack_mask {len(positions)} of {tokens}",
        lambda kernel: pack_mask(positions, counts, keys, room, kernel=kernel),
        len(room) + positions.nbytes,
    )
