"""Reading and writing slots of a KV buffer in PyTorch, for every dtype of a pool."""

from __future__ import annotations

import torch


def gather(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``buffer[slots]``, a copy ``[n, heads, dim]`` in the buffer's dtype.

    Args:
        buffer: ``[slots, heads, dim]``.
        slots: int64 ``[n]``.
    """
    return _indexable(buffer).index_select(0, slots).view(buffer.dtype)


def scatter(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """``buffer[slots] = rows``, of one dtype."""
    _indexable(buffer).index_copy_(0, slots, _indexable(rows))


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch indexes FP8 tensors on some devices only, but bytes on all."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
