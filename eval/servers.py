"""An SGLang server for as long as a ``with`` block lasts, and a client that times its first token.

with Server(model, log=Path("server.log")) as server:
    answer = server.generate(input_ids, max_new_tokens=12)
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

#: ``kvshare``: SGLang with ``--kvshare``. ``stock``: the same SGLang, our plug-in not loaded.
Mode = Literal["kvshare", "stock"]

READY_SECONDS = 300.0
STOP_SECONDS = 20.0
REQUEST_SECONDS = 300.0
_POLL_SECONDS = 0.5
_TAIL_LINES = 25


class ServerError(RuntimeError):
    """A server that did not start, died, or refused a request; the message says what to look at."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        text: the generated text.
        ttft: seconds from sending the request to the first streamed token, by this client's clock:
            tokenising, queueing, matching and copying included.
        meta: SGLang's ``meta_info`` of the last chunk.
    """

    text: str
    ttft: float
    meta: Mapping[str, Any]

    @property
    def prompt_tokens(self) -> int:
        return int(self.meta["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that SGLang counts as served from its cache."""
        return int(self.meta["cached_tokens"])

    @property
    def report(self) -> Mapping[str, Any] | None:
        """KVShare's counts; ``None`` from a stock server."""
        details: Mapping[str, Any] = self.meta.get("cached_tokens_details") or {}
        report: Mapping[str, Any] | None = details.get("kvshare")
        return report


class Server:
    """``python -m sglang.launch_server`` on a free local port, in a process group of its own.

    Entering starts it and waits until it serves; leaving stops the whole group, whatever ended the
    block. Should this process be killed outright, the kernel ends the server; so it does when the
    thread that entered ends, which must therefore outlive the block.

    Args:
        model: what ``--model-path`` gets.
        mode: with KVShare, or stock SGLang on the same platform with the same flags.
        args: further arguments of ``launch_server``.
        log: file for the server's output, replaced at each start.
        env: further environment variables.
        ready_seconds: how long the start may take.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        log: Path,
        mode: Mode = "kvshare",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self.model = str(model)
        self.mode = mode
        self.args = tuple(args)
        self.log = log
        self.env = dict(env or {})
        self.ready_seconds = ready_seconds
        self.host = "127.0.0.1"
        self.port = 0
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        """The command line; the port is known once the server is being started."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model]
        command += ["--host", self.host, "--port", str(self.port)]
        if self.mode == "kvshare":
            command.append("--kvshare")
        return [*command, *self.args]

    def environment(self) -> dict[str, str]:
        """This process's environment, fitted to the mode."""
        env = dict(os.environ)
        if self.mode == "stock":
            env = {key: value for key, value in env.items() if not key.startswith("KVSHARE")}
            # On a machine without an accelerator stock SGLang does not start at all. So it may load
            # our CPU platform (entry point `kvshare_cpu`, which KVSHARE=1 asks for and which steps
            # aside for an accelerator), but not the plug-in that is KVShare (`kvshare`).
            env |= {"SGLANG_PLUGINS": "kvshare_cpu", "KVSHARE": "1"}
        return env | self.env

    def __enter__(self) -> Self:
        self.port = _free_port()
        began = time.monotonic()
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            self._wait_until_ready(began + self.ready_seconds)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and every process that it started; does nothing the second time."""
        process, self._process = self._process, None
        if process is None:
            return
        # The group's id stays taken until the last member is gone and the leader is waited for.
        _signal_group(process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            _wait_for_group(process.pid, STOP_SECONDS)

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while True:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"the server ended with code {code} while starting{self.tail()}")
            if time.monotonic() > deadline:
                waited = f"{self.ready_seconds:.0f} s"
                raise ServerError(f"the server was not ready after {waited}{self.tail()}")
            # Refused, reset or silent: it is still starting.
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health", timeout=5.0)[0] == 200:
                    return
            time.sleep(_POLL_SECONDS)

    def tail(self) -> str:
        """The end of the log, ready to follow a message."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return f"; the end of {self.log}:\n" + "\n".join(lines[-_TAIL_LINES:])

    def info(self) -> dict[str, Any]:
        """SGLang's resolved settings and version."""
        return dict(json.loads(self._checked("GET", "/server_info")))

    def flush_cache(self) -> None:
        """Empty the cache. Waits for a request that is just ending."""
        self._checked("POST", "/flush_cache?timeout=10")

    def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        kvshare: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Stream one answer at temperature 0 and time its first token.

        Args:
            input_ids: the prompt's tokens.
            max_new_tokens: the longest answer.
            kvshare: settings of this request, e.g. ``{"reuse": "off"}``.
            sampling_params: further native sampling parameters.

        Raises:
            ServerError: the server refused, or the stream ended without a token.
        """
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **(sampling_params or {})}
        if kvshare is not None:
            sampling["custom_params"] = {"kvshare": dict(kvshare)}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_SECONDS)
        try:
            with contextlib.closing(connection):
                ttft, last = self._stream(connection, json.dumps(body))
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"/generate broke off: {error!r}{self.tail()}") from error
        if ttft is None or last is None:
            raise ServerError(f"/generate ended without a token{self.tail()}")
        return Answer(text=last["text"], ttft=ttft, meta=last["meta_info"])

    def _stream(
        self, connection: http.client.HTTPConnection, body: str
    ) -> tuple[float | None, dict[str, Any] | None]:
        """Seconds to the first chunk with a token, and the last chunk, which holds it all."""
        ttft: float | None = None
        last: dict[str, Any] | None = None
        sent = time.perf_counter()
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise self._refusal("/generate", response.status, response.read())
        for line in response:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix(b"data:"))
            if "error" in chunk:
                raise ServerError(f"/generate failed: {chunk['error']}")
            if ttft is None and chunk["meta_info"]["completion_tokens"] > 0:
                ttft = time.perf_counter() - sent
            last = chunk
        return ttft, last

    def _checked(self, method: str, path: str) -> bytes:
        status, body = self._request(method, path, timeout=REQUEST_SECONDS)
        if status != 200:
            raise self._refusal(path, status, body)
        return body

    def _request(self, method: str, path: str, *, timeout: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()

    @staticmethod
    def _refusal(path: str, status: int, body: bytes) -> ServerError:
        return ServerError(f"{path} answered {status}: {body.decode(errors='replace').strip()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


#: Loaded before any fork: a child between fork and exec must do as little as it can.
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: have the kernel send SIGTERM when this process's parent dies (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _wait_for_group(group: int, seconds: float) -> None:
    """Wait until no process of the group is left; SIGKILL has been sent to all of them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
