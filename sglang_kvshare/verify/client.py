"""SGLang's HTTP API, as far as ``kvshare verify`` needs it; no package is needed for it."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_kvshare.request import PARAMS_KEY

TIMEOUT_SECONDS = 120.0
ANSWER_TOKENS = 16
TOP_LOGPROBS = 5


class VerifyError(RuntimeError):
    """Why nothing could be verified, in one plain sentence."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Attributes:
        ids: output token ids.
        top: for each of them, log-probability by token id: the most probable ones and itself.
        text: ``None`` from a server without a tokenizer.
        report: KVShare's counts; ``None`` from stock SGLang.
        ttft_ms: from sending the request to the first streamed token, by this client's clock.
    """

    ids: tuple[int, ...]
    top: tuple[Mapping[int, float], ...]
    text: str | None
    report: Mapping[str, Any] | None
    ttft_ms: float

    def count(self, source: str) -> int:
        return int((self.report or {}).get(f"{source}_tokens", 0))

    @property
    def reason(self) -> str:
        return str((self.report or {}).get("reason"))


class Client:
    """SGLang's HTTP API, as far as it is needed here.

    Raises:
        VerifyError: from every method, when the server cannot be asked or refuses.
    """

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def get(self, path: str) -> Any:
        return self._json(path, self._lines(path, None))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json(path, self._lines(path, body))

    def generate(self, body: Mapping[str, Any]) -> Answer:
        """Stream ``/generate``."""
        sent = time.perf_counter()
        ttft_ms: float | None = None
        chunks: list[Mapping[str, Any]] = []
        for line in self._lines("/generate", {**body, "stream": True}):
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            chunk = self._json("/generate", [line.removeprefix(b"data:")])
            if "error" in chunk:
                raise VerifyError(f"{self.url} failed to generate: {_message(chunk)}")
            finish = chunk["meta_info"].get("finish_reason") or {}
            if finish.get("type") == "abort":
                raise VerifyError(
                    f"{self.url} gave up the request (is it too busy?): {finish.get('message')}"
                )
            if ttft_ms is None and chunk["meta_info"]["completion_tokens"] > 0:
                ttft_ms = (time.perf_counter() - sent) * 1e3
            chunks.append(chunk)
        if ttft_ms is None:
            raise VerifyError(f"{self.url} ended an answer without a token")
        return _answer(chunks, ttft_ms)

    def _lines(self, path: str, body: Mapping[str, Any] | None) -> Iterator[bytes]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                yield from response
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from None
        except TimeoutError:
            raise self._silent() from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._silent() from None
            raise VerifyError(f"no server answers at {self.url}: {_why(error.reason)}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise VerifyError(f"no SGLang server at {self.url}: {_why(error)}") from None

    def _silent(self) -> VerifyError:
        return VerifyError(
            f"{self.url} did not answer within {self._timeout:g} s: it is busy or hangs; "
            "try again later, or with a longer --timeout"
        )

    def _refused(self, path: str, error: urllib.error.HTTPError) -> VerifyError:
        said = _message(_parsed(error.read()))
        if error.code in (401, 403):
            # SGLang's own two words for these statuses say nothing more.
            known = said in ("", "Unauthorized", "Forbidden")
            hint = "--api-key KEY" if known else said
            return VerifyError(f"{self.url} asks for another key than it was given: {hint}")
        if error.code in (404, 405):
            return VerifyError(f"no SGLang server at {self.url}: it has no {path}")
        if error.code in (429, 503):
            return VerifyError(f"{self.url} is busy ({error.code}): {said or 'try again later'}")
        return VerifyError(f"{self.url}{path} answered {error.code}: {said or error.reason}")

    def _json(self, path: str, lines: Iterable[bytes]) -> Any:
        content = _parsed(b"".join(lines))
        if content is None:
            raise VerifyError(f"no SGLang server at {self.url}: {path} is not answered with JSON")
        return content


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _message(content: Any) -> str:
    """The message of one of SGLang's shapes of an error."""
    if isinstance(content, Mapping):
        return _message(content.get("error", content.get("message", content.get("detail"))))
    return "" if content is None else str(content)


def _why(error: object) -> str:
    if isinstance(error, socket.gaierror):
        return "the host name is unknown"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _answer(chunks: Sequence[Mapping[str, Any]], ttft_ms: float) -> Answer:
    last = chunks[-1]
    if len(last["output_ids"]) != last["meta_info"]["completion_tokens"]:
        # --incremental-streaming-output: each chunk holds its own part.
        parts = chunks
    else:
        parts = chunks[-1:]
    texts = [part["text"] for part in parts if part.get("text") is not None]

    def joined(name: str) -> list[Any]:
        return [each for part in parts for each in part["meta_info"].get(name) or ()]

    pairs = zip(joined("output_top_logprobs"), joined("output_token_logprobs"), strict=True)
    details = last["meta_info"].get("cached_tokens_details") or {}
    return Answer(
        ids=tuple(token for part in parts for token in part["output_ids"]),
        top=tuple(
            {each[1]: each[0] for each in (*step, own) if each[0] is not None}
            for step, own in pairs
        ),
        text="".join(texts) if texts else None,
        report=details.get(PARAMS_KEY),
        ttft_ms=ttft_ms,
    )


def request_body(
    ids: Sequence[int],
    *,
    salt: str | None = None,
    settings: Mapping[str, Any] | None = None,
    top: int = TOP_LOGPROBS,
    answer_tokens: int = ANSWER_TOKENS,
) -> dict[str, Any]:
    """The body of one greedy ``/generate`` with log-probabilities.

    Args:
        ids: the prompt.
        salt: the trust domain (``cache_salt``).
        settings: ``custom_params.kvshare``; ``None`` leaves it to the server's default.
        top: how many of the most probable tokens of each step are told.
    """
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": answer_tokens,
        "ignore_eos": True,
    }
    if settings is not None:
        sampling["custom_params"] = {PARAMS_KEY: dict(settings)}
    return {
        "input_ids": list(ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": top,
        "cache_salt": salt,
    }
