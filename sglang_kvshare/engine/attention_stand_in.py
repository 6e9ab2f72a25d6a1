"""What every attention backend of ours shares: it answers as the stock one but where it differs.

Seams: ``ForwardContext.attn_backend`` is what ``RadixAttention.forward`` calls; everything else
that SGLang asks of a backend goes to the stock one. ``MHATokenToKVPool.set_kv_buffer``.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_kvshare.engine.pool_reader import PoolReader


class AttentionStandIn:
    """The stock backend; subclasses replace ``forward`` (``AttentionBackend.forward``)."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._reader = PoolReader(stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def _write(self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values to the pool; dividing by a scale happens in place."""
        where = KVWriteLoc(forward_batch.out_cache_loc, None)
        self._reader.pool.set_kv_buffer(layer, where, k, v, *self._reader.scales(layer))

    @staticmethod
    def _by_head(q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``q`` as ``[rows, heads, dim]``, and an output that is still to be filled."""
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return queries, q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
