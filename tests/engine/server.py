"""A real SGLang server on a tiny model, in its own process group, under SGLang's strict checks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from sglang_kvshare.request import REASONS

READY_SECONDS = 240
#: What must never be in a log: SGLang's own words for a leak, and anything that raised.
TROUBLE = re.compile(
    r"Traceback|Leak|leak detected|double free|use.after.free|AssertionError|"
    r"Scheduler hit an exception|could not place|could not plan|watchdog timeout",
)
#: Variables of the surrounding session that would change what is tested.
FOREIGN = ("KVSHARE", "SGLANG", "PYTHONPATH")


@dataclass(frozen=True)
class ServerConfig:
    """What distinguishes one server of the tests from another.

    Attributes:
        model: a key of ``tiny_models.MODELS``.
        flags: further arguments of ``launch_server``.
        env: further environment variables.
        kvshare: give ``--kvshare``.
        tokenizer: the model has one, and prompts may be text.
    """

    name: str
    model: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    kvshare: bool = True
    tokenizer: bool = False

    def flag(self, name: str, default: Any = None) -> Any:
        """Value of ``--name`` in ``flags``, in the type of ``default``."""
        if name not in self.flags:
            return default
        text = self.flags[self.flags.index(name) + 1]
        return text if default is None else type(default)(text)

    @property
    def page_size(self) -> int:
        return self.flag("--page-size", 1)


@dataclass(frozen=True)
class Answer:
    """One response of ``/generate``.

    Attributes:
        ids: output token ids.
        logprobs: log-probability of each output token.
        top: for each output token the most probable ones, id -> log-probability.
        input_logprobs: log-probability of each prompt token from the start asked for.
        report: ``cached_tokens_details.kvshare``; ``None`` where there is none.
        meta: the whole ``meta_info``.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()
    input_logprobs: tuple[float | None, ...] = ()
    report: dict[str, Any] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def cached(self) -> int:
        return int(self.meta["cached_tokens"])

    @property
    def counts(self) -> tuple[int, int, int, int]:
        assert self.report is not None
        names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens")
        return tuple(self.report[name] for name in names)  # type: ignore[return-value]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def command(model: Path, config: ServerConfig, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *([] if config.tokenizer else ["--skip-tokenizer-init"]),
        *("--host", "127.0.0.1", "--port", str(port)),
        # The tests compute on the same cores.
        "--sleep-on-idle",
        *(["--kvshare"] if config.kvshare else []),
        *config.flags,
    ]


def environment(config: ServerConfig) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    return env | {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        "HF_HUB_OFFLINE": "1",
        **dict(config.env),
    }


