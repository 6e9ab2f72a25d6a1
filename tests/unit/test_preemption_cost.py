"""Swap or recompute."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.forward_cost import ForwardCost, Load
from sglang_kvshare.scheduling.preemption_cost import Bandwidth, PreemptionCost, Way

pytestmark = pytest.mark.unit


def measured(out=100.0, back=200.0):
    """Bytes a millisecond."""
    cost = PreemptionCost(bytes_per_token=10)
    for count in (1_000, 100_000):
        cost.observe_out(count, count / out)
        cost.observe_in(count, count / back)
    return cost


def quadratic(rows, context):
    return 0.5 + 0.05 * rows + 1e-4 * rows * context


def test_the_faster_way_is_taken():
    # 1,000 tokens: 10,000 bytes, 100 ms out and 50 ms in.
    cost = measured()
    assert cost.swap_ms(1000) == pytest.approx(150)
    assert cost.choose(1000, lambda rows, context: 200.0) == Way("swap", pytest.approx(150), 200.0)
    assert cost.choose(1000, lambda rows, context: 100.0).way == "recompute"


def test_there_is_a_length_from_which_on_swapping_is_faster():
    """CacheOPT's sweet spot, found and not set."""
    ways = [measured().choose(tokens, quadratic).way for tokens in range(10, 3000, 10)]
    first = ways.index("swap")
    assert 0 < first < len(ways) - 1
    assert set(ways[:first]) == {"recompute"}
    assert set(ways[first:]) == {"swap"}


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 10**6))
def test_the_choice_is_the_least_of_both(tokens, shared, queued):
    cost = measured()
    way = cost.choose(
        tokens, quadratic, prefix_tokens=shared, reusable_tokens=shared, queued_bytes=queued
    )
    assert way.ms == min(
        cost.swap_ms(tokens, shared, queued), cost.recompute_ms(tokens, shared, quadratic)
    )
    assert way.ms <= way.other_ms


def test_what_others_hold_costs_nothing_and_a_queue_costs_its_time():
    cost = measured()
    assert cost.swap_ms(1000, prefix_tokens=400) == pytest.approx(90)
    assert cost.swap_ms(1000, prefix_tokens=1000) == 0
    assert cost.swap_ms(1000, queued_bytes=10_000) == pytest.approx(250)
    assert cost.recompute_ms(1000, 400, lambda rows, context: rows + context / 1e4) == 600.1
    # The last token is always computed.
    assert cost.recompute_ms(10, 10, lambda rows, context: rows) == 1


def test_forwards_are_told_by_what_was_measured():
    forwards = ForwardCost()
    for rows in (16, 64, 256, 1024) * 4:
        forwards.observe(Load.of(rows, rows), quadratic(rows, rows), narrowed=False)
    told = measured().recompute_ms(512, 0, forwards)
    assert told == pytest.approx(quadratic(512, 512), rel=0.1)


def test_what_is_not_known_is_not_chosen():
    unknown = PreemptionCost(10)
    assert unknown.choose(10, lambda rows, context: 5.0) == Way("recompute", 5.0, math.inf)
    assert unknown.choose(10, ForwardCost()) == Way("recompute", math.inf, math.inf)
    assert measured().choose(10, ForwardCost()).way == "swap"
    # One direction is not enough.
    unknown.observe_out(1000, 1.0)
    assert unknown.swap_ms(10) == math.inf
    with pytest.raises(ValueError, match="the least is 1"):
        PreemptionCost(0)


def test_bandwidth_is_kept_by_size_and_follows_a_change():
    told = Bandwidth()
    assert not told.known
    assert (told.ms(0), told.ms(1)) == (0.0, math.inf)
    told.observe(1_000, 10.0)
    told.observe(1_000_000, 100.0)
    assert told.known
    # Small copies are slow: of each size the bandwidth that was measured nearest.
    assert told.ms(900) == pytest.approx(9)
    assert told.ms(4_000_000) == pytest.approx(400)
    for _ in range(20):
        told.observe(1_000_000, 400.0)
    assert told.ms(1_000_000) == pytest.approx(400)
    for bad in ((0, 1.0), (10, 0.0), (10, -1.0), (10, math.nan), (10, math.inf)):
        told.observe(*bad)
    assert told.ms(10) == pytest.approx(0.1)
