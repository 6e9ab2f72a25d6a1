"""The little simulation of the queue alone, against closed forms and the bound of the window."""

from __future__ import annotations

import statistics

import pytest

from kvshare_eval.simulate.queueing import MS_PER_BATCH, ORDERS, UNBOUNDED, arrivals, served
from sglang_kvshare.scheduling.order import order_named

pytestmark = pytest.mark.unit


def test_one_at_a_time_waits_as_pollaczek_and_khinchine_say():
    requests = arrivals(20_000, load=0.6, seed=1)
    times = [one.effective_ms + MS_PER_BATCH for one in requests]
    rate = len(requests) / requests[-1].arrived_ms
    mean, squares = statistics.mean(times), statistics.mean(each**2 for each in times)
    expected = mean + rate * squares / (2 * (1 - rate * mean))
    waits = served(requests, order_named("fcfs"), batch_tokens=1)
    assert waits.mean_ms == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", ORDERS)
def test_the_window_holds_and_without_one_nothing_does(name):
    waits = served(arrivals(1200, load=1.5, seed=2), ORDERS[name](64), batch_tokens=1024)
    bounded = {"fcfs": 1, "hit-rate": 64, "effective-cost": 64, "hit-rate, costs not grouped": 64}
    assert waits.overtaken < bounded.get(name, UNBOUNDED)
    assert (waits.overtaken >= 64) == (name not in bounded)
