"""How full a server's KV pool is while load runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import aiohttp

POLL_SECONDS = 0.5
_POLL_TIMEOUT_S = 5.0
#: SGLang sets this gauge with every prefill and every few dozen decode steps.
_USED = re.compile(rb"^sglang:num_used_tokens(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


class KvPeak:
    """The most KV slots that requests held; what is cached and can be evicted does not count."""

    def __init__(self) -> None:
        self._stale: int | None = None
        self._peak: int | None = None

    @property
    def tokens(self) -> int | None:
        """``None`` while the server has not said."""
        return self._stale if self._peak is None else self._peak

    def see(self, metrics: bytes) -> None:
        """Read one answer of ``/metrics``; ranks that replicate a request report the same.

        A gauge keeps its last value: until it changes it may be that of the window before, and
        counts only if it never changes.
        """
        used = max((int(float(value)) for value in _USED.findall(metrics)), default=None)
        if used is None:
            return
        if self._stale is None:
            self._stale = used
        if self._peak is not None or used != self._stale:
            self._peak = max(self._peak or 0, used)


@contextlib.asynccontextmanager
async def watch_kv(url: str, *, enabled: bool = True) -> AsyncIterator[KvPeak]:
    """Poll ``/metrics`` twice a second while the block runs.

    The server's HTTP process answers it: the scheduler is not asked, other than by
    ``/server_info``. Reading an answer takes this process well below a millisecond. A server
    without ``--enable-metrics`` is asked once.
    """
    peak = KvPeak()
    task = asyncio.create_task(_poll(url, peak)) if enabled else None
    try:
        yield peak
    finally:
        if task is not None:
            task.cancel()
            # Not `await task`: a stop by hand that arrives right now would look like the task's.
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()


async def _poll(url: str, peak: KvPeak) -> None:
    timeout = aiohttp.ClientTimeout(total=_POLL_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            # A server that is too busy to answer in time is asked again: the peak is a lower bound.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/metrics") as response:
                    if response.status != 200:
                        return
                    peak.see(await response.read())
            await asyncio.sleep(POLL_SECONDS)
