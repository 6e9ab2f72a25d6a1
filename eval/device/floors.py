"""What a device can do, measured, and the least time that some work takes on it.

operations / rate of matrix products          whichever is longer is the floor;
bytes / bandwidth of a copy                   a copy counts what it reads and what it writes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvshare_eval.device.timings import Spread, device_ms


@dataclass(frozen=True)
class Work:
    """The least that must be done.

    Attributes:
        operations: floating-point ones of matrix products.
        moved_bytes: read and written in memory, each once.
    """

    operations: int = 0
    moved_bytes: int = 0

    def __str__(self) -> str:
        parts = []
        if self.operations:
            parts.append(_scaled(self.operations, "FLOP"))
        if self.moved_bytes:
            parts.append(_scaled(self.moved_bytes, "B"))
        return ", ".join(parts)


def _scaled(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.4g} T{unit}"


@dataclass(frozen=True)
class Rates:
    """Of one device.

    Attributes:
        copy_ms: of a copy of ``copy_bytes``, read and written.
        product_ms: of a product of two square matrices that takes ``product_operations``.
    """

    copy_ms: Spread
    copy_bytes: int
    product_ms: Spread
    product_operations: int

    @property
    def bytes_per_ms(self) -> float:
        return self.copy_bytes / self.copy_ms.median_ms

    @property
    def operations_per_ms(self) -> float:
        return self.product_operations / self.product_ms.median_ms

    def floor_ms(self, work: Work) -> float:
        return max(work.moved_bytes / self.bytes_per_ms, work.operations / self.operations_per_ms)


def measured(device: str, dtype: torch.dtype, *, copied: int, width: int) -> Rates:
    """
    Args:
        copied: bytes of the copied buffer; several times the last cache.
        width: rows and columns of the multiplied matrices, drawn at random.
    """
    copy_ms, product_ms = _copy_ms(device, copied), _product_ms(device, dtype, width)
    return Rates(copy_ms, 2 * copied, product_ms, 2 * width**3)


def _copy_ms(device: str, copied: int) -> Spread:
    source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_ms(lambda: target.copy_(source), device)


def _product_ms(device: str, dtype: torch.dtype, width: int) -> Spread:
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return device_ms(lambda: torch.mm(a, b, out=out), device)
