"""The scheduler's CPU time and the peak of the KV pool."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from serving_stub import Stub

from kvshare_eval.metering import cpu_seconds, scheduler_processes
from kvshare_eval.serving import meters
from kvshare_eval.serving.meters import KvPeak, watch_kv

pytestmark = pytest.mark.unit

#: A leader that starts a scheduler, which works for half a second, and another idle child.
LEADER = """
import subprocess, sys, time
for title, seconds in [("sglang::scheduler_TP0", 0.5), ("sglang::detokenizer", 0)]:
    work = f"import time\\nwhile time.process_time() < {seconds}: pass\\ntime.sleep(60)"
    subprocess.Popen([title, "-c", work], executable=sys.executable)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def group() -> Iterator[int]:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    leader.stdout.readline()
    yield leader.pid
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    leader.stdout.close()


def test_the_schedulers_cpu_time(group: int) -> None:
    found = scheduler_processes(group)
    deadline = time.monotonic() + 10
    while not found and time.monotonic() < deadline:  # forked, but not yet another program
        time.sleep(0.02)
        found = scheduler_processes(group)
    assert len(found) == 1
    spent = 0.0
    while spent < 0.45 and time.monotonic() < deadline:
        time.sleep(0.05)
        spent = cpu_seconds(found) or 0.0
    assert 0.45 <= spent < 2.0  # the clock ticks in hundredths
    # Nobody else's scheduler counts, and the other processes of the server do not.
    assert scheduler_processes(os.getpgrp()) == []
    assert len(scheduler_processes(group, "sglang::detokenizer")) == 1
    assert cpu_seconds([]) is None


def test_an_ended_scheduler_has_no_time() -> None:
    child = subprocess.Popen(
        ["sglang::scheduler", "-c", "import time; time.sleep(60)"],
        executable=sys.executable,
        start_new_session=True,
    )
    found = []
    while not found:
        found = scheduler_processes(child.pid)
    child.kill()
    child.wait()
    assert cpu_seconds(found) is None


def test_reading_the_gauge() -> None:
    peak = KvPeak()
    peak.see(b"# HELP sglang:num_used_tokens used\nsglang:token_usage 0.5\n")
    assert peak.tokens is None
    peak.see(b"sglang:num_used_tokens 9999.0\n")  # may be left from the window before
    peak.see(b"sglang:num_used_tokens 9999.0\n")
    assert peak.tokens == 9999
    peak.see(b'a 1\nsglang:num_used_tokens{model="m",tp_rank="0"} 1.5e+03\nb 2\n')
    peak.see(b'sglang:num_used_tokens{tp_rank="0"} 12.0\nsglang:num_used_tokens{tp_rank="1"} 9.0\n')
    assert peak.tokens == 1500
    peak.see(b"sglang:num_used_tokens 9999.0\n")
    assert peak.tokens == 9999


def test_reading_is_cheap() -> None:
    """An answer of the size that a real server gives, 100 kB, against a delay of 10 ms."""
    metrics = (
        b'sglang:something{engine="a",model="m"} 1.0\n' * 2_300 + b"sglang:num_used_tokens 7.0\n"
    )
    peak, began = KvPeak(), time.perf_counter()
    for _ in range(20):
        peak.see(metrics)
    assert (time.perf_counter() - began) / 20 < 0.005
    assert peak.tokens == 7


@pytest.mark.parametrize(("used", "enabled", "wanted"), [(70, True, 90), (None, True, None)])
def test_the_peak_while_it_watches(
    monkeypatch: pytest.MonkeyPatch, used: int | None, enabled: bool, wanted: int | None
) -> None:
    monkeypatch.setattr(meters, "POLL_SECONDS", 0.02)

    async def watch(stub: Stub) -> int | None:
        async with watch_kv(stub.url, enabled=enabled) as peak:
            await asyncio.sleep(0.15)
            if used is not None:
                stub.used_tokens = 90
            await asyncio.sleep(0.15)
            if used is not None:
                stub.used_tokens = 10
            await asyncio.sleep(0.1)
        return peak.tokens

    with Stub(used_tokens=used) as stub:
        assert asyncio.run(watch(stub)) == wanted


def test_not_watching() -> None:
    async def watch(url: str) -> int | None:
        async with watch_kv(url, enabled=False) as peak:
            await asyncio.sleep(0.1)
        return peak.tokens

    with Stub() as stub:
        assert asyncio.run(watch(stub.url)) is None
