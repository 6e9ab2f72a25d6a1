"""Requests that wait for a donor that is being computed."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.holding import Holder
from sglang_kvshare.scheduling.jobs import Waiting

pytestmark = pytest.mark.unit


def waiting(number):
    return Waiting(f"r{number}", number, 0.0, 100)


def test_held_while_the_document_is_computed_and_released_when_it_is():
    holder = Holder(most_hold_ms=1000, most_bypasses=64)
    assert not holder.held(waiting(1), ["doc"], 50, 0)
    holder.begins("r0", ["doc", "question"], ends_ms=20)
    assert holder.held(waiting(1), ["doc"], 50, 0)
    assert not holder.held(waiting(2), ["another"], 50, 0)
    # What it would save is less than the wait.
    assert not holder.held(waiting(3), ["doc"], 20, 0)
    holder.ended("r0")
    assert not holder.held(waiting(1), ["doc"], 50, 10)
