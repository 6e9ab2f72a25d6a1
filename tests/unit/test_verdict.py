"""How a refusal gets from a scheduler process to its launcher, and what each then does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine import verdict
from sglang_kvshare.engine.activation import active_config
from sglang_kvshare.engine.support import Unsupported

pytestmark = pytest.mark.unit
REASON = "--kvshare does not know the KV pool OtherPool"


@pytest.fixture
def launch(monkeypatch):
    """A launcher that has accepted a start; returns a function that does so."""
    before = os.environ.get("KVSHARE_VERDICT")
    monkeypatch.setenv("KVSHARE_RESOLVED", KVShareConfig().to_json())
    monkeypatch.setenv("KVSHARE_VERDICT", "")

    def accept(*, ends_process=True, optional=False):
        monkeypatch.setenv("KVSHARE_RESOLVED", KVShareConfig(optional=optional).to_json())
        verdict.expect(ends_process=ends_process)

    yield accept
    verdict.take()
    assert before == os.environ.get("KVSHARE_VERDICT") or before is None


@pytest.fixture
def sigquit():
    """SGLang's handler of the launch, which would end this process; returns what it got."""
    received = []
    before = signal.signal(signal.SIGQUIT, lambda number, frame: received.append(number))
    handler = signal.getsignal(signal.SIGQUIT)
    yield received
    assert signal.getsignal(signal.SIGQUIT) is handler, "the handler was not put back"
    signal.signal(signal.SIGQUIT, before)


def test_a_sentence_is_taken_once(launch):
    launch()
    assert verdict.take() is None
    verdict.refuse(REASON)
    assert verdict.take() == REASON
    assert verdict.take() is None


def test_each_launch_has_its_own(launch):
    launch()
    verdict.refuse(REASON)
    first = os.environ["KVSHARE_VERDICT"]
    launch()
    assert verdict.take() is None
    os.unlink(first)


def test_it_gets_there_from_another_process(launch):
    launch()
    code = f"from sglang_kvshare.engine import verdict; verdict.refuse({REASON!r})"
    for _ in range(2):  # Two ranks, one sentence.
        subprocess.run([sys.executable, "-c", code], check=True)
    assert verdict.take() == REASON


def test_without_a_launcher_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("KVSHARE_VERDICT", raising=False)
    verdict.refuse(REASON)
    assert verdict.take() is None
    monkeypatch.setenv("KVSHARE_VERDICT", str(tmp_path / "no" / "such" / "folder"))
    verdict.refuse(REASON)
    assert verdict.take() is None


# --- the launcher ---------------------------------------------------------------------------------


def ready(readers, processes):
    return ["info", readers, processes]


def dies(readers, processes):
    raise RuntimeError("Rank 0 scheduler died during initialization")


def refuses(then):
    def original(readers, processes):
        verdict.refuse(REASON)
        return then(readers, processes)

    return original


def signals(readers, processes):
    """What a scheduler does that hits an exception."""
    os.kill(os.getpid(), signal.SIGQUIT)
    return ready(readers, processes)


def test_a_scheduler_that_is_ready(launch, sigquit):
    launch()
    assert verdict.wait_for_schedulers(ready, 1, 2) == ["info", 1, 2]
    assert active_config() is not None


@pytest.mark.parametrize("end", [dies, signals])
def test_a_refusal_ends_the_command_with_its_sentence(launch, sigquit, end):
    launch()
    with pytest.raises(SystemExit) as stop:
        verdict.wait_for_schedulers(refuses(end), 1, 2)
    assert stop.value.code == f"KVShare: {REASON}"
    assert stop.value.__suppress_context__
    assert sigquit == []


@pytest.mark.parametrize("end", [dies, signals])
def test_a_refusal_is_an_error_to_a_program(launch, sigquit, end):
    launch(ends_process=False)
    with pytest.raises(Unsupported, match="OtherPool"):
        verdict.wait_for_schedulers(refuses(end), 1, 2)


def test_any_other_failure_is_handled_by_sglang(launch, sigquit):
    launch()
    with pytest.raises(RuntimeError, match="Rank 0 scheduler died"):
        verdict.wait_for_schedulers(dies, 1, 2)
    verdict.wait_for_schedulers(signals, 1, 2)
    assert sigquit == [signal.SIGQUIT]


def test_where_it_is_optional_the_launcher_switches_off_too(launch, sigquit):
    launch(optional=True)
    assert verdict.wait_for_schedulers(ready, 1, 2) == ["info", 1, 2]
    assert active_config() is not None
    assert verdict.wait_for_schedulers(refuses(ready), 1, 2) == ["info", 1, 2]
    assert active_config() is None


def test_where_it_is_optional_a_later_failure_is_not_taken_for_the_refusal(launch, sigquit):
    launch(optional=True)
    with pytest.raises(RuntimeError, match="Rank 0 scheduler died"):
        verdict.wait_for_schedulers(refuses(dies), 1, 2)
    verdict.wait_for_schedulers(refuses(signals), 1, 2)
    assert sigquit == [signal.SIGQUIT]


def test_hooks_pass_through_once_it_is_off(launch):
    from sglang_kvshare.engine.activation import switch_off
    from sglang_kvshare.engine.hooks import while_active

    hook = while_active(lambda original, number: ("ours", original(number)))
    assert hook is not while_active(lambda original, number: None)
    launch()
    assert hook(lambda number: number + 1, 1) == ("ours", 2)
    switch_off()
    assert hook(lambda number: number + 1, 1) == 2
