"""Parts are put together by settings, and each can be stock's."""

from __future__ import annotations

import pytest

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.scheduling.parts import ScheduleSettings, build_parts

pytestmark = pytest.mark.unit


def test_ours_by_default():
    parts = build_parts(ScheduleSettings(host_pool_tokens=100), pool_tokens=10_000)
    assert (parts.order.name, parts.victim_order.name) == ("hit-rate", "slo")
    assert None not in (parts.holder, parts.ledger, parts.reserve, parts.preemption_cost)
    assert parts.host_pool.capacity_tokens == 100
    assert parts.slos.of("anyone").ttft_ms is None


def test_stock_everywhere():
    stock = dict.fromkeys(("schedule", "reserve", "victims", "preempt"), "stock")
    parts = build_parts(ScheduleSettings(**stock, host_pool_tokens=100))
    left = parts.order, parts.holder, parts.ledger, parts.reserve, parts.preemption_cost
    assert left == (None,) * 5
    assert (parts.victim_order.name, parts.host_pool.capacity_tokens) == ("stock", 0)


@pytest.mark.parametrize("name", ["schedule", "reserve", "victims", "preempt"])
def test_a_wrong_name_is_told_with_those_that_are_right(name):
    with pytest.raises(ValueError, match=rf"{name}='best': allowed are .*stock"):
        ScheduleSettings(**{name: "best"})


def test_a_configuration_says_what_the_settings_of_its_names_are():
    """Values that differ from every default, so that one that is not passed on shows."""
    config = KVShareConfig(
        most_bypasses=7,
        hold_ms=11.0,
        reserve="stock",
        lookahead_steps=5,
        length_confidence=0.7,
        length_confidence_slope=0.02,
        victims="stock",
        most_preemptions=9,
    )
    made = ScheduleSettings.of(
        config, schedule="fcfs", preempt="swap", ttft_slo_ms=1.0, tbt_slo_ms=2.0, host_pool_tokens=3
    )
    assert made == ScheduleSettings(
        schedule="fcfs",
        most_bypasses=7,
        hold_ms=11.0,
        reserve="stock",
        lookahead_steps=5,
        confidence=0.7,
        confidence_slope=0.02,
        isolated_lengths=True,
        victims="stock",
        preempt="swap",
        most_preemptions=9,
        host_pool_tokens=3,
        ttft_slo_ms=1.0,
        tbt_slo_ms=2.0,
    )
    with pytest.raises(ValueError, match="preempt='best'"):
        ScheduleSettings.of(
            config, schedule="fcfs", preempt="best", ttft_slo_ms=1.0, tbt_slo_ms=2.0
        )
