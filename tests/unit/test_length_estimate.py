"""Estimates of output lengths: they learn, hold what they promise, and stay bounded."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.scheduling.length_estimate import (
    Asked,
    Calibration,
    LengthEstimate,
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
        assert again.longer(asked, 200, 0.9) == estimator.longer(asked, 200, 0.9)
    assert not again.isolated
    apart = LengthEstimator(isolated=True)
    kept = json.loads(json.dumps(apart.to_state()))
    assert LengthEstimator.from_state(kept).isolated
    assert not LengthEstimator.from_state(kept, isolated=False).isolated
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
        upper = estimator.longer(asked, min(tokens, most), confidence)
        assert min(tokens + 1, most) <= upper <= most


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


# --- answers that outgrow their bound -----------------------------------------------------------


def test_of_those_that_were_as_long_a_share_ends_before_the_new_bound():
    estimator, asked = LengthEstimator(), Asked("a", 100, 4096)
    for tokens in range(1, 201):
        answered(estimator, asked, tokens)
    # 101 to 200 were longer than 100; of these nine tenths end by 191.
    assert estimator.longer(asked, 100, 0.9) == pytest.approx(191, abs=1)
    assert estimator.longer(asked, 150, 0.5) == pytest.approx(176, abs=1)
    # Nothing was ever that long: all is possible.
    assert estimator.longer(asked, 300, 0.9) == 4096
    assert estimator.longer(asked, 4096, 0.9) == 4096
    with pytest.raises(ValueError, match="between 0 and 1"):
        estimator.longer(asked, 1, 1.0)


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_the_bound_is_true_of_those_that_outgrew_the_first(confidence):
    random, estimator, asked = np.random.default_rng(7), LengthEstimator(), Asked("a", 700, 4096)
    held, plain = [], []
    for number in range(4000):
        tokens = log_normal(random, 200, 0.8, most=4096)
        estimate = answered(estimator, asked, tokens, 0.5)
        if number >= 300 and tokens > estimate.upper_tokens:
            upper = estimator.longer(asked, estimate.upper_tokens, confidence)
            held.append(tokens <= upper)
            again = estimator.estimate(asked, confidence).upper_tokens
            plain.append(tokens <= max(again, estimate.upper_tokens))
    assert np.mean(held) == pytest.approx(confidence, abs=0.05)
    # Control: the bound on answers in general promises too much of these.
    assert np.mean(plain) < confidence - 0.02


# --- nothing of others --------------------------------------------------------------------------


def history(others):
    """What one namespace is told, with whatever others did in between."""
    random, told = np.random.default_rng(8), np.random.default_rng(9)
    estimators = LengthEstimator(isolated=True), LengthEstimator()
    said = [[], []]
    for _ in range(120):
        asked = Asked("mine", int(random.integers(10, 3000)), 2048)
        tokens = log_normal(random, 100)
        for estimator, all_said in zip(estimators, said, strict=True):
            for name in others:
                answered(estimator, Asked(name, asked.prompt_tokens, 2048), log_normal(told, 900))
            all_said.append(answered(estimator, asked, tokens))
            all_said.append(estimator.longer(asked, 150, 0.9))
    return said


def test_an_isolated_namespace_is_told_nothing_of_others():
    alone, among = history([]), history(["yours", "theirs"])
    assert alone[0] == among[0]
    # Positive control: where they are not isolated the others do show.
    assert alone[1] != among[1]


@pytest.mark.parametrize("isolated", [True, False])
def test_what_is_forgotten_leaves_no_trace(isolated):
    """But for the name, which nothing was learnt of."""
    estimator, names = LengthEstimator(isolated), ("a", "a;7", "1:a", "b")
    for name in names:
        for prompt in (10, 100, 1000):
            answered(estimator, Asked(name, prompt, 1024), 900)
    estimator.forget({"a", "b"})
    state = estimator.to_state()
    kept = {"3:a;7", "3:a;7;4", "3:a;7;7", "3:a;7;10", "3:1:a", "3:1:a;4", "3:1:a;7", "3:1:a;10"}
    assert set(state["answers"]) == set(state["errors"]) == kept
    assert not any(key.endswith((";1:a", ";1:b")) for key in state["off"])
    assert bool(state["off"]) == isolated
    assert estimator.estimate(Asked("a", 100, 1024), 0.9).opinions == {}
    assert estimator.estimate(Asked("a;7", 100, 1024), 0.9).opinions["alike"] == 900


# --- calibration --------------------------------------------------------------------------------


def test_the_report_compares_what_was_promised_with_what_was_kept():
    told = Calibration()
    assert told.report() == []
    for confidence, upper, tokens in ((0.9, 100, 100), (0.92, 100, 101), (0.5, 50, 10)):
        told.observe(LengthEstimate(40, upper, "even", confidence), tokens)
    half, nine = told.report()
    assert (half.promised, half.observed, half.answers, half.padding) == (0.5, 1.0, 1, 5.0)
    assert nine.promised == pytest.approx(0.91)
    assert (nine.observed, nine.answers) == (0.5, 2)
    assert nine.padding == pytest.approx(200 / 201)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_what_is_promised_is_kept_through_drift(confidence):
    """Answers double in length, slowly, and halve again; two kinds of prompts among them."""
    random, estimator, told = np.random.default_rng(10), LengthEstimator(True), Calibration()
    for number in range(4000):
        typical = 100 * 2 ** np.sin(number / 4000 * 2 * np.pi)
        asked = Asked("a", int(random.choice([50, 3000])), 4096)
        tokens = log_normal(random, typical * (4 if asked.prompt_tokens > 100 else 1), 0.7, 4096)
        estimate = answered(estimator, asked, tokens, confidence)
        if number >= 100:
            told.observe(estimate, tokens)
    (coverage,) = told.report()
    assert coverage.observed == pytest.approx(confidence, abs=0.03)
    # And not by reserving all that may come, which would be 18 times the mean.
    assert coverage.padding < 4
