"""Reading keys and values from the KV pool in the dtype of the computation.

Seams: ``MHATokenToKVPool.get_key_buffer``, ``get_value_buffer``; ``RadixAttention.k_scale`` and
``v_scale`` belong to an FP8 pool.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvshare.attention.kernels.slots import gather

#: The backend that writes to an FP8 pool and reads from it without the layer's scales.
_UNSCALED_BACKEND = "TorchNativeAttnBackend"


class PoolReader:
    """Reads as the stock backend does, scales included."""

    def __init__(self, stock: Any) -> None:
        self.pool = stock.token_to_kv_pool
        self._table = stock.req_to_token_pool.req_to_token
        self._scaled = type(stock).__name__ != _UNSCALED_BACKEND and self.pool.dtype.itemsize == 1

    def scales(self, layer: Any) -> tuple[Any, Any]:
        """What stored keys and values are multiplied by; ``None`` for nothing."""
        return (layer.k_scale, layer.v_scale) if self._scaled else (None, None)

    def factors(self, layer: Any) -> tuple[float, float]:
        """:meth:`scales` as numbers, without asking the device; 1 for nothing."""
        told = []
        for name, scale in zip(("k_scale_float", "v_scale_float"), self.scales(layer), strict=True):
            number = getattr(layer, name, None)
            told.append(1.0 if scale is None else float(scale if number is None else number))
        return told[0], told[1]

    def keys(self, layer: Any, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[slots, kv_heads, head_dim]``, a copy."""
        stored = gather(self.pool.get_key_buffer(layer.layer_id), slots)
        return _converted(stored, dtype, self.scales(layer)[0])

    def values(self, layer: Any, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[slots, kv_heads, value_dim]``, a copy."""
        stored = gather(self.pool.get_value_buffer(layer.layer_id), slots)
        return _converted(stored, dtype, self.scales(layer)[1])

    def rows(self, req_pool_indices: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """The slots of each request's KV row, int64 ``[length]``."""
        return [
            self._table[index, :length].to(torch.int64)
            for index, length in zip(req_pool_indices.tolist(), lengths, strict=True)
        ]


def _converted(stored: torch.Tensor, dtype: torch.dtype, scale: Any) -> torch.Tensor:
    if scale is None:
        return stored.to(dtype)
    return stored.float().mul_(scale).to(dtype)
