"""The load client against a stub: it sends when requests are due, and times what it sees."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_stub import Stub

from kvshare_eval.serving.load import (
    Measured,
    Sender,
    closed_loop,
    open_loop,
    poisson_arrivals,
)
from kvshare_eval.serving.workloads import LoadRequest

pytestmark = pytest.mark.unit

#: Seconds by which an event loop on a busy machine may be late.
SLACK = 0.15


def sender(stub: Stub, timeout_s: float = 20.0, **more: object) -> Sender:
    return Sender(stub.url, "w", None, timeout_s, **more)  # type: ignore[arg-type]


def some(count: int, output_tokens: int = 1) -> list[LoadRequest]:
    return [LoadRequest((number, 2, 3), output_tokens, 0) for number in range(count)]


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_a_slow_server_does_not_hold_up_the_open_loop() -> None:
    """Six requests 40 ms apart, for a server that takes 300 ms for each, one at a time."""
    due = [0.04 * number for number in range(6)]
    with Stub(delay_s=0.3) as stub:
        got = asyncio.run(open_loop(sender(stub), some(6), due))
    arrived = [moment - stub.arrived[0] for moment in stub.arrived]
    assert max(abs(came - at) for came, at in zip(arrived, due, strict=True)) < SLACK
    for number, record in enumerate(got.records):
        assert record.due_ms == pytest.approx(due[number] * 1e3)
        assert 0 <= record.sent_ms - record.due_ms < SLACK * 1e3
        # It waits for those before it: that is part of its TTFT.
        queued = 0.3 * (number + 1) - due[number]
        assert record.ttft_ms is not None
        assert -1 < record.ttft_ms / 1e3 - queued < 3 * SLACK
    assert got.seconds == pytest.approx(6 * 0.3, abs=3 * SLACK)


def test_control_a_closed_loop_is_held_up() -> None:
    with Stub(delay_s=0.2) as stub:
        got = asyncio.run(closed_loop(sender(stub), some(3)))
    assert min(gaps(stub.arrived)) > 0.19
    # None of them waited for another, so that their TTFT shows no queue.
    for record in got.records:
        assert record.ttft_ms == pytest.approx(200, abs=SLACK * 1e3)
    assert [record.number for record in got.records] == [0, 1, 2]


def test_many_requests_are_in_flight_at_once() -> None:
    """More than aiohttp's own limit of 100 connections, all due at the same moment."""
    with Stub(delay_s=0.0) as stub:
        asyncio.run(_hold_all(stub, 150))
    assert len(stub.arrived) == 150
    assert stub.arrived[-1] - stub.arrived[0] < 2.0


async def _hold_all(stub: Stub, count: int) -> None:
    """Nobody is answered until all have arrived: a limit would never get there."""
    task = asyncio.create_task(open_loop(sender(stub), some(count), [0.0] * count))
    stub.fault = lambda body: "hang"
    deadline = time.monotonic() + 5
    while len(stub.arrived) < count and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_clients_own_lag_counts() -> None:
    """A callback blocks the client for 0.7 s while the second request is due."""
    with Stub() as stub:
        blocked = sender(stub, done=lambda: time.sleep(0.7))
        got = asyncio.run(open_loop(blocked, some(2), [0.0, 0.3]))
    late = got.records[1]
    assert late.sent_ms - late.due_ms > 150
    assert late.ttft_ms is not None
    assert late.ttft_ms > 150


def test_gaps_between_tokens_are_those_of_the_server() -> None:
    with Stub(delay_s=0.05, gaps_s=(0.1, 0.3, 0.02)) as stub:
        (record,) = asyncio.run(open_loop(sender(stub), some(1, 4), [0.0])).records
    assert record.error is None
    assert record.output_tokens == 4
    assert record.tbt_ms == pytest.approx([100, 300, 20], abs=60)
    assert record.ttft_ms is not None
    assert record.e2e_ms == pytest.approx(record.ttft_ms + sum(record.tbt_ms))


def test_tokens_of_one_piece_share_its_gap() -> None:
    with Stub(gaps_s=(0.2,), step=2) as stub:
        (record,) = asyncio.run(open_loop(sender(stub), some(1, 5), [0.0])).records
    assert len(record.tbt_ms) == 4
    assert record.tbt_ms[0] == 0.0  # came with the first token
    assert record.tbt_ms[1] == record.tbt_ms[2] == pytest.approx(100, abs=40)
    assert record.tbt_ms[3] == pytest.approx(200, abs=60)


def test_what_is_sent_and_what_comes_back() -> None:
    with Stub(kvshare=True) as stub:
        off = Sender(stub.url, "w", {"reuse": "exact_prefix"}, 5.0)
        (record,) = asyncio.run(closed_loop(off, [LoadRequest(tuple(range(40)), 3, 0)])).records
    (body,) = stub.bodies
    assert body == {
        "input_ids": list(range(40)),
        "stream": True,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": 3,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "custom_params": {"kvshare": {"reuse": "exact_prefix"}},
        },
    }
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (40, 3, 10)
    assert record.report == {"prefix_tokens": 10, "reused_tokens": 0}
    assert (record.key, record.window) == ("w/0", "w")


@pytest.mark.parametrize(
    ("fault", "message", "tokens"),
    [
        ("refuse", "HTTP 400: reuse: unknown value", 0),
        ("break", "broken off after 1 tokens", 1),
        ("error", "out of memory", 0),
        ("garbage", "broken off after 0 tokens", 0),
        ("abort", "aborted: too long", 3),
        ("unfinished", "without a finish reason", 3),
        ("hang", "no end after 0.5 s, 0 tokens came", 0),
    ],
)
def test_a_failed_request_is_a_record_among_good_ones(
    fault: str, message: str, tokens: int
) -> None:
    def second(body: dict[str, list[int]]) -> str | None:
        return fault if body["input_ids"][0] == 1 else None

    with Stub(fault=second) as stub:
        got = asyncio.run(closed_loop(sender(stub, 0.5), some(3, 3)))
    before, failed, after = got.records
    assert before.error is None
    assert after.error is None
    assert failed.error is not None
    assert message in failed.error
    assert failed.output_tokens == tokens
    assert failed.e2e_ms is None
    assert (failed.ttft_ms is None) == (tokens == 0)


def test_nobody_there() -> None:
    with Stub() as stub:
        gone = sender(stub)
    got: Measured = asyncio.run(open_loop(gone, some(2), [0.0, 0.01]))
    assert all("broken off" in (record.error or "") for record in got.records)


@given(st.floats(0.01, 100), st.integers(0, 99), st.integers(1, 50))
def test_arrivals_are_the_same_for_the_same_name(rate: float, name: int, count: int) -> None:
    times = poisson_arrivals(str(name), rate, requests=count)
    assert len(times) == count
    assert times == poisson_arrivals(str(name), rate, requests=count)
    assert times != poisson_arrivals(f"{name} other", rate, requests=count)
    # A cut in time is a cut of the same sequence.
    limit = random.Random(name).uniform(0, times[-1])
    cut = poisson_arrivals(str(name), rate, seconds=limit)
    assert cut == tuple(time for time in times if time < limit) or cut == times[:1]


def test_gaps_are_exponential() -> None:
    """Mean and standard deviation of an exponential are both 1 / rate."""
    found = gaps((0.0, *poisson_arrivals("a", 4.0, requests=20_000)))
    assert statistics.fmean(found) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(found) == pytest.approx(0.25, rel=0.03)
    assert statistics.median(found) == pytest.approx(0.25 * 0.6931, rel=0.03)
