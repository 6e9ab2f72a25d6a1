"""One streamed ``/generate`` request, timed as the client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvshare_eval.serving.workloads import LoadRequest

#: A line of the stream holds the whole answer so far; aiohttp refuses lines over twice this.
READ_BYTES = 2**22
_ERROR_CHARS = 500


@dataclass
class Streamed:
    """What came back; times are those of the event loop's clock, in seconds.

    Attributes:
        sent: when the request was handed to the connection.
        first: when the first token came.
        last: when the last token came.
        gaps: between tokens that came one after the other; tokens that came in one piece share
            the gap before it equally, as in SGLang's own benchmark.
        text: the answer, as far as it came.
        meta: SGLang's ``meta_info`` of the last piece.
        error: what went wrong.
    """

    sent: float
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def request_body(request: LoadRequest, kvshare: Mapping[str, Any] | None) -> bytes:
    """The JSON of a request, made before the window so that sending costs no time."""
    return json.dumps(generate_fields(request, kvshare)).encode()


def generate_fields(request: LoadRequest, kvshare: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``/generate`` is asked: greedy, and as many tokens on every side."""
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_new_tokens": request.output_tokens,
        "ignore_eos": True,
        # So that every token has a text: SGLang's own client takes an empty one for no token.
        "skip_special_tokens": False,
    }
    if kvshare is not None:
        sampling["custom_params"] = {"kvshare": dict(kvshare)}
    return {"input_ids": list(request.prompt), "sampling_params": sampling, "stream": True}


async def stream(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout_s: float
) -> Streamed:
    """Send one request and read its answer; every failure ends up in ``error``."""
    now = asyncio.get_running_loop().time
    got = Streamed(sent=now())
    try:
        async with session.post(
            f"{url}/generate",
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            if response.status != 200:
                text = (await response.text(errors="replace")).strip()
                got.error = f"HTTP {response.status}: {text[:_ERROR_CHARS]}"
                return got
            async for line in response.content:
                _take(got, line, now())
        if got.error is None:
            got.error = _unfinished(got)
    except TimeoutError:
        got.error = f"no end after {timeout_s:g} s, {got.tokens} tokens came"
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        got.error = f"broken off after {got.tokens} tokens: {error!r}"[:_ERROR_CHARS]
    return got


def _take(got: Streamed, line: bytes, moment: float) -> None:
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return
    piece = json.loads(line.removeprefix(b"data:"))
    if "error" in piece:
        got.error = str(piece["error"])[:_ERROR_CHARS]
        return
    got.meta = piece["meta_info"]
    got.text = piece.get("text", "")
    tokens = int(got.meta["completion_tokens"])
    new = tokens - got.tokens
    if new <= 0:
        return
    if got.first is None:
        got.first = moment
        # Tokens that came together with the first one: no time passed between them.
        got.gaps += [0.0] * (new - 1)
    else:
        assert got.last is not None
        got.gaps += [(moment - got.last) / new] * new
    got.tokens, got.last = tokens, moment


def _unfinished(got: Streamed) -> str | None:
    reason = got.meta.get("finish_reason")
    if reason is None:
        return f"the stream ended after {got.tokens} tokens without a finish reason"
    if isinstance(reason, Mapping) and reason.get("type") == "abort":
        return f"aborted: {reason.get('message', '')}"[:_ERROR_CHARS]
    if got.tokens == 0:
        return "no token came"
    return None
