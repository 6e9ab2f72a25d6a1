"""A stand-in for SGLang's HTTP server that speaks what the serving harness needs."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

#: What a request does instead of being answered; chosen by its body.
Fault = Callable[[dict[str, Any]], str | None]


@dataclass
class Stub:
    """Serves one request at a time, each in ``delay_s``, in a thread of its own.

    Attributes:
        kvshare: whether answers carry KVShare's report.
        delay_s: from a request's turn to its first token.
        gaps_s: between tokens; the last one is repeated.
        step: tokens that come in one piece.
        fault: see ``_FAULTS``.
        arrived: when each ``/generate`` came in, by ``time.perf_counter``.
        bodies: what they asked.
        events: ``flush`` and ``generate`` in order.
    """

    kvshare: bool = False
    delay_s: float = 0.0
    gaps_s: tuple[float, ...] = (0.0,)
    step: int = 1
    fault: Fault = lambda body: None
    arrived: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    used_tokens: int | None = 1234
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main(started))
        self._loop.close()

    async def _main(self, started: threading.Event) -> None:
        self._stopped, self._turn = asyncio.Event(), asyncio.Lock()
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._info)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stopped.wait()
        await runner.cleanup()

    async def _flush(self, request: web.Request) -> web.Response:
        self.events.append("flush")
        return web.Response(text="Cache flushed.")

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.used_tokens is None:
            return web.Response(status=404)
        used = f'sglang:num_used_tokens{{tp_rank="0"}} {float(self.used_tokens)}\n'
        return web.Response(text=f"# HELP x\n{used}sglang:num_running_reqs 3.0\n")

    async def _info(self, request: web.Request) -> web.Response:
        info = {"version": "0.5.23", "dtype": "float32", "kv_cache_dtype": "auto"}
        return web.json_response({**info, "model_path": "/secret/place", "host": "secret"})

    def _meta(self, body: dict[str, Any], tokens: int, last: bool) -> dict[str, Any]:
        prompt = len(body["input_ids"])
        meta: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "cached_tokens": prompt // 4,
            "finish_reason": {"type": "length", "length": tokens} if last else None,
        }
        if self.kvshare:
            custom = body["sampling_params"].get("custom_params", {}).get("kvshare", {})
            reused = 0 if custom.get("reuse") == "exact_prefix" else prompt // 2
            report = {"prefix_tokens": prompt // 4, "reused_tokens": reused}
            meta["cached_tokens_details"] = {"kvshare": report}
        return meta

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.arrived.append(time.perf_counter())
        self.events.append("generate")
        body = await request.json()
        self.bodies.append(body)
        fault = self.fault(body)
        if fault == "refuse":
            return web.Response(status=400, text="reuse: unknown value")
        wanted = body["sampling_params"]["max_new_tokens"]
        if not body.get("stream"):
            return web.json_response({"text": "x", "meta_info": self._meta(body, wanted, True)})
        response = web.StreamResponse()
        await response.prepare(request)

        async def say(content: Any) -> None:
            await response.write(f"data: {json.dumps(content)}\n\n".encode())

        async with self._turn:
            await asyncio.sleep(self.delay_s)
            if fault == "hang":
                await asyncio.sleep(60)
            if fault == "error":
                await say({"error": {"message": "out of memory"}})
                return response
            if fault == "garbage":
                await say("no object")
                return response
            tokens = 0
            while tokens < wanted:
                if tokens:
                    place = min(tokens // self.step, len(self.gaps_s)) - 1
                    await asyncio.sleep(self.gaps_s[place])
                tokens = min(wanted, tokens + self.step)
                if fault == "break" and tokens > 1:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                last = tokens == wanted and fault != "unfinished"
                meta = self._meta(body, tokens, last)
                if last and fault == "abort":
                    meta["finish_reason"] = {"type": "abort", "message": "too long"}
                await say({"text": "x" * tokens, "meta_info": meta})
        await response.write(b"data: [DONE]\n\n")
        return response