class Server:
    """Started on construction; ready when the constructor returns.

    Raises:
        RuntimeError: the process ended or did not get ready; the message ends with its log.
    """

    def __init__(self, config: ServerConfig, model: Path, log: Path) -> None:
        self.config = config
        self.model = model
        self.log_path = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        began = time.monotonic()
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command(model, config, self.port),
                env=environment(config),
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        self._seen = 0

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}\n{self.tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.25)
        raise RuntimeError(f"server was not ready in {READY_SECONDS} s\n{self.tail()}")

    def stop(self) -> None:
        """End the process group that this object started, and nothing else.

        At once: on a polite signal SGLang takes several seconds for a post-mortem.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    # --- log --------------------------------------------------------------------------------

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def assert_healthy(self) -> None:
        """Alive, idle, and nothing in the log (since the last call) that must not be.

        A flush is granted to an idle scheduler only; idle, SGLang checks its pools.
        """
        if self.process.poll() is None:
            self.flush()
        assert self.process.poll() is None, f"server died\n{self.tail()}"
        text = self.log()
        new, self._seen = text[self._seen :], len(text)
        found = TROUBLE.search(new)
        assert found is None, (
            f"{found[0]!r} in the log:\n{new[max(0, found.start() - 3000) :][:8000]}"
        )

    # --- requests ---------------------------------------------------------------------------

    def post(
        self,
        path: str,
        body: Any,
        timeout: float = 180,
        headers: Mapping[str, str] | None = None,
    ) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout, headers=headers)

    def generate(
        self,
        ids: Sequence[int],
        n_new: int = 16,
        *,
        logprobs: bool = True,
        top: int = 20,
        logprob_start_len: int | None = None,
        fields: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        **kvshare: Any,
    ) -> Answer:
        """One greedy completion of ``ids``.

        Args:
            logprob_start_len: ask for log-probabilities of the prompt from there on.
            fields: further fields of the request (``cache_salt``, ``rid``, ...).
            params: further sampling parameters.
            headers: of the HTTP request.
            kvshare: settings of the request (``reuse``, ``recompute_ratio``, ...).
        """
        body = request_body(
            ids,
            n_new,
            logprobs=logprobs,
            top=top,
            logprob_start_len=logprob_start_len,
            params=params,
            kvshare=kvshare,
        )
        response = self.post("/generate", body | dict(fields or {}), headers=headers)
        assert response.status_code == 200, (
            f"{response.status_code}: {response.text}\n{self.tail()}"
        )
        answer = to_answer(response.json())
        if self.config.kvshare:
            check_counts(answer, len(ids))
        return answer

    def concurrently(self, calls: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """``generate(**call)`` for every call, all at once; answers in order."""
        with ThreadPoolExecutor(max(1, len(calls))) as pool:
            return list(pool.map(lambda call: self.generate(**call), calls))

    def abort(self, rid: str) -> None:
        self.post("/abort_request", {"rid": rid})

    def flush(self) -> None:
        """Empty the cache; SGLang refuses while a request is in flight, so wait for idleness."""
        deadline = time.monotonic() + 60
        while True:
            admin = self.config.flag("--admin-api-key")
            headers = {"Authorization": f"Bearer {admin}"} if admin else None
            response = self.post("/flush_cache", {}, headers=headers)
            if response.status_code == 200:
                return
            assert time.monotonic() < deadline, f"flush refused: {response.text}\n{self.tail()}"
            time.sleep(0.1)


def check_counts(answer: Answer, prompt_tokens: int) -> None:
    """What holds for every response of every server with ``--kvshare``."""
    report = answer.report
    assert report is not None
    assert sum(answer.counts) == prompt_tokens == answer.meta["prompt_tokens"], report
    assert min(answer.counts) >= 0, report
    # The last token is never matched, and never part of a prefix: its logits are asked for.
    assert report["new_tokens"] >= 1, report
    assert 0 <= report["refreshed_tokens"] <= report["reused_tokens"], report
    # Of the probe pass at most so many rows run twice as a test asks for.
    fewest = report["new_tokens"]
    assert fewest <= report["computed_rows"] <= prompt_tokens + 64, report
    assert report["prefix_tokens"] == answer.cached, (report, answer.cached)
    assert answer.meta["cached_tokens_details"]["device"] == answer.cached, answer.meta
    assert report["decision"] in ("reuse", "none"), report
    assert (report["decision"] == "reuse") or not any(answer.counts[1:2]), report
    given = {reason.name: reason.decisions for reason in REASONS}
    assert report["decision"] in given[report["reason"]], report


def request_body(
    ids: Sequence[int],
    n_new: int,
    *,
    logprobs: bool = True,
    top: int = 20,
    logprob_start_len: int | None = None,
    params: Mapping[str, Any] | None = None,
    kvshare: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": n_new, "ignore_eos": True}
    if kvshare:
        sampling["custom_params"] = {"kvshare": dict(kvshare)}
    body: dict[str, Any] = {
        "input_ids": [int(token) for token in ids],
        "sampling_params": sampling | dict(params or {}),
    }
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": top}
    if logprob_start_len is not None:
        body["logprob_start_len"] = logprob_start_len
    return body


def to_answer(data: Mapping[str, Any]) -> Answer:
    meta = data["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        ids=tuple(data["output_ids"]),
        logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
        top=tuple(
            {entry[1]: entry[0] for entry in step} for step in meta.get("output_top_logprobs") or ()
        ),
        input_logprobs=tuple(entry[0] for entry in meta.get("input_token_logprobs") or ()),
        report=details.get("kvshare"),
        meta=meta,
    )


def refused_start(
    model: Path, config: ServerConfig, log: Path, seconds: float = READY_SECONDS
) -> str:
    """Start a server that must not start and ends in order; returns what it printed."""
    with log.open("w") as sink:
        process = subprocess.Popen(
            command(model, config, free_port()),
            env=environment(config),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    text = log.read_text(errors="replace")
    assert code == 1, text
    return text
