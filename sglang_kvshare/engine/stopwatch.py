"""Time of a forward on its device.

On a CPU a forward returns when it is done. On an accelerator it returns when it is enqueued: there
two events enclose it, and the time is read at a later forward, without waiting for the device.

Seam: none of SGLang; ``torch.Event``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Pairs of events that wait to be read; more means that the device is far behind.
_MOST_PENDING = 64


class Stopwatch:
    """Measures what runs inside ``with stopwatch.measure(tell):`` and tells the milliseconds."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque(maxlen=_MOST_PENDING)

    @contextmanager
    def measure(self, tell: Callable[[float], None]) -> Iterator[None]:
        """``tell`` is not called when the inside raises."""
        if self._device.type == "cpu":
            begin = time.perf_counter()
            yield
            tell((time.perf_counter() - begin) * 1e3)
            return
        self._read()
        first, last = (torch.Event(self._device.type, enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._pending.append((first, last, tell))

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last, tell = self._pending.popleft()
            tell(first.elapsed_time(last))
