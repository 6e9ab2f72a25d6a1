"""The gate lets through what pays and nothing else, whatever the clock does."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.benefit import RETRY_EVERY, BenefitGate, BenefitGates
from sglang_kvshare.scheduling.forward_cost import ForwardCost, Load, Recent, total

pytestmark = pytest.mark.unit

FLOOR_MS, ROW_MS, PAIR_MS, OVERHEAD_MS, COPY_MS = 8.0, 0.5, 1e-4, 6.0, 0.01


def full_ms(load):
    """Few rows cost the same: the weights are read all the same."""
    return max(FLOOR_MS, ROW_MS * load.rows) + PAIR_MS * load.pairs


def narrowed_ms(load):
    """Masked attention takes longer than causal attention."""
    return full_ms(load) + OVERHEAD_MS + 0.3 * PAIR_MS * load.pairs


def taught(noise=0.0, outliers=0.0, seed=1, sizes=(4, 10, 20, 50, 100, 300, 1000)):
    """A gate that has seen forwards of a machine with the costs above."""
    rng = random.Random(seed)

    def noisy(ms):
        ms *= 1 + rng.uniform(-noise, noise)
        return ms * 20 if rng.random() < outliers else ms

    gate = BenefitGate()
    for _ in range(30):
        for rows in sizes:
            gate.observe_full(Load.of(rows, rows), noisy(full_ms(Load.of(rows, rows))))
        for kept in (3, 10, 50, 200):
            load = Load.of(kept, 4 * kept)
            gate.observe_narrowed(load, noisy(narrowed_ms(load)))
            gate.observe_copy(kept * 3, noisy(COPY_MS * kept * 3))
            gate.observe_match(kept * 4, noisy(0.001 * kept * 4))
    return gate


def true_gain(rows, spared, context):
    full, kept = Load.of(rows, context), Load.of(rows - spared, context)
    return full_ms(full) - narrowed_ms(kept) - COPY_MS * spared


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_its_verdict_is_that_of_the_true_costs(noise, outliers):
    gate = taught(noise, outliers)
    seen = set()
    for rows in (6, 12, 18, 30, 60, 120, 500, 1000):
        for context in (rows, 2 * rows):
            for spared in (1, rows // 2, rows - 1):
                gain = true_gain(rows, spared, context)
                # Near the edge the medians of powers of two may be wrong; far from it never.
                if abs(gain) > 0.35 * full_ms(Load.of(rows, context)) + 1:
                    verdict = gate.pays(rows, spared, context)
                    assert verdict == (gain > 0), (rows, spared, context, gain)
                    seen.add(verdict)
    assert seen == {True, False}


def test_short_prompts_are_not_even_looked_at():
    gate = taught()
    assert not gate.worth_a_look(8, 8)
    assert not gate.pays(12, 11, 12)
    # Positive control: long ones are.
    assert gate.worth_a_look(1000, 1000)
    assert gate.pays(1000, 900, 1000)
    assert gate.pays(5000, 4000, 5000)


@pytest.mark.parametrize("sizes", [(1000, 2500), (100, 2500), (20, 1000, 2500, 6000)])
def test_a_history_of_long_prompts_does_not_close_it(sizes):
    """What rows of long contexts took is not held against rows of shorter ones."""

    def took(rows, context):
        return 5 + 2.0 * rows + 4e-4 * rows * context

    gate = BenefitGate()
    longest = sizes[-1]
    for _ in range(20):
        for rows in sizes:
            gate.observe_full(Load.of(rows, rows), took(rows, rows))
        for share in (0.25, 0.75):
            spared = round(share * longest)
            gate.observe_narrowed(
                Load.of(longest - spared, longest), took(longest - spared, longest)
            )
            gate.observe_copy(spared, 0.01 * spared)
            gate.observe_match(longest, 0.001 * longest)
    for rows, spared in ((1000, 100), (1000, 240), (1000, 950), (2500, 2400), (600, 500)):
        assert gate.worth_a_look(rows, rows)
        assert gate.pays(rows, spared, rows), (rows, spared)
    # What it then measures counts: were small narrowed forwards slow, it would close.
    for _ in range(20):
        gate.observe_narrowed(Load.of(50, 1000), 10 * took(1000, 1000))
    assert not gate.pays(1000, 950, 1000)


def test_two_sizes_that_hiccups_made_alike_do_not_close_it():
    gate = BenefitGate()
    for _ in range(8):
        gate.observe_full(Load.of(1000, 1000), 1000.0)
        gate.observe_full(Load.of(1100, 1100), 1000.0)
        gate.observe_copy(100, 1.0)
    assert gate.known
    assert gate.pays(1000, 500, 1000)


def test_it_has_no_opinion_before_it_has_measured():
    gate = BenefitGate()
    assert gate.pays(10, 1, 10)
    assert gate.worth_a_look(10, 10)
    for _ in range(3):
        gate.observe_full(Load.of(10, 10), 5.0)
        gate.observe_full(Load.of(100, 100), 50.0)
    assert not gate.known


def test_it_follows_a_change():
    gate = taught()
    assert gate.pays(60, 50, 60)
    for _ in range(20):
        gate.observe_narrowed(Load.of(10, 60), 500)
        gate.observe_narrowed(Load.of(10, 40), 500)
    assert not gate.pays(60, 50, 60)


@pytest.mark.parametrize("looks", [True, False])
def test_a_bad_moment_does_not_close_it_for_good(looks):
    """Narrowed forwards were slow for a while. Now they are not, and that is found out."""
    gate = taught()
    for _ in range(20):
        for context in (40, 60, 200):
            gate.observe_narrowed(Load.of(10, context), 500)

    def carried_out():
        return (not looks or gate.worth_a_look(60, 60)) and gate.pays(60, 50, 60)

    tried = 0
    for turn in range(20 * RETRY_EVERY):
        if carried_out():
            tried += 1
            gate.observe_narrowed(Load.of(10, 60), narrowed_ms(Load.of(10, 60)))
        elif turn == 10 * RETRY_EVERY:
            # While it is closed, one in many is carried out and no more.
            assert tried == 10
    assert gate.pays(60, 50, 60)


def test_a_closed_gate_lets_one_in_many_through():
    gate = taught()
    verdicts = [gate.pays(12, 11, 12) for _ in range(3 * RETRY_EVERY)]
    assert verdicts == ([False] * (RETRY_EVERY - 1) + [True]) * 3
    looks = [gate.worth_a_look(8, 8) for _ in range(RETRY_EVERY)]
    assert looks == [False] * (RETRY_EVERY - 1) + [True]
    assert gate.pays(8, 7, 8)
    assert not gate.pays(8, 7, 8)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["full", "narrowed", "copy", "match"]),
            st.integers(-5, 10_000),
            st.integers(-5, 10_000),
            st.one_of(st.floats(), st.floats(-100, 100)),
        ),
        max_size=200,
    )
)
def test_no_clock_can_break_it(events):
    """Times that are negative, zero, infinite or not a number: the clock went back, or worse."""
    gate = BenefitGate()
    for kind, tokens, context, ms in events:
        load = Load.of(tokens, context) if kind in ("full", "narrowed") else tokens
        getattr(gate, f"observe_{kind}")(load, ms)
    for rows in (1, 2, 50, 100_000):
        assert gate.worth_a_look(rows, rows) in (True, False)
        assert gate.pays(rows, rows - 1, rows) in (True, False)
        if gate.known:
            assert not math.isnan(gate.saved_ms(rows, rows - 1, rows))


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_is_that_of_the_machine_within_its_noise(seed):
    cost = taught(noise=0.1, outliers=0.1, seed=seed).cost
    for rows, context in ((30, 30), (80, 80), (200, 200), (700, 700), (2000, 2000), (200, 1000)):
        load = Load.of(rows, context)
        assert cost.ms(load, narrowed=False) == pytest.approx(full_ms(load), rel=0.25)
    for kept, context in ((20, 100), (100, 400), (300, 1000)):
        load = Load.of(kept, context)
        assert cost.ms(load, narrowed=True) == pytest.approx(narrowed_ms(load), rel=0.3)


def test_rows_and_context_are_told_apart_exactly_where_the_formula_holds():
    cost = ForwardCost()

    def took(load, narrowed):
        return 3 + 0.2 * load.rows + 1e-3 * load.pairs + narrowed * (4 + 5e-4 * load.pairs)

    for rows in (20, 50, 100, 400, 900):
        for context in (rows, 2 * rows, 5 * rows):
            for narrowed in (True, False):
                for _ in range(5):
                    load = Load.of(rows, context)
                    cost.observe(load, took(load, narrowed), narrowed=narrowed)
    for rows, context in ((30, 50), (600, 700), (1500, 3000)):
        load = Load.of(rows, context)
        for narrowed in (True, False):
            assert cost.ms(load, narrowed=narrowed) == pytest.approx(took(load, narrowed), rel=0.03)


def test_loads_of_a_batch_add_up():
    assert total([Load.of(3, 10), Load.of(2, 5)]) == Load(5, 40)
    assert total([]) == Load(0, 0)


def test_its_memory_is_bounded():
    cost = ForwardCost()
    for rows in range(1, 5000):
        cost.observe(Load.of(rows, 5000), 1.0, narrowed=False)
        cost.observe(Load.of(rows, 1 << 70), 1.0, narrowed=False)
    assert cost.sizes <= 2 * 13
    recent = Recent()
    for value in range(1000):
        recent.add(value)
    assert len(recent) == 16


def test_gates_of_several_learn_nothing_of_each_other():
    gates = BenefitGates()
    ours, theirs = gates.of({"ours"}), gates.of({"theirs"})
    assert gates.of({"ours"}) is ours is not theirs
    for rows in (50, 1000):
        for _ in range(10):
            ours.observe_full(Load.of(rows, rows), full_ms(Load.of(rows, rows)))
            ours.observe_copy(100, 1.0)
    assert (ours.known, theirs.known) == (True, False)
    # A batch of both: its time would tell the one of the other.
    assert gates.of({"ours", "theirs"}) is None
    assert gates.of(set()) is None
