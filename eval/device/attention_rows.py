"""Narrowed rows of one layer as something to check and to time: scattered rows over a KV row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvshare_eval.device.kv_pool import AttentionLayer, KVPool, PoolBackend
from kvshare_eval.device.model_shapes import ModelShape
from sglang_kvshare.attention.launch_choice import AttentionCosts
from sglang_kvshare.attention.launches import Form
from sglang_kvshare.engine.kept_rows import Extend
from sglang_kvshare.engine.pool_reader import PoolReader
from sglang_kvshare.engine.row_attention import LayerRows, Narrowed, RowAttention
from sglang_kvshare.plan import BoolArray, Int64Array

#: Costs under which scattered rows take each form, whatever is cheapest in truth.
FORM_COSTS: Mapping[Form, AttentionCosts] = {
    Form.RUNS: AttentionCosts(masked=1e12, list_limit_bytes=1 << 40),
    Form.MASK: AttentionCosts(
        launch_ns=1e13, mask_limit_tokens=1 << 40, mask_limit_bytes=1 << 40, row_ns=1e-3
    ),
    Form.TWO_PARTS: AttentionCosts(launch_ns=0, merge_row_ns=0, mask_limit_tokens=0, row_ns=1e-3),
}


def scattered(tokens: int, share: float, seed: int = 0) -> BoolArray:
    """bool ``[tokens]``: rows drawn one by one, the last among them."""
    count = max(1, round(share * tokens))
    keep = np.zeros(tokens, dtype=np.bool_)
    keep[np.random.default_rng(seed).permutation(tokens - 1)[: count - 1]] = True
    keep[-1] = True
    return keep


def in_spans(tokens: int, share: float, span_tokens: int = 512) -> BoolArray:
    """bool ``[tokens]``: the first ones of each span, and the last of all."""
    keep = np.arange(tokens) % span_tokens < max(1, round(share * span_tokens))
    keep[-1] = True
    return keep


class RowsCase:
    """Kept rows of one request, with random queries; keys and values of the pool are random too.

    Args:
        keep: bool ``[tokens]``, the rows.
    """

    def __init__(self, shape: ModelShape, pool: KVPool, keep: BoolArray, seed: int = 0) -> None:
        device = pool.keys[0].device
        generator = torch.Generator(device).manual_seed(seed)
        for buffer in (*pool.keys, *pool.values):
            buffer.normal_(generator=generator)
        pool.clear()
        self.shape, self.pool = shape, pool
        self.slots = pool.take(len(keep))
        self._keep = keep
        self._extend = Extend([0], [len(keep)], self.slots)
        self._reader = PoolReader(PoolBackend.of(pool))
        self.narrowed = self.narrow()
        heads = shape.query_heads * shape.head_dim
        self.query = torch.empty(len(self.positions), heads, dtype=pool.dtype, device=device)
        self.query.normal_(generator=generator)
        self._layer = AttentionLayer.of(shape, 0)

    @property
    def positions(self) -> Int64Array:
        return self.narrowed.kept.row_positions

    @property
    def pairs(self) -> int:
        """Rows and keys that see each other."""
        return int((self.positions + 1).sum())

    def narrow(self) -> Narrowed:
        """The same rows as something new, that must be planned."""
        return Narrowed(self._extend.keep(self._keep), None, [self.slots], self._reader)

    def attend(self, rows: RowAttention, narrowed: Narrowed | None = None) -> torch.Tensor:
        """``[rows, query_heads, head_dim]``."""
        # Adapters read what rows wrote from the pool.
        none = self.query[:, :0]
        told = rows.attend(
            narrowed or self.narrowed, LayerRows(self.query, none, none, self._layer)
        )
        return told.unflatten(1, (self.shape.query_heads, self.shape.head_dim))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[rows, query_heads, dim]``, and the row's keys and values in order."""
        queries = self.query.unflatten(1, (self.shape.query_heads, self.shape.head_dim))
        keys, values = self.pool.get_kv_buffer(0)
        return queries, keys[self.slots], values[self.slots]
