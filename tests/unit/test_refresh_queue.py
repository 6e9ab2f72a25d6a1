"""The queue of the decode stage, and the pace at which it is worked off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.recompute.refresh_queue import DONE_SHARE, LeftOver, RefreshQueue
from sglang_kvshare.scheduling.refresh_pace import NO_LIMIT, RefreshPace

pytestmark = pytest.mark.unit

VALUES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 4.0]), min_size=0, max_size=30)


def queue(importance, weights=None):
    importance = np.array(importance, dtype=float)
    weights = np.ones(len(importance)) if weights is None else np.array(weights, dtype=float)
    return RefreshQueue(np.arange(len(importance), dtype=np.int64) * 3, importance, weights)


@given(VALUES, st.integers(1, 7))
def test_it_gives_the_most_important_first_and_each_once(importance, count):
    waiting = queue(importance)
    left = {3 * i: value for i, value in enumerate(importance) if value > 0}
    end = DONE_SHARE * sum(left.values())
    while not waiting.done:
        taken = waiting.take(count).tolist()
        best = sorted(left, key=lambda p: (-left[p], p))[:count]
        assert taken == sorted(best)
        for position in best:
            del left[position]
        assert waiting.positions.tolist() == sorted(left)
    # What does not matter any more is left, and nothing else.
    assert sum(left.values()) <= end + 1e-12
    assert waiting.take(count).tolist() == []


@given(VALUES.filter(any), st.integers(1, 5), st.data())
def test_looking_again_keeps_what_waits_and_its_worth(importance, count, data):
    waiting = queue(importance)
    waiting.take(count)
    before = waiting.positions.tolist()
    total = waiting._importance.sum()
    seen = data.draw(st.lists(st.floats(0, 1), min_size=len(before), max_size=len(before)))
    waiting.look_again(np.array(seen))
    assert waiting.positions.tolist() == before
    assert waiting._importance.sum() == pytest.approx(total)


def test_what_generated_tokens_look_at_comes_first():
    waiting = queue([1.0, 1.0, 1.0, 1.0], weights=[1.0, 1.0, 10.0, 1.0])
    waiting.look_again(np.array([0.0, 0.3, 0.1, 0.0]))
    # Attention times how far the value is off.
    assert waiting.take(1).tolist() == [6]
    assert waiting.take(1).tolist() == [3]


@pytest.mark.parametrize("seen", [[np.nan] * 3, [0.0] * 3, [-1.0] * 3])
def test_a_look_that_saw_nothing_changes_nothing(seen):
    waiting = queue([3.0, 2.0, 1.0])
    waiting.look_again(np.array(seen))
    assert waiting.take(3).tolist() == [0, 3, 6]


def test_a_prompt_in_several_chunks_has_one_queue():
    early = LeftOver(np.array([2, 3, 4]), None, None)
    late = LeftOver(np.array([10, 11, 12, 13]), np.array([5.0, 1.0, 0.0, 2.0]), np.ones(4))
    waiting = RefreshQueue.of([early, late])
    # Not measured: worth the median of what was.
    assert waiting.take(2).tolist() == [2, 10]
    assert waiting.positions.tolist() == [3, 4, 11, 13]
    assert RefreshQueue.of([early]).take(2).tolist() == [2, 3]


# --- pace -----------------------------------------------------------------------------------------


def steps(pace, count, rows, wanted, cost_ms, step_ms, slo=None):
    """Decode steps of a machine; the rows that each carried and the time that it took."""
    seen = []
    for _ in range(count):
        extra = pace.allowance(rows, wanted, slo)
        ms = step_ms + extra * cost_ms
        pace.observe(rows, extra, ms)
        seen.append((extra, ms))
    return seen


@pytest.mark.parametrize("cost_ms", [0.0, 0.1, 2.0, 9.0, 40.0])
@pytest.mark.parametrize("rows", [1, 4])
def test_refreshing_costs_no_more_than_its_share(cost_ms, rows):
    pace = RefreshPace(slowdown=0.05, most_rows=64)
    steps(pace, 8, rows, 0, cost_ms, 20.0)
    seen = steps(pace, 400, rows, 3, cost_ms, 20.0)
    mean = sum(ms for _, ms in seen) / len(seen)
    assert mean <= 20.0 * 1.055
    # Positive control: what fits is used.
    if cost_ms <= 20:
        assert sum(extra for extra, _ in seen) > 0
    if cost_ms == 0:
        assert sum(extra for extra, _ in seen) > 3 * 350
    if cost_ms > 1.0:
        assert sorted(ms for _, ms in seen)[200] == 20.0


def test_an_slo_that_is_near_stops_it():
    pace = RefreshPace(slowdown=10.0, most_rows=64)
    steps(pace, 8, 2, 0, 5.0, 20.0)
    assert sum(extra for extra, _ in steps(pace, 50, 2, 3, 5.0, 20.0, slo=24.0)) == 0
    seen = steps(pace, 50, 2, 3, 5.0, 20.0, slo=60.0)
    assert sum(extra for extra, _ in seen) > 0
    assert max(ms for _, ms in seen) <= 0.8 * 60 + 1e-9


def test_a_full_batch_carries_none():
    for slowdown in (0.05, NO_LIMIT):
        pace = RefreshPace(slowdown, most_rows=8)
        steps(pace, 8, 8, 0, 0.0, 20.0)
        assert {extra for extra, _ in steps(pace, 30, 8, 3, 0.0, 20.0)} == {0}
        steps(pace, 8, 6, 0, 0.0, 20.0)
        assert max(extra for extra, _ in steps(pace, 200, 6, 3, 0.0, 20.0)) == 2


def test_without_a_limit_all_that_is_wanted_rides():
    assert RefreshPace(NO_LIMIT, 64).allowance(3, 9) == 9


def test_nothing_rides_before_a_step_was_measured():
    pace = RefreshPace(0.05, 64)
    assert pace.allowance(1, 3) == 0
    for ms in (-1.0, 0.0, float("nan")):
        for _ in range(10):
            pace.observe(1, 0, ms)
    assert pace.allowance(1, 3) == 0


def test_credit_does_not_pile_up():
    pace = RefreshPace(0.05, 64)
    steps(pace, 5000, 1, 0, 1.0, 20.0)
    for _ in range(5000):
        pace.allowance(1, 0)
    seen = steps(pace, 40, 1, 64, 1.0, 20.0)
    assert max(extra for extra, _ in seen) <= 33


@pytest.mark.parametrize("seen", [5e-324, 1e-310, 0.0])
def test_attention_that_is_next_to_nothing_changes_no_rank(seen):
    waiting = queue([0.1, 0.3])
    before = waiting._importance.tolist()
    waiting.look_again(np.array([seen, 0.0]))
    assert waiting._importance.tolist() == before
