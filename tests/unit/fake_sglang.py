"""A few of SGLang's endpoints over a model that is a formula, with a cache that is a list.

It answers as SGLang 0.5.23 does, and can be told to do one thing wrong.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

VOCAB = 500
WINDOW = 16


@dataclass
class FakeSGLang:
    """``faults``: names of things that it does wrong or otherwise; see the uses of ``_has``."""

    faults: frozenset[str] = frozenset()
    default_reuse: str = "approximate"
    api_key: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    cached: dict[Any, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def _has(self, fault: str) -> bool:
        return fault in self.faults

    def server_info(self) -> dict[str, Any]:
        return {
            "model_path": "fake",
            "dtype": "float32",
            "max_req_input_len": 4096,
            "dp_size": 1,
            **self.info,
        }

    def tokenize(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self._has("no tokenizer"):
            return 500, {"error": {"message": "no tokenizer"}}
        return 200, {
            "tokens": [[sum(word.encode()) % VOCAB for word in t.split()] for t in body["prompt"]]
        }

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        ids, sampling = body["input_ids"], body["sampling_params"]
        settings = (sampling.get("custom_params") or {}).get("kvshare") or {}
        report = self.report(ids, body["cache_salt"], settings)
        count = sampling["max_new_tokens"]
        steps = [
            self.step(ids, number, body["top_logprobs_num"], report) for number in range(count)
        ]
        if report.get("decision") == "reuse" and report["reused_tokens"] == 0:
            if self._has("wrong at ratio 1"):
                steps[-1] = [[-0.1, (steps[-1][0][1] + 1) % VOCAB, None], *steps[-1][1:]]
            if self._has("imprecise at ratio 1"):
                steps = [[[lp - 0.1, *rest] for lp, *rest in step] for step in steps]
            if self._has("tie at ratio 1"):
                first, second = steps[3][:2]
                steps[3] = [[first[0], *second[1:]], [first[0] - 2e-4, *first[1:]], *steps[3][2:]]
        elif self._has("tie at ratio 1") and count > 3:
            steps[3][1][0] = steps[3][0][0] - 1e-4
        if self._has("abort"):
            finish: Any = {"type": "abort", "message": "The request queue is full."}
            yield self.chunk(ids, steps[:0], steps[:0], finish, report)
            return
        begin = 0
        for end in range(1, count + 1):
            finish = {"type": "length", "length": count} if end == count else None
            part = steps[begin:end] if self._has("incremental") else steps[:end]
            yield self.chunk(ids, part, steps[:end], finish, report)
            begin = end

    def chunk(self, ids, part, so_far, finish, report) -> dict[str, Any]:
        meta = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(so_far),
            "finish_reason": finish,
            "output_token_logprobs": [step[0] for step in part],
            "output_top_logprobs": part,
            "cached_tokens_details": {"device": 0, "host": 0},
        }
        if not self._has("stock"):
            meta["cached_tokens_details"]["kvshare"] = report
        chunk = {"output_ids": [step[0][1] for step in part], "meta_info": meta}
        if not self._has("no tokenizer"):
            chunk["text"] = "".join(f" w{step[0][1]}" for step in part)
        return chunk

    def step(self, ids: list[int], number: int, top: int, report: dict[str, Any]) -> list[Any]:
        """The most probable tokens after ``ids`` and ``number`` more, ``[logprob, id, text]``."""
        off = 0.3 if report.get("reused_tokens") else 0.0
        token = (sum((i + 1) * each for i, each in enumerate(ids)) + 7 * number) % VOCAB
        return [
            [-0.1 - off - 2.0 * rank, (token + 3 * rank) % VOCAB, None]
            for rank in range(max(top, 1))
        ]

    def report(self, ids: list[int], salt: Any, settings: dict[str, Any]) -> dict[str, Any]:
        reuse = settings.get("reuse", self.default_reuse)
        known = self.cached[None if self._has("leaks between salts") else salt]
        matched = max((_longest_run(ids, other) for other in known), default=0)
        known.append(ids)
        counts = {"prefix_tokens": 0, "reused_tokens": 0, "recomputed_tokens": 0}
        decision, reason = "none", "no_match"
        if self._has("off takes") and reuse == "off":
            counts["prefix_tokens"] = 5
        if reuse != "approximate":
            reason = reuse
        elif self._has("gate closed"):
            reason = "gate_closed"
        elif matched >= WINDOW:
            decision, reason = "reuse", "ok"
            again = matched if settings.get("recompute_ratio") == 1 else matched // 10
            counts |= {"reused_tokens": matched - again, "recomputed_tokens": again}
        new = len(ids) - sum(counts.values()) + self._has("counts do not sum")
        return {**counts, "new_tokens": new, "donors": 1, "decision": decision, "reason": reason}


def _longest_run(a: list[int], b: list[int]) -> int:
    best, row = 0, [0] * (len(b) + 1)
    for x in a:
        row = [0] + [row[j] + 1 if x == y else 0 for j, y in enumerate(b)]
        best = max(best, *row)
    return best


def _handler(fake: FakeSGLang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: dict[str, Any]) -> None:
            if fake._has("no sglang"):
                return self.send(200, b"<html>It works!</html>")
            if fake.api_key and self.headers["Authorization"] != f"Bearer {fake.api_key}":
                return self.send_json(401, {"error": "Unauthorized"})
            if self.path == "/server_info":
                return self.send_json(200, fake.server_info())
            if self.path == "/tokenize":
                return self.send_json(*fake.tokenize(body))
            if self.path != "/generate":
                return self.send_json(404, {"detail": "Not Found"})
            if fake._has("busy"):
                return self.send_json(503, {"error": {"message": "The request queue is full."}})
            if fake._has("error in the stream"):
                return self.send(200, b'data: {"error": {"message": "out of memory"}}\n\n')
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in fake.generate(body)]
            return self.send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

        def send_json(self, status: int, content: Any) -> None:
            self.send(status, json.dumps(content).encode())

        def send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def fake_sglang(*faults: str, **options: Any) -> Iterator[FakeSGLang]:
    fake = FakeSGLang(frozenset(faults), **options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
