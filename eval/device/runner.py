"""A Llama-class model over a paged pool, as small as it can be, for prefills in full and narrowed.

    in full      every row, every layer
    narrowed     donors are copied beside the forward; rows are dropped before layer 0 (seams), or
                 at the check layer, whose keys and values are still computed for all

What is measured of it is what the server runs: the copy layer by layer, the scores of the check
layer, the rows' compaction, and an adapter of :mod:`sglang_kvshare.engine.row_attention` for the
rows that are left. Matching is not part of it: plans are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import embedding, linear, rms_norm, silu

from kvshare_eval.device.causal_attention import causal
from kvshare_eval.device.kv_pool import AttentionLayer, KVPool, PoolBackend
from kvshare_eval.device.model_shapes import ModelShape
from kvshare_eval.device.model_weights import LayerWeights, ModelWeights
from kvshare_eval.device.reusing import Reuse, measured_choice, moves_of
from sglang_kvshare.attention.kernels.compact_rows import compact_rows
from sglang_kvshare.attention.layerwise_copy import Copying, LayerwiseCopy
from sglang_kvshare.engine.kept_rows import Extend, KeptRows
from sglang_kvshare.engine.pool_reader import PoolReader
from sglang_kvshare.engine.row_attention import (
    LayerRows,
    Narrowed,
    PositionMaskRows,
    RowAttention,
)
from sglang_kvshare.plan import BoolArray
from sglang_kvshare.recompute.rope import KeyMove, Rotation, rotate_, rounded


@dataclass(frozen=True, eq=False)
class Prefilled:
    """
    Attributes:
        logits: fp32 ``[vocabulary]``, behind the last token.
        rows_in: rows of each layer for which queries, keys and values were computed.
        rows_out: rows of each layer that attended, and went on.
        positions: int64, of the rows that were left at the end.
        recompute: bool ``[matched_tokens]``; ``None`` for a prefill in full.
        finite: whether all donors' values were.
    """

    logits: torch.Tensor
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]
    positions: np.ndarray
    recompute: BoolArray | None
    finite: bool


def rotary_table(shape: ModelShape, tokens: int, device: str | torch.device) -> torch.Tensor:
    """fp32 ``[tokens, head_dim]``: cosines, then sines."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**steps
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1).to(device)


class Runner:
    """
    Args:
        rows: how narrowed rows attend; in PyTorch by default.
        max_tokens: positions that a prompt or a donor may have.
        kernel: for the rows of a prefill in full; see
            :func:`kvshare_eval.device.causal_attention.causal`.
    """

    def __init__(
        self,
        weights: ModelWeights,
        pool: KVPool,
        max_tokens: int,
        rows: RowAttention | None = None,
        kernel: SDPBackend | None = None,
    ) -> None:
        self.shape, self.pool = weights.shape, pool
        self._weights, self._kernel = weights, kernel
        self._rows = rows or PositionMaskRows()
        self._reader = PoolReader(PoolBackend.of(pool))
        table = rotary_table(self.shape, max_tokens, weights.device)
        self._rotation = Rotation(table)
        streams: Any = torch.cuda if weights.device.type == "cuda" else None
        self._copy = LayerwiseCopy(
            pool.keys, pool.values, [self._rotation] * self.shape.layers, streams
        )
        self._layers = [AttentionLayer.of(self.shape, n) for n in range(self.shape.layers)]

    @torch.inference_mode()
    def prefill(
        self, tokens: torch.Tensor, slots: torch.Tensor, reuse: Reuse | None = None
    ) -> Prefilled:
        """
        Args:
            tokens: int64 ``[n]``.
            slots: int64 ``[n]``, the prompt's KV row; all of it is written.
        """
        forward = _Forward(self, slots, reuse)
        told = forward.run(tokens)
        self._rows.end()
        return told

    def turns(self, positions: torch.Tensor) -> KeyMove:
        """From no position to these: how fresh queries and keys are rotated."""
        cos, sin = self._rotation.table.index_select(0, positions).chunk(2, 1)
        return KeyMove(cos.unsqueeze(1), sin.unsqueeze(1))


