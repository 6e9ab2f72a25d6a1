"""The benchmark of scheduling drives every part, and keeps its sizes."""

from __future__ import annotations

import pytest

from kvshare_eval.serving.bench_scheduling import Bench, measure

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("schedule", ["hit-rate", "fcfs"])
def test_the_batch_and_the_queue_keep_their_size(schedule):
    bench = Bench(40, 16, schedule)
    for _ in range(200):
        bench.step()
        assert len(bench.queue) == 40
        assert len(bench.answers) == len(bench.parts.ledger) <= 16
    assert len(bench.answers) > 8
    # Requests went through, or nothing was measured.
    assert bench.came > 2000 + 40 + 16


def test_every_part_is_measured():
    costs = measure(waiting=40, running=16, steps=200)
    assert len(costs) == 9
    assert costs[-1].part == "all together"
    assert all(0 <= one.median_ms <= one.p99_ms <= one.worst_ms for one in costs)
