"""The gate lets through what pays and nothing else, whatever the clock does."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.benefit import BenefitGate, CostCurve, Recent

pytestmark = pytest.mark.unit

FLOOR_MS, ROW_MS, OVERHEAD_MS, COPY_MS = 8.0, 0.5, 6.0, 0.01


def full_ms(rows):
    """Few rows cost the same: the weights are read all the same."""
    return max(FLOOR_MS, ROW_MS * rows)


def taught(noise=0.0, outliers=0.0, seed=1):
    """A gate that has seen forwards of a machine with the costs above."""
    rng = random.Random(seed)

    def noisy(ms):
        ms *= 1 + rng.uniform(-noise, noise)
        return ms * 20 if rng.random() < outliers else ms

    gate = BenefitGate()
    for _ in range(30):
        for rows in (4, 10, 20, 50, 100, 300, 1000):
            gate.observe_full(rows, noisy(full_ms(rows)))
        for kept in (10, 50, 200):
            gate.observe_narrowed(kept, noisy(full_ms(kept) + OVERHEAD_MS))
            gate.observe_copy(kept * 3, noisy(COPY_MS * kept * 3))
            gate.observe_match(kept * 4, noisy(0.001 * kept * 4))
    return gate


def true_gain(rows, spared):
    return full_ms(rows) - full_ms(rows - spared) - OVERHEAD_MS - COPY_MS * spared


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_its_verdict_is_that_of_the_true_costs(noise, outliers):
    gate = taught(noise, outliers)
    for rows in (6, 12, 18, 30, 60, 120, 500, 1000):
        for spared in (1, rows // 2, rows - 1):
            gain = true_gain(rows, spared)
            # Near the edge the medians of powers of two may be wrong; far from it never.
            if abs(gain) > 0.35 * full_ms(rows) + 1:
                assert gate.pays(rows, spared) == (gain > 0), (rows, spared, gain)


def test_short_prompts_are_not_even_looked_at():
    gate = taught()
    assert not gate.worth_a_look(8)
    assert not gate.pays(12, 11)
    # Positive control: long ones are.
    assert gate.worth_a_look(1000)
    assert gate.pays(1000, 900)
    assert gate.pays(5000, 4000)


def test_a_history_of_long_prompts_does_not_close_it():
    """Full forwards of 1,000 and 2,500 rows are all it knows; attention makes the curve convex."""

    def took(rows, context):
        return 5 + 2.0 * rows + 4e-4 * rows * context

    gate = BenefitGate()
    for _ in range(20):
        for rows in (1000, 2500):
            gate.observe_full(rows, took(rows, rows))
        for rows, spared in ((2500, 600), (2500, 1800), (1000, 240)):
            gate.observe_narrowed(rows - spared, took(rows - spared, rows))
            gate.observe_copy(spared, 0.01 * spared)
            gate.observe_match(rows, 0.001 * rows)
    for rows, spared in ((1000, 240), (1000, 500), (1000, 950), (2500, 2400), (600, 500)):
        assert gate.worth_a_look(rows)
        assert gate.pays(rows, spared), (rows, spared)
    # What it then measures counts: were small narrowed forwards slow, it would close.
    for _ in range(20):
        gate.observe_narrowed(50, 10 * took(1000, 1000))
    assert not gate.pays(1000, 950)


def test_it_has_no_opinion_before_it_has_measured():
    gate = BenefitGate()
    assert gate.pays(10, 1)
    assert gate.worth_a_look(10)
    for _ in range(3):
        gate.observe_full(10, 5.0)
        gate.observe_full(100, 50.0)
    assert not gate.known


def test_it_follows_a_change():
    gate = taught()
    assert gate.pays(60, 50)
    for _ in range(20):
        gate.observe_narrowed(10, full_ms(10) + 500)
    assert not gate.pays(60, 50)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["full", "narrowed", "copy", "match"]),
            st.integers(-5, 10_000),
            st.one_of(st.floats(), st.floats(-100, 100)),
        ),
        max_size=200,
    )
)
def test_no_clock_can_break_it(events):
    """Times that are negative, zero, infinite or not a number: the clock went back, or worse."""
    gate = BenefitGate()
    for kind, tokens, ms in events:
        getattr(gate, f"observe_{kind}")(tokens, ms)
    for rows in (1, 2, 50, 100_000):
        assert gate.worth_a_look(rows) in (True, False)
        assert gate.pays(rows, rows - 1) in (True, False)
        if gate.known:
            assert not math.isnan(gate.saved_ms(rows, rows - 1))


def test_the_curve_never_falls_and_is_exact_where_it_was_measured():
    curve = CostCurve()
    for rows, ms in ((10, 9.0), (100, 5.0), (1000, 300.0)):
        for _ in range(5):
            curve.observe(rows, ms)
    assert [curve.ms(rows) for rows in (1, 10, 100, 1000, 2000)] == [9, 9, 9, 300, 600]
    values = [curve.ms(rows) for rows in range(1, 3000, 7)]
    assert values == sorted(values)


def test_its_memory_is_bounded():
    gate = BenefitGate()
    for rows in range(1, 5000):
        gate.observe_full(rows, 1.0)
    assert len(gate.full._buckets) <= 13
    recent = Recent()
    for value in range(1000):
        recent.add(value)
    assert len(recent) == 16
