"""A tap on the line between one of SGLang's kits and a server.

The kits know nothing of KVShare: they send plain requests and read SGLang's own counters. The tap
passes everything on as it is, except for what it is told to: it can ask for a reuse mode in the
name of the kit, and can count what KVShare found in the cache as cached. It keeps every answer, so
that a test can say more than the kit asserts.

    kit  --->  Tap  --->  server
               |  adds custom_params.kvshare to /generate
    kit  <---  |  <---  server
               keeps the answer; adds reused and recomputed tokens to cached_tokens
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 300.0
#: Headers that belong to one connection, or that a changed body makes wrong.
_OWN_HEADERS = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})


class Tap:
    """Entering opens a local port; :attr:`url` is what a kit gets as its ``base_url``.

    Args:
        url: the server.
        settings: ``custom_params.kvshare`` of every generation request; ``None`` leaves them alone.
        count_found: report as ``cached_tokens`` all prompt tokens that were found in the cache, at
            any offset and on any provenance, not the exact prefix alone.

    Attributes:
        answers: the final answers of ``/generate`` in the order in which they ended, as the server
            gave them; those of a batch in the order of the batch.
    """

    def __init__(
        self, url: str, *, settings: Mapping[str, Any] | None = None, count_found: bool = False
    ) -> None:
        self.target = urlsplit(url)
        self.settings = settings
        self.count_found = count_found
        self.answers: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        tap = self

        class Handler(_Handler):
            owner = tap

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    # --- on the way there ---------------------------------------------------------------------

    def request(self, body: bytes) -> bytes:
        """The body of a ``/generate``, asking for the mode."""
        if self.settings is None:
            return body
        data = json.loads(body)
        params = data.setdefault("sampling_params", {})
        for one in params if isinstance(params, list) else [params]:
            one["custom_params"] = {"kvshare": dict(self.settings)}
        return json.dumps(data).encode()

    # --- on the way back ----------------------------------------------------------------------

    def answer(self, text: bytes, *, final: bool) -> tuple[bytes, list[dict[str, Any]]]:
        """One JSON answer of ``/generate`` as the kit is to see it, and what it holds.

        Args:
            final: keep it; a stream's last chunk is kept by :meth:`keep` when it has ended.
        """
        data = json.loads(text)
        parts = data if isinstance(data, list) else [data]
        if any("meta_info" not in part for part in parts):
            return text, []
        if final:
            self.keep(parts)
        if not self.count_found:
            return text, parts
        seen = [part | {"meta_info": _found_as_cached(part["meta_info"])} for part in parts]
        return json.dumps(seen if isinstance(data, list) else seen[0]).encode(), parts

    def keep(self, parts: list[dict[str, Any]]) -> None:
        with self._lock:
            self.answers.extend(parts)


def _found_as_cached(meta: Mapping[str, Any]) -> dict[str, Any]:
    report = (meta.get("cached_tokens_details") or {}).get("kvshare") or {}
    found = report.get("reused_tokens", 0) + report.get("recomputed_tokens", 0)
    return {**meta, "cached_tokens": meta["cached_tokens"] + found}


class _Handler(BaseHTTPRequestHandler):
    """One request passed on; the connection ends with the answer, which needs no length then."""

    owner: Tap

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._pass_on(self.owner.request(body) if self._generates else body)

    @property
    def _generates(self) -> bool:
        return urlsplit(self.path).path == "/generate"

    def _pass_on(self, body: bytes | None) -> None:
        target = self.owner.target
        connection = http.client.HTTPConnection(
            target.hostname, target.port, timeout=TIMEOUT_SECONDS
        )
        with contextlib.closing(connection):
            headers = {"Content-Type": self.headers.get("Content-Type") or "application/json"}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _OWN_HEADERS:
                    self.send_header(name, value)
            self.end_headers()
            ok = self._generates and response.status == 200
            if ok and "event-stream" in (response.getheader("Content-Type") or ""):
                self._stream(response)
            else:
                text = response.read()
                self.wfile.write(self.owner.answer(text, final=True)[0] if ok else text)

    def _stream(self, response: http.client.HTTPResponse) -> None:
        last: list[dict[str, Any]] = []
        for line in response:
            head, mark, text = line.partition(b"data: ")
            if mark and text.strip() != b"[DONE]":
                text, parts = self.owner.answer(text, final=False)
                last = parts or last
                line = head + mark + text.rstrip(b"\n") + b"\n"
            self.wfile.write(line)
        self.owner.keep(last)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the server has a log of its own."""
