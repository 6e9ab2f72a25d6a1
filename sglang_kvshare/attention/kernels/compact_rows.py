"""Hidden states and residual of the rows that go on, in one launch.

hidden    [rows, width]          [k, width]
residual  [rows, width]   ->     [k, width]        row i is row index[i]
"""

from __future__ import annotations

import torch

from sglang_kvshare.attention.kernels.where import takes_kernel


def compact_rows(
    first: torch.Tensor,
    second: torch.Tensor,
    index: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    kernel: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``first[index]`` and ``second[index]``.

    Args:
        first: ``[rows, width]``, any dtype; rows may be apart, what is in a row is contiguous.
        second: the same with its own width and dtype: the residual beside hidden states or, in the
            check layer, beside queries.
        index: int64 ``[k]``, each below ``rows``.
        out: where to, contiguous ``[k, width]`` each, sharing no memory with the others.
        kernel: see :func:`sglang_kvshare.attention.kernels.where.takes_kernel`.

    Raises:
        ValueError: a row is not contiguous, or ``out`` has another shape, dtype or stride.
    """
    for tensor in (first, second):
        if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
            raise ValueError(f"rows of shape {tuple(tensor.shape)}, stride {tensor.stride()}")
    count = index.shape[0]
    if out is None:
        out = first.new_empty(count, first.shape[1]), second.new_empty(count, second.shape[1])
    for made, tensor in zip(out, (first, second), strict=True):
        if made.shape != (count, tensor.shape[1]) or made.dtype != tensor.dtype:
            raise ValueError(f"out of shape {tuple(made.shape)}, {made.dtype}")
        if not made.is_contiguous():
            raise ValueError(f"out with stride {made.stride()}")
    if count and takes_kernel(first, kernel):
        from sglang_kvshare.attention.kernels.device import compact_rows as device

        device.run(first, second, index, out)
    else:
        compact_rows_reference(first, second, index, out)
    return out


def compact_rows_reference(
    first: torch.Tensor,
    second: torch.Tensor,
    index: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """:func:`compact_rows` in PyTorch."""
    for tensor, made in zip((first, second), out, strict=True):
        torch.index_select(tensor, 0, index, out=made)
