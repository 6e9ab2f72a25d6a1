"""How long something takes on a device, or on the host: the median of some runs, and quartiles.

On a CUDA device a run is timed by events. Before each one a buffer larger than the last cache is
overwritten: that leaves nothing of the run before in the cache, and gives the host a head start, so
that its own time to launch one kernel is not in the figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

#: A write of it takes 0.1 to 0.3 ms on cards of 4 to 2 TB/s.
CLEARED_BYTES = 512 << 20


@dataclass(frozen=True)
class Spread:
    """Milliseconds: quartiles, and of how many runs."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int

    @classmethod
    def of(cls, taken_ms: list[float]) -> Spread:
        if len(taken_ms) == 1:
            return cls(taken_ms[0], taken_ms[0], taken_ms[0], 1)
        low, median, high = statistics.quantiles(taken_ms, n=4, method="inclusive")
        return cls(median, low, high, len(taken_ms))

    def __str__(self) -> str:
        return f"{number(self.median_ms)} [{number(self.low_ms)}, {number(self.high_ms)}]"


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def device_ms(
    call: Callable[[], object], device: str, *, warm_up: int = 3, runs: int = 20
) -> Spread:
    """Time on the device's current stream; on a CPU that of the host."""
    for _ in range(warm_up):
        call()
    if device != "cuda":
        return Spread.of([_host_ms(call) for _ in range(runs)])
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(runs)]
    for begin, end in pairs:
        _cleared().zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return Spread.of([begin.elapsed_time(end) for begin, end in pairs])


def waiting_ms(
    call: Callable[[], Any], device: str, *, warm_up: int = 1, runs: int = 5
) -> tuple[Spread, Any]:
    """Time that the host waits for a result, launches and copies included; and the last result."""
    for _ in range(warm_up):
        call()
    taken = []
    told = None
    for _ in range(runs):
        synchronize(device)
        begin = time.perf_counter()
        told = call()
        synchronize(device)
        taken.append((time.perf_counter() - begin) * 1e3)
    return Spread.of(taken), told


def host_ms(call: Callable[[], object], *, warm_up: int = 2, runs: int = 20) -> Spread:
    """Time until a call returns, whatever it has launched."""
    for _ in range(warm_up):
        call()
    return Spread.of([_host_ms(call) for _ in range(runs)])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _host_ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


@cache
def _cleared() -> torch.Tensor:
    return torch.empty(CLEARED_BYTES, dtype=torch.uint8, device="cuda")
