"""Causal attention of all rows of a prompt, as an engine computes it when nothing is reused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

#: Kernels of PyTorch that never hold all weights of a head.
FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    kernel: SDPBackend | None = None,
) -> torch.Tensor:
    """``[rows, query_heads, head_dim]``; the row ``i`` sees the keys ``0 .. i``.

    Args:
        query: ``[rows, query_heads, head_dim]``.
        key, value: ``[rows, kv_heads, head_dim]``.
        kernel: which one runs; on a CUDA device one of :data:`FUSED` where it is left open.
    """
    context: AbstractContextManager[object] = nullcontext()
    if query.is_cuda:
        context = sdpa_kernel(list(FUSED) if kernel is None else kernel)
    with context:
        out = scaled_dot_product_attention(
            query.movedim(0, 1).unsqueeze(0),
            key.movedim(0, 1).unsqueeze(0),
            value.movedim(0, 1).unsqueeze(0),
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out[0].movedim(0, 1)
