"""The load client: sends each request when it is due, whatever the server does.

Open loop: arrival times are fixed beforehand and nothing caps what is in flight, so that a slow
server meets the same arrivals as a fast one. TTFT counts from the moment a request was due: what
the client itself was late is part of it, and cannot hide. Closed loop: one request at a time, for
the time that a request takes alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvshare_eval.serving.record import RequestRecord
from kvshare_eval.serving.stream import READ_BYTES, Streamed, request_body, stream
from kvshare_eval.serving.workloads import LoadRequest


@dataclass(frozen=True)
class Measured:
    """A window's requests, and the seconds from the first one due to the last answer."""

    records: tuple[RequestRecord, ...]
    seconds: float


def poisson_arrivals(
    name: str, rate: float, *, requests: int | None = None, seconds: float | None = None
) -> tuple[float, ...]:
    """Times with exponential gaps, the same for the same name.

    Args:
        name: seeds the gaps.
        rate: mean arrivals a second.
        requests: how many, at least 1; or
        seconds: those before this time, the first one in any case.
    """
    rng = random.Random(f"arrivals {name}")
    times: list[float] = []
    moment = rng.expovariate(rate)
    while True:
        if times and (len(times) == requests if seconds is None else moment >= seconds):
            return tuple(times)
        times.append(moment)
        moment += rng.expovariate(rate)


def new_session() -> aiohttp.ClientSession:
    """A session without a limit on connections, each used for one request.

    A kept connection that the server closes at the same moment would cost a request.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, read_bufsize=READ_BYTES)


@dataclass(frozen=True)
class Sender:
    """Where one window's requests go.

    Attributes:
        url: the server.
        window: key of the window, for the records.
        kvshare: settings that every request carries.
        timeout_s: after which a request is given up.
        done: called after each request.
    """

    url: str
    window: str
    kvshare: Mapping[str, Any] | None
    timeout_s: float
    done: Callable[[], None] = lambda: None


async def open_loop(
    sender: Sender, requests: Sequence[LoadRequest], due_s: Sequence[float]
) -> Measured:
    """Send every request at its time.

    Args:
        sender: where to.
        requests: what is sent.
        due_s: when, ascending, in seconds from the start.
    """
    bodies = [request_body(request, sender.kvshare) for request in requests]
    loop = asyncio.get_running_loop()
    async with new_session() as session:

        async def send(body: bytes) -> Streamed:
            got = await stream(session, sender.url, body, sender.timeout_s)
            ends.append(loop.time())
            sender.done()
            return got

        ends: list[float] = []
        tasks: list[asyncio.Task[Streamed]] = []
        start = loop.time()
        for due, body in zip(due_s, bodies, strict=True):
            await asyncio.sleep(max(0.0, start + due - loop.time()))
            tasks.append(asyncio.create_task(send(body)))
        streamed = await asyncio.gather(*tasks)
    records = tuple(
        _record(sender.window, number, start, start + due, got)
        for number, (due, got) in enumerate(zip(due_s, streamed, strict=True))
    )
    return Measured(records, max(ends) - start - due_s[0])


async def closed_loop(sender: Sender, requests: Sequence[LoadRequest]) -> Measured:
    """Send the requests one at a time: each is due when the one before it has ended."""
    bodies = [request_body(request, sender.kvshare) for request in requests]
    loop = asyncio.get_running_loop()
    records: list[RequestRecord] = []
    start = loop.time()
    async with new_session() as session:
        for number, body in enumerate(bodies):
            due = loop.time()
            got = await stream(session, sender.url, body, sender.timeout_s)
            records.append(_record(sender.window, number, start, due, got))
            sender.done()
    return Measured(tuple(records), loop.time() - start)


def _record(window: str, number: int, start: float, due: float, got: Streamed) -> RequestRecord:
    def since(moment: float | None, begin: float) -> float | None:
        return None if moment is None else (moment - begin) * 1e3

    details = got.meta.get("cached_tokens_details") or {}
    return RequestRecord(
        key=f"{window}/{number}",
        window=window,
        number=number,
        due_ms=(due - start) * 1e3,
        sent_ms=(got.sent - start) * 1e3,
        ttft_ms=since(got.first, due),
        tbt_ms=tuple(gap * 1e3 for gap in got.gaps),
        e2e_ms=since(got.last, due) if got.error is None else None,
        prompt_tokens=int(got.meta.get("prompt_tokens") or 0),
        output_tokens=got.tokens,
        cached_tokens=int(got.meta.get("cached_tokens") or 0),
        report=dict(details.get("kvshare") or {}),
        error=got.error,
    )
