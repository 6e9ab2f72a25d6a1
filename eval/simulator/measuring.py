"""Asking a running server: its settings, and requests of token ids that no cache knows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from kvshare_eval.errors import EvalError
from kvshare_eval.serving.load import new_session
from kvshare_eval.serving.stream import Streamed, request_body, stream
from kvshare_eval.serving.workloads import LoadRequest
from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.settings import Flags

#: Token ids that every model has and that are no special ones.
_LEAST_ID, _MOST_ID = 1000, 20000
_TIMEOUT_S = 900.0


def unseen(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(_LEAST_ID, _MOST_ID), k=tokens))


async def server_info(url: str) -> dict[str, Any]:
    """
    Raises:
        EvalError: no SGLang server answers there.
    """
    try:
        async with new_session() as session, session.get(f"{url}/server_info") as response:
            return dict(await response.json(content_type=None))
    except (aiohttp.ClientError, ValueError, TypeError) as error:
        raise EvalError(f"no SGLang server at {url}: {error}") from None


async def flush(url: str) -> None:
    """Empty its cache; it refuses while something runs."""
    async with new_session() as session:
        for _ in range(20):
            async with session.post(f"{url}/flush_cache") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.5)
    raise EvalError(f"{url} does not empty its cache")


async def together(url: str, requests: Sequence[LoadRequest]) -> list[Streamed]:
    """Send all at once.

    Raises:
        EvalError: one of them failed.
    """
    bodies = [request_body(request, None) for request in requests]
    async with new_session() as session:
        got = await asyncio.gather(*(stream(session, url, body, _TIMEOUT_S) for body in bodies))
    for one in got:
        if one.error is not None:
            raise EvalError(f"{url}: {one.error}")
    return list(got)


def flags_of(info: Mapping[str, Any], costs: Costs) -> Flags:
    """What the server was started with, the preset's where it does not say."""
    chunk = info.get("chunked_prefill_size")
    return Flags.of(
        costs,
        pool_tokens=info.get("max_total_num_tokens"),
        chunked_prefill_tokens=None if chunk is None else max(0, int(chunk)),
        max_prefill_tokens=info.get("max_prefill_tokens"),
        max_running=info.get("max_running_requests"),
        conservativeness=info.get("schedule_conservativeness"),
    )
