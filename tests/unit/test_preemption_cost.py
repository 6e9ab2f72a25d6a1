"""Swap or recompute."""

from __future__ import annotations

import math

import pytest

from sglang_kvshare.scheduling.forward_cost import ForwardCost
from sglang_kvshare.scheduling.preemption_cost import PreemptionCost, Way

pytestmark = pytest.mark.unit


def measured(out=100.0, back=200.0):
    """Bytes a millisecond."""
    cost = PreemptionCost(bytes_per_token=10)
    for count in (1_000, 100_000):
        cost.observe_out(count, count / out)
        cost.observe_in(count, count / back)
    return cost


def test_the_faster_way_is_taken():
    cost = measured()
    # 1,000 tokens: 10,000 bytes, 100 ms out and 50 ms in.
    assert cost.swap_ms(1000) == pytest.approx(150)
    assert cost.choose(1000, lambda rows, context: 200.0) == Way("swap", pytest.approx(150), 200.0)
    assert cost.choose(1000, lambda rows, context: 100.0).way == "recompute"


def test_what_is_not_known_is_not_chosen():
    unknown = PreemptionCost(10)
    assert unknown.choose(10, lambda rows, context: 5.0) == Way("recompute", 5.0, math.inf)
    assert unknown.choose(10, ForwardCost()) == Way("recompute", math.inf, math.inf)
    assert measured().choose(10, ForwardCost()).way == "swap"
    with pytest.raises(ValueError, match="the least is 1"):
        PreemptionCost(0)
