"""The order of the waiting queue."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.jobs import Waiting
from sglang_kvshare.scheduling.order import order_named, orders

pytestmark = pytest.mark.unit


def waiting(number, hit=0.0, **more):
    more.setdefault("arrived_ms", 0.0)
    return Waiting(f"r{number}", number, prompt_tokens=100, prefix_tokens=int(100 * hit), **more)


def numbers(name, queue, now_ms=0.0, most_bypasses=64):
    order = order_named(name, most_bypasses)
    return [queue[i].number for i in order.order(queue, now_ms)]


def test_kvshare_sorts_by_hit_rate():
    queue = [waiting(0, 0.1), waiting(1, 0.9), waiting(2, 0.5)]
    assert numbers("hit-rate", queue) == [1, 2, 0]
    assert numbers("fcfs", queue) == [0, 1, 2]
    with pytest.raises(ValueError, match="hit-rate"):
        order_named("shortest")
    assert set(orders()) == {"hit-rate", "effective-cost", "fcfs", "stock-fcfs", "lpm"}
