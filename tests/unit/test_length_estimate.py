"""Estimates of output lengths: they learn, hold what they promise, and stay bounded."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.scheduling.length_estimate import (
    Asked,
    LengthEstimator,
    confidence_at,
)

pytestmark = pytest.mark.unit


def answered(estimator, asked, tokens, confidence=0.9):
    estimate = estimator.estimate(asked, confidence)
    estimator.observe(asked, estimate, tokens)
    return estimate


def log_normal(random, typical, spread=0.5, most=2048):
    return int(np.clip(round(random.lognormal(np.log(typical), spread)), 1, most))


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", range(3))
def test_promised_and_observed_coverage_agree(confidence, seed):
    random, estimator = np.random.default_rng(seed), LengthEstimator()
    held = []
    for number in range(1200):
        tokens = log_normal(random, 200)
        estimate = answered(estimator, Asked("a", 700, 2048), tokens, confidence)
        if number >= 200:
            held.append(tokens <= estimate.upper_tokens)
    # Three standard errors of a thousand draws, and the window's own.
    assert np.mean(held) == pytest.approx(confidence, abs=0.06)


def test_the_first_answers_are_bounded_without_errors_to_go_by():
    """Hoeffding's bound over the range that is known; it never promises less."""
    random, short = np.random.default_rng(1), 0
    for _ in range(200):
        estimator = LengthEstimator()
        for number in range(15):
            tokens = log_normal(random, 100, 0.6, most=512)
            estimate = answered(estimator, Asked("a", 50, 512), tokens)
            short += number >= 2 and tokens > estimate.upper_tokens
    assert short / (200 * 13) <= 0.1
    assert LengthEstimator().estimate(Asked("a", 5, 512), 0.9).upper_tokens == 512


def test_kinds_of_prompts_are_told_apart():
    random, estimator = np.random.default_rng(2), LengthEstimator()
    for _ in range(150):
        answered(estimator, Asked("chat", 60, 2048), log_normal(random, 40, 0.2))
        answered(estimator, Asked("chat", 3000, 2048), log_normal(random, 600, 0.2))
        answered(estimator, Asked("code", 60, 2048), log_normal(random, 1200, 0.2))
    told = [
        estimator.estimate(Asked(*asked, 2048), 0.9).predicted_tokens
        for asked in (("chat", 50), ("chat", 2900), ("code", 50))
    ]
    assert told == pytest.approx([40, 600, 1200], rel=0.35)


def test_neighbours_are_trusted_where_they_know_better():
    """Answers depend on the question, which only the nearest prompts' answers show."""
    random, estimator = np.random.default_rng(3), LengthEstimator()
    off, blind = [], []
    for number in range(400):
        typical = int(random.choice([20, 800]))
        neighbours = tuple(log_normal(random, typical, 0.1) for _ in range(3))
        tokens = log_normal(random, typical, 0.1)
        estimate = answered(estimator, Asked("a", 100, 2048, neighbours), tokens)
        if number >= 100:
            off.append(abs(np.log(estimate.predicted_tokens / tokens)))
            blind.append(abs(np.log(estimate.opinions["namespace"] / tokens)))
    assert np.mean(off) < 0.3 < 1.5 < np.mean(blind)


def test_drift_is_followed():
    random, estimator = np.random.default_rng(4), LengthEstimator()
    for _ in range(300):
        answered(estimator, Asked("a", 100, 4096), log_normal(random, 50, 0.2))
    told = [
        answered(estimator, Asked("a", 100, 4096), log_normal(random, 900, 0.2)) for _ in range(300)
    ]
    assert told[0].predicted_tokens < 100
    assert told[40].direction == "under"
    assert told[-1].predicted_tokens == pytest.approx(900, rel=0.2)


def test_more_confidence_is_more_padding_and_a_busy_server_wants_less():
    random, estimator = np.random.default_rng(5), LengthEstimator()
    asked = Asked("a", 100, 2048)
    for _ in range(200):
        answered(estimator, asked, log_normal(random, 200))
    upper = [estimator.estimate(asked, p).upper_tokens for p in (0.5, 0.8, 0.95)]
    assert upper == sorted(upper)
    assert upper[0] < upper[2]
    rates = [confidence_at(rate) for rate in (0, 10, 1000)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.95
    for bad in ({"arrivals_per_s": -1.0}, {"arrivals_per_s": 1.0, "most": 1.0}):
        with pytest.raises(ValueError, match="allowed are"):
            confidence_at(**bad)


def test_a_restart_goes_on_where_it_was():
    random, estimator = np.random.default_rng(6), LengthEstimator()
    for number in range(100):
        asked = Asked("a" if number % 3 else "b", 100 * (number % 4 + 1), 1024)
        answered(estimator, asked, log_normal(random, 150))
    again = LengthEstimator.from_state(json.loads(json.dumps(estimator.to_state())))
    for namespace in ("a", "b", "c"):
        asked = Asked(namespace, 200, 1024, (30, 40))
        assert again.estimate(asked, 0.9) == estimator.estimate(asked, 0.9)
    for state in ({}, {"version": 2}, {"version": 1, "answers": 3, "errors": {}, "off": {}}):
        with pytest.raises(ValueError, match=r"version|state"):
            LengthEstimator.from_state(state)


def test_names_do_not_run_into_each_other():
    """A namespace whose name looks like another's length group."""
    estimator = LengthEstimator()
    for _ in range(30):
        answered(estimator, Asked("a", 100, 1024), 900)
    for name in ("1:a", "a;7", "*", ""):
        assert set(estimator.estimate(Asked(name, 100, 1024), 0.9).opinions) == {"all"}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c;1", ""]),
            st.integers(0, 5000),
            st.integers(1, 300),
            st.lists(st.integers(0, 10_000), max_size=3),
            st.integers(0, 300),
            st.floats(0.01, 0.99),
        ),
        max_size=60,
    )
)
def test_bounds_hold_whatever_comes(history):
    estimator, twin = LengthEstimator(), LengthEstimator()
    for namespace, prompt, most, neighbours, tokens, confidence in history:
        asked = Asked(namespace, prompt, most, tuple(neighbours))
        estimate = answered(estimator, asked, min(tokens, most), confidence)
        assert 1 <= estimate.predicted_tokens <= most
        assert 1 <= estimate.upper_tokens <= most
        assert estimate == answered(twin, asked, min(tokens, most), confidence)


def test_memory_is_bounded():
    estimator = LengthEstimator()
    for number in range(3000):
        answered(estimator, Asked(f"n{number}", 100, 64), number % 64)
    state = estimator.to_state()
    assert max(len(state["answers"]), len(state["errors"])) <= 1024
    assert max(map(len, state["answers"].values())) <= 256
    for bad in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            estimator.estimate(Asked("a", 1, 1), bad)
    with pytest.raises(ValueError, match="the least is 1"):
        estimator.estimate(Asked("a", 1, 0), 0.5)
