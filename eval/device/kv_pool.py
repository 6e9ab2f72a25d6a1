"""A KV pool with as much of SGLang's as the adapters to its attention backends read."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvshare_eval.device.model_shapes import ModelShape

#: Slots that follow each other; which pages do is left to chance, as in a pool that is in use.
PAGE_SLOTS = 16
#: What SGLang gives FlashInfer.
WORKSPACE_BYTES = 384 << 20


class KVPool:
    """One buffer ``[slots, kv_heads, head_dim]`` a layer for keys and one for values.

    The first page is padding, which nobody reads.
    """

    def __init__(
        self, shape: ModelShape, tokens: int, dtype: torch.dtype, device: str, seed: int = 0
    ) -> None:
        """With room for ``tokens`` in a few rows."""
        self.dtype = dtype
        self._pages = tokens // PAGE_SLOTS + 8
        self._generator = torch.Generator().manual_seed(seed)
        size = (PAGE_SLOTS * (self._pages + 1), shape.kv_heads, shape.head_dim)
        self.keys, self.values = (
            [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]
            for _ in range(2)
        )
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Take all slots back."""
        self._free = (torch.randperm(self._pages, generator=self._generator) + 1).tolist()

    def take(self, tokens: int) -> torch.Tensor:
        """int64 ``[tokens]``: the slots of a KV row, on the pool's device.

        Raises:
            ValueError: there are not so many.
        """
        count = -(-tokens // PAGE_SLOTS)
        if count > len(self._free):
            raise ValueError(f"{count} pages for {tokens} tokens, but {len(self._free)} are free")
        pages, self._free = self._free[:count], self._free[count:]
        slots = torch.tensor(pages)[:, None] * PAGE_SLOTS + torch.arange(PAGE_SLOTS)
        return slots.flatten()[:tokens].to(self.keys[0].device)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """``k`` and ``v`` are ``[rows, kv_heads, head_dim]``."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    # --- as ``MHATokenToKVPool`` ------------------------------------------------------------------

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[layer_id], self.values[layer_id]


@dataclass(eq=False)
class PoolBackend:
    """As much of ``FlashInferAttnBackend`` as is read.

    Attributes:
        workspace_buffer: of FlashInfer; small where there is none.
        req_to_token_pool: empty, since rows' slots are given by hand.
    """

    token_to_kv_pool: KVPool
    workspace_buffer: torch.Tensor
    prefill_backend: str = "fa2"
    prefill_split_tile_size: int | None = None
    req_to_token_pool: Any = field(
        default_factory=lambda: SimpleNamespace(req_to_token=torch.empty(0, 0, dtype=torch.int32))
    )

    @classmethod
    def of(cls, pool: KVPool) -> PoolBackend:
        device = pool.keys[0].device
        size = WORKSPACE_BYTES if device.type == "cuda" else 16
        return cls(pool, torch.empty(size, dtype=torch.uint8, device=device))


@dataclass(frozen=True)
class AttentionLayer:
    """As much of ``RadixAttention`` as is read."""

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    tp_v_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    k_scale: float | None = None
    v_scale: float | None = None
    k_scale_float: float | None = None
    v_scale_float: float | None = None

    @classmethod
    def of(cls, shape: ModelShape, number: int) -> AttentionLayer:
        return cls(
            number,
            shape.query_heads,
            shape.kv_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.head_dim,
            shape.scale,
        )
