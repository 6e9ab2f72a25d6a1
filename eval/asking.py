"""SGLang's native API for measuring: greedy answers, and log-probabilities of a given answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from kvshare_eval.errors import EvalError

#: Logarithms of probabilities by token id, of one position.
Logprobs = dict[int, float]


@dataclass(frozen=True)
class Answered:
    """A greedy answer.

    Attributes:
        ids: its tokens, the one that ended it included.
        text: as the server decoded it.
        top: the most likely tokens at each position; empty when they were not asked for.
        report: KVShare's counts; empty from a stock server.
        prompt_tokens: as the server counted them.
        e2e_ms: by this client's clock.
    """

    ids: tuple[int, ...]
    text: str
    top: tuple[Logprobs, ...]
    report: Mapping[str, Any]
    prompt_tokens: int
    e2e_ms: float


@dataclass(frozen=True)
class Scored:
    """What a server thinks of an answer that it is given.

    Attributes:
        wanted: log-probabilities of the tokens asked for, at each position of the answer.
        best: the most likely token at each position.
        report: KVShare's counts of the prompt; the answer's tokens are taken off.
        e2e_ms: by this client's clock.
    """

    wanted: tuple[Logprobs, ...]
    best: tuple[int, ...]
    report: Mapping[str, Any]
    e2e_ms: float


class Asker:
    """Asks one server; at most ``concurrency`` requests at a time. An async context manager.

    Raises:
        EvalError: from every method, when the server cannot be reached or refuses.
    """

    def __init__(
        self, url: str, *, concurrency: int = 16, api_key: str | None = None, timeout_s: float = 900
    ) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A connection is not kept: the server may have closed it by the time it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def info(self) -> dict[str, Any]:
        """SGLang's resolved settings and version."""
        return dict(await self._json("GET", "/server_info"))

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        salt: str | None = None,
        settings: Mapping[str, Any] | None = None,
        top: int = 0,
        stop: Sequence[str] = (),
    ) -> Answered:
        """One greedy answer.

        Args:
            ids: the prompt.
            max_new_tokens: the longest answer.
            salt: the namespace (``cache_salt``).
            settings: ``custom_params.kvshare``.
            top: how many of the most likely tokens of each position are told.
            stop: texts that end the answer.
        """
        body = _body(ids, max_new_tokens, salt, settings)
        if stop:
            body["sampling_params"]["stop"] = list(stop)
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top}
        data, e2e_ms = await self._timed(body)
        meta = data["meta_info"]
        return Answered(
            ids=tuple(data["output_ids"]),
            text=data["text"],
            top=tuple(_by_token(step) for step in meta.get("output_top_logprobs") or ()),
            report=_report(meta),
            prompt_tokens=int(meta["prompt_tokens"]),
            e2e_ms=e2e_ms,
        )

    async def score(
        self,
        ids: Sequence[int],
        answer: Sequence[int],
        wanted: Sequence[int],
        *,
        salt: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Scored:
        """Teacher forcing: the distribution at every token of an answer that is given.

            input     |-------- ids --------|- answer without its last token -|
            position                      s = len(ids) - 1
            logits                        ^ of answer[0]     ...              ^ of answer[-1]

        The input's log-probabilities from ``s`` on give all but the last; that one is the next
        token's. With ``approximate_logprobs`` the prompt is reused as if the answer were not there.

        Args:
            ids: the prompt.
            answer: the tokens to judge, at least one.
            wanted: tokens whose log-probabilities are told at every position.
            salt, settings: see :meth:`generate`.
        """
        if not answer:
            raise ValueError("an answer without tokens cannot be scored")
        body = _body([*ids, *answer[:-1]], 1, salt, {**(settings or {}), _LOGPROBS: True})
        body |= {
            "return_logprob": True,
            "logprob_start_len": len(ids) - 1,
            "top_logprobs_num": 1,
            "token_ids_logprob": list(wanted),
        }
        data, e2e_ms = await self._timed(body)
        meta = data["meta_info"]
        # The first entry is that of the prompt's last token, which nothing precedes here.
        told = [*meta["input_token_ids_logprobs"][1:], meta["output_token_ids_logprobs"][0]]
        best = [*meta["input_top_logprobs"][1:], meta["output_top_logprobs"][0]]
        if len(told) != len(answer) or len(best) != len(answer):
            raise EvalError(f"{self.url} scored {len(told)} of {len(answer)} tokens")
        return Scored(
            wanted=tuple(_by_token(step) for step in told),
            best=tuple(int(step[0][1]) for step in best),
            report=_without_answer(_report(meta), len(answer) - 1),
            e2e_ms=e2e_ms,
        )

    async def _timed(self, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        async with self._slots:
            began = time.perf_counter()
            data = await self._json("POST", "/generate", body)
            e2e_ms = (time.perf_counter() - began) * 1e3
        finish = data["meta_info"].get("finish_reason") or {}
        if finish.get("type") == "abort":
            raise EvalError(f"{self.url} gave up a request: {finish.get('message')}")
        return data, e2e_ms

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        if self._session is None:
            raise RuntimeError("the asker is not open")
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                if response.status != 200:
                    said = " ".join((await response.text()).split())
                    raise EvalError(f"{self.url}{path} answered {response.status}: {said[:500]}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise EvalError(f"no answer from {self.url}{path}: {why}") from None
        except ValueError:
            raise EvalError(f"{self.url}{path} answered no JSON: is it SGLang's server?") from None


_LOGPROBS = "approximate_logprobs"


def _body(
    ids: Sequence[int],
    max_new_tokens: int,
    salt: str | None,
    settings: Mapping[str, Any] | None,
) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    if settings is not None:
        sampling["custom_params"] = {"kvshare": dict(settings)}
    body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampling}
    if salt is not None:
        body["cache_salt"] = salt
    return body


def _by_token(step: Sequence[Sequence[Any]]) -> Logprobs:
    """SGLang tells ``[logprob, token id, text]``; JSON has no NaN, which comes as ``null``."""
    if any(entry[0] is None for entry in step):
        raise EvalError("the server told a log-probability that is no number: its model gives NaN")
    return {int(entry[1]): float(entry[0]) for entry in step}


def _without_answer(report: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """Tokens whose logits are asked for are never reused: the server counts them as new."""
    if not report:
        return report
    less = {
        name: report[name] - tokens for name in ("new_tokens", "computed_rows") if name in report
    }
    return {**report, **less}


def _report(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict((meta.get("cached_tokens_details") or {}).get("kvshare") or {})
