"""The client that measures, against a toy model that the tests work out themselves."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quality_stub import END, PIECES, Toy, ToyServer

from kvshare_eval.asking import Asker
from kvshare_eval.errors import EvalError

pytestmark = pytest.mark.unit

T = TypeVar("T")
APPROXIMATE = {"reuse": "approximate", "recompute_ratio": 0, "publish": False}
OFF = {"reuse": "off", "publish": False}


@pytest.fixture
def server() -> Iterator[ToyServer]:
    with ToyServer() as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[ToyServer]:
    with ToyServer() as running:
        yield running


def ask(url: str, what: Callable[[Asker], Awaitable[T]], **how: Any) -> T:
    async def run() -> T:
        async with Asker(url, **how) as asker:
            return await what(asker)

    return asyncio.run(run())


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, 500), min_size=1, max_size=12),
    answer=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=6),
    wanted=st.sets(st.integers(0, len(PIECES) - 1), min_size=1),
    ratio=st.sampled_from([0, 0.25, 1]),
)
def test_an_answer_is_scored_position_by_position(
    shared: ToyServer, seed: int, prompt: list[int], answer: list[int], wanted: set[int], ratio: int
) -> None:
    shared.toy = Toy(seed)
    shared.published = {"s": [[9999, *prompt]]}  # not as a prefix
    kvshare = {**APPROXIMATE, "recompute_ratio": ratio}
    scored = ask(
        shared.url,
        lambda asker: asker.score(prompt, answer, sorted(wanted), salt="s", settings=kvshare),
    )
    # Something is taken from the cache only if there is something before the last token.
    disturbed = 1.0 - ratio if scored.report["reused_tokens"] else 0.0
    assert (scored.report["recomputed_tokens"] + scored.report["reused_tokens"] > 0) == (
        len(prompt) > 1
    )
    told = [shared.toy.logprobs([*prompt, *answer[:i]], disturbed) for i in range(len(answer))]
    assert scored.wanted == tuple({token: step[token] for token in wanted} for step in told)
    assert scored.best == tuple(step.index(max(step)) for step in told)
    counts = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens")
    assert sum(scored.report[count] for count in counts) == len(prompt)
    sent = shared.bodies[-1]
    assert sent["sampling_params"]["custom_params"]["kvshare"] == {
        **kvshare,
        "approximate_logprobs": True,
    }


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    longest=st.integers(1, 9),
    stop=st.sampled_from([(), ("\n",), (" the", " 7")]),
    top=st.integers(0, 5),
)
def test_a_greedy_answer(
    shared: ToyServer, seed: int, longest: int, stop: tuple[str, ...], top: int
) -> None:
    shared.toy = toy = Toy(seed)
    answered = ask(
        shared.url,
        lambda asker: asker.generate(
            [5, 6, 7], max_new_tokens=longest, settings=OFF, top=top, stop=stop
        ),
    )
    ids, text = toy.greedy([5, 6, 7], longest, stop)
    assert (list(answered.ids), answered.text, answered.prompt_tokens) == (ids, text, 3)
    assert len(answered.top) == (len(ids) if top else 0)
    for index, step in enumerate(answered.top):
        told = toy.logprobs([5, 6, 7, *ids[:index]])
        best = sorted(range(len(told)), key=lambda token: -told[token])[:top]
        assert step == {token: told[token] for token in best}


def test_an_answer_that_ends_at_once(server: ToyServer) -> None:
    server.toy = Toy(end=100)
    answered = ask(server.url, lambda asker: asker.generate([1, 2], max_new_tokens=5, top=2))
    assert (answered.ids, answered.text, len(answered.top)) == ((END,), "", 1)
    scored = ask(server.url, lambda asker: asker.score([1, 2], [END], [END, 1]))
    assert scored.best == (END,)
    with pytest.raises(ValueError, match="without tokens"):
        ask(server.url, lambda asker: asker.score([1, 2], [], [END]))


@pytest.mark.parametrize("publish", [True, False])
def test_a_salt_finds_what_was_published_in_it(server: ToyServer, publish: bool) -> None:
    async def reused(asker: Asker) -> list[int]:
        history = {**APPROXIMATE, "publish": publish}
        await asker.generate(range(100, 120), max_new_tokens=1, salt="a", settings=history)
        found = [
            await asker.generate([1, 110, 2], max_new_tokens=1, salt=salt, settings=APPROXIMATE)
            for salt in ("a", "b", None)
        ]
        return [each.report["reused_tokens"] for each in found]

    assert ask(server.url, reused) == [int(publish), 0, 0]


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_at_once_than_allowed(server: ToyServer, limit: int) -> None:
    server.delay_s = 0.03

    async def many(asker: Asker) -> None:
        await asyncio.gather(*(asker.generate([i, 1], max_new_tokens=1) for i in range(6)))

    began = time.perf_counter()
    ask(server.url, many, concurrency=limit)
    assert server.most_in_flight == limit
    assert time.perf_counter() - began >= 6 / limit * server.delay_s


def test_time_counts_from_sending_and_not_from_waiting(server: ToyServer) -> None:
    server.delay_s = 0.1

    async def many(asker: Asker) -> list[float]:
        done = await asyncio.gather(*(asker.generate([1], max_new_tokens=1) for _ in range(3)))
        return [each.e2e_ms for each in done]

    assert all(100 <= each < 200 for each in ask(server.url, many, concurrency=1))


def test_the_key_and_an_address_without_a_scheme(server: ToyServer) -> None:
    address = server.url.removeprefix("http://")
    ask(address, lambda asker: asker.generate([1], max_new_tokens=1), api_key="k")
    assert server.headers["Authorization"] == "Bearer k"
    assert ask(address, lambda asker: asker.info()) == server.server_info


def _aborted() -> str:
    reason = {"type": "abort", "message": "out of memory"}
    return json.dumps({"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}})


def _nan() -> str:
    meta = {"prompt_tokens": 1, "output_top_logprobs": [[[None, 3, None]]]}
    return json.dumps({"text": "x", "output_ids": [3], "meta_info": meta})


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (web.Response(text="the input is too long", status=400), "400: the input is too long"),
        (web.Response(text="<html>"), "answered no JSON"),
        (web.Response(text=_aborted()), "gave up a request: out of memory"),
        (web.Response(text=_nan()), "gives NaN"),
    ],
)
def test_what_a_server_cannot_do_is_one_sentence(
    server: ToyServer, reply: web.Response, message: str
) -> None:
    server.reply = reply
    with pytest.raises(EvalError, match=message) as caught:
        ask(server.url, lambda asker: asker.generate([1], max_new_tokens=1, top=1))
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_or_does_not_answer(server: ToyServer) -> None:
    with pytest.raises(EvalError, match=r"no answer from http://127.0.0.1:9/server_info: "):
        ask("127.0.0.1:9", lambda asker: asker.info())
    server.delay_s = 5
    with pytest.raises(EvalError, match=r"no answer from .*: .+"):
        ask(server.url, lambda asker: asker.generate([1], max_new_tokens=1), timeout_s=0.1)
    server.lives = 0
    with pytest.raises(EvalError, match=r"no answer from .*: .+"):
        ask(server.url, lambda asker: asker.generate([1], max_new_tokens=1))
