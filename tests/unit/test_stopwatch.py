"""Times of forwards, on a CPU at once and on an accelerator when it has come so far."""

from __future__ import annotations

import pytest
import torch

from sglang_kvshare.engine.stopwatch import _MOST_PENDING, Stopwatch

pytestmark = pytest.mark.unit


def test_on_a_cpu_the_time_is_told_at_once():
    told = []
    with Stopwatch("cpu").measure(told.append):
        pass
    assert len(told) == 1
    assert told[0] >= 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_raises_is_not_measured(device, monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    told = []
    watch = Stopwatch(device)
    with pytest.raises(ValueError, match="inside"), watch.measure(told.append):
        raise ValueError("inside")
    with watch.measure(told.append):
        pass
    assert len(told) == (device == "cpu")


class FakeEvent:
    """An event of a device whose clock goes on by one at each record."""

    clock = 0.0
    done = True

    def __init__(self, device, enable_timing):
        assert device == "cuda"
        assert enable_timing

    def record(self):
        FakeEvent.clock += 1.0
        self.at = FakeEvent.clock

    def query(self):
        return FakeEvent.done

    def elapsed_time(self, other):
        return other.at - self.at


def test_on_an_accelerator_it_is_told_later_and_never_waited_for(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "done", False)
    told = []
    watch = Stopwatch("cuda:0")
    for _ in range(3 * _MOST_PENDING):
        with watch.measure(told.append):
            pass
    assert told == []
    monkeypatch.setattr(FakeEvent, "done", True)
    with watch.measure(told.append):
        pass
    # A device far behind costs measurements, not memory.
    assert told == [1.0] * _MOST_PENDING
