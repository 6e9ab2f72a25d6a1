"""One window of load on one side."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvshare_eval.errors import EvalError
from kvshare_eval.metering import cpu_seconds
from kvshare_eval.serving.load import Measured, Sender, closed_loop, new_session, open_loop
from kvshare_eval.serving.meters import watch_kv
from kvshare_eval.serving.plan import Arrivals
from kvshare_eval.serving.sglang_client import bench_serving
from kvshare_eval.serving.sides import Side
from kvshare_eval.serving.stream import request_body, stream
from kvshare_eval.serving.workloads import LoadRequest


@dataclass(frozen=True)
class ClientSettings:
    """How load is sent.

    Attributes:
        model: for the tokenizer of SGLang's client.
        timeout_s: after which a request is given up.
        poll: whether the KV pool is watched.
    """

    model: str
    timeout_s: float
    poll: bool


@dataclass(frozen=True)
class SideMeasured:
    """A window's requests and what the meters saw meanwhile."""

    measured: Measured
    scheduler_cpu_s: float | None
    kv_tokens_peak: int | None


async def measure(
    side: Side,
    arrivals: Arrivals,
    settings: ClientSettings,
    *,
    client: str,
    window: str,
    name: str,
    done: Callable[[], None],
) -> SideMeasured:
    """Empty the cache, send the warm-up prompts one by one, then the load.

    Raises:
        EvalError: the server refused a warm-up prompt, or not one request of the window ended well.
    """
    side.flush()
    await _warm_up(side, arrivals, settings.timeout_s)
    load = arrivals.load.requests
    sender = Sender(side.url, window, side.kvshare, settings.timeout_s, done)
    async with watch_kv(side.url, enabled=settings.poll) as peak:
        before = cpu_seconds(side.schedulers)
        with _no_collections():
            if client == "sglang":
                measured = await bench_serving(
                    sender, load, arrivals.rate, name=name, model=settings.model
                )
            elif arrivals.due_s is None:
                measured = await closed_loop(sender, load)
            else:
                measured = await open_loop(sender, load, arrivals.due_s)
        after = cpu_seconds(side.schedulers)
    if all(record.error for record in measured.records):
        raise EvalError(f"{window}: every request failed: {measured.records[0].error}")
    # What SGLang's client does before its first request is no part of the window.
    cpu_s = None
    if client == "own" and before is not None and after is not None:
        cpu_s = after - before
    return SideMeasured(measured, cpu_s, peak.tokens)


async def _warm_up(side: Side, arrivals: Arrivals, timeout_s: float) -> None:
    async with new_session() as session:
        for prompt in arrivals.load.warm_up:
            body = request_body(LoadRequest(prompt, 1, 0), side.kvshare)
            got = await stream(session, side.url, body, timeout_s)
            if got.error is not None:
                raise EvalError(f"side {side.name}: a warm-up prompt failed: {got.error}")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's garbage collector from pausing the client."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