class _Forward:
    """One prefill: the rows that run, and what is known of them."""

    def __init__(self, runner: Runner, slots: torch.Tensor, reuse: Reuse | None) -> None:
        self._runner, self._slots, self._reuse = runner, slots, reuse
        self._extend = Extend([0], [slots.shape[0]], slots)
        self._narrowed: Narrowed | None = None
        self._cache_loc = slots
        self._turns = runner.turns(torch.arange(slots.shape[0], device=slots.device))
        self._recompute: BoolArray | None = None
        self._rows_in: list[int] = []
        self._rows_out: list[int] = []

    def run(self, tokens: torch.Tensor) -> Prefilled:
        runner, weights, reuse = self._runner, self._runner._weights, self._reuse
        copying = Copying()
        index: torch.Tensor | None = None
        if reuse is not None:
            if reuse.check_layer is None:
                index = self._drop(reuse.by_plan())
            moves = moves_of(reuse.plan, self._recompute, self._slots)
            copying = runner._copy.start(moves)
        x = embedding(tokens, weights.embedding)
        if index is not None:
            x = x.index_select(0, index)
        for number, layer in enumerate(weights.layers):
            copying.before(number)
            x = self._layer(number, layer, x)
        last = rms_norm(x[-1:], (x.shape[1],), weights.norm, runner.shape.norm_eps)
        logits = linear(last, weights.head)[0].float()
        kept = self._kept
        count = self._slots.shape[0]
        return Prefilled(
            logits,
            tuple(self._rows_in),
            tuple(self._rows_out),
            np.arange(count) if kept is None else kept.row_positions,
            self._recompute,
            # Asked behind the launches: the host waits for the copy while the forward is queued.
            copying.finite(),
        )

    @property
    def _kept(self) -> KeptRows | None:
        return None if self._narrowed is None else self._narrowed.kept

    def _layer(self, number: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        """``x`` is the residual stream, ``[rows, hidden]``."""
        runner, shape = self._runner, self._runner.shape
        rows = x.shape[0]
        normed = rms_norm(x, (shape.hidden,), layer.attention_norm, shape.norm_eps)
        heads = linear(normed, layer.qkv).unflatten(1, (-1, shape.head_dim))
        turning = shape.query_heads + shape.kv_heads
        turned = rounded(rotate_(heads[:, :turning].float(), self._turns), x.dtype)
        q, k = turned.split((shape.query_heads, shape.kv_heads), 1)
        v = heads[:, turning:]
        index = None
        if self._reuse is not None and self._reuse.check_layer == number:
            stored = runner.pool.get_kv_buffer(number)
            # Before anything is written, so that what is stored is the donors' still.
            chosen = measured_choice(self._reuse, q, k, v, stored, self._slots, shape.scale)
        else:
            chosen = None
        runner.pool.write(number, self._cache_loc, k, v)
        if chosen is not None:
            index = self._drop(chosen)
            flat, x = compact_rows(q.flatten(1), x, index)
            k, v = (
                each.unflatten(1, (shape.kv_heads, shape.head_dim))
                for each in compact_rows(k.flatten(1), v.flatten(1), index)
            )
            q = flat.unflatten(1, (shape.query_heads, shape.head_dim))
        if self._narrowed is None:
            attended = causal(q, k, v, scale=shape.scale, kernel=runner._kernel).flatten(1)
        else:
            told = LayerRows(q.flatten(1), k, v, runner._layers[number])
            attended = runner._rows.attend(self._narrowed, told)
        x = torch.addmm(x, attended, layer.output.T)
        normed = rms_norm(x, (shape.hidden,), layer.feed_norm, shape.norm_eps)
        gate, up = linear(normed, layer.gate_up).chunk(2, 1)
        x = torch.addmm(x, silu(gate, inplace=True).mul_(up), layer.down.T)
        self._rows_in.append(rows)
        self._rows_out.append(x.shape[0])
        return x

    def _drop(self, recompute: BoolArray) -> torch.Tensor:
        """Let the matched tokens that are not to be recomputed go; the index of what is left."""
        assert self._reuse is not None
        kept = self._extend.keep(self._reuse.kept(recompute))
        self._narrowed = Narrowed(kept, None, [self._slots], self._runner._reader)
        self._recompute = recompute
        self._cache_loc, self._turns = kept.cache_loc, self._runner.turns(kept.positions)
        # The extend begins at position 0: its rows are its positions.
        return kept.positions
