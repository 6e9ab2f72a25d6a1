"""Whom to preempt."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.jobs import Running
from sglang_kvshare.scheduling.preemption import victim_order_named, victims

pytestmark = pytest.mark.unit


def running(number, **more):
    kept = {"prompt_tokens": 100, "output_tokens": 10, "max_new_tokens": 100}
    kept |= {"private_tokens": 110, "left_tokens": 50} | more
    return Running(f"r{number}", number, **kept)


def chosen(jobs, needed=1, order="slo", most_preemptions=3):
    return [
        jobs[i].number for i in victims(jobs, needed, victim_order_named(order), most_preemptions)
    ]


def test_the_loosest_slo_goes_first():
    jobs = [running(0, tbt_slo_ms=50), running(1, tbt_slo_ms=500), running(2, tbt_slo_ms=100)]
    assert chosen(jobs) == [1]
    assert chosen(jobs, 10_000) == [1, 2]
