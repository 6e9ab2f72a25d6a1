"""Attention over all keys from the attention over two parts of them.

With outputs ``a`` and ``b`` and the logarithms ``s`` of their softmax sums, the whole is
``(2**s_a a + 2**s_b b) / (2**s_a + 2**s_b)`` (FlashInfer, arXiv 2501.01005, 2.2). Base 2 is what
FlashInfer's kernels give.
"""

from __future__ import annotations

import torch


def merge_parts(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """
    Args:
        out_a, out_b: ``[rows, heads, dim]``. Where a part has no key, ``lse`` is minus infinity
            and ``out`` anything; never both parts of a row.
        lse_a, lse_b: fp32 ``[rows, heads]``, base 2.

    Returns:
        ``[rows, heads, dim]`` in the dtype of ``out_a``; computed in fp32.
    """
    # The share of `a` alone is enough, and 2**-inf is 0.
    share = torch.sigmoid((lse_a - lse_b) * 0.6931471805599453).unsqueeze(-1)
    # Zero times what is not a number is none: a part without keys must not be looked at.
    a = torch.where(share > 0, out_a.float(), 0.0)
    b = torch.where(share < 1, out_b.float(), 0.0)
    return torch.lerp(b, a, share).to(out_a.dtype)
