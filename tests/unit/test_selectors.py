"""Every selector, and the rules by which scores become a selection."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import plans, span

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute import selectors
from sglang_kvshare.recompute.choice import fitted
from sglang_kvshare.recompute.selectors import (
    Need,
    SelectionSettings,
    Signals,
    choose,
    forced_tokens,
    register_selector,
    selector_named,
    selector_names,
)

pytestmark = pytest.mark.unit

NAMES = (
    *("all", "contribution", "deviation", "dhd", "dhd_relative", "influence", "key_deviation"),
    *("none", "query", "random", "seams"),
)
#: Of a score taken from the list by position: ties are met.
SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=200, max_size=200)
SETTINGS = st.builds(
    SelectionSettings,
    st.sampled_from([0.0, 0.1, 0.35, 0.5, 1.0]),
    st.integers(0, 12),
    st.integers(0, 12),
    st.sampled_from([1.0, 1.0, 0.5, 0.1, 0.0]),
)


def signals(plan, seed=0):
    names = [field.name for field in dataclasses.fields(Signals)]
    values = np.random.default_rng(seed).random((len(names), plan.matched_tokens))
    return Signals(**dict(zip(names, values, strict=True)))


def slow_forced(plan, settings):
    if settings.recompute_ratio == 0 and settings.recompute_error == 1:
        return set()
    forced, first = set(), 0
    for part in plan.spans:
        first = first if part.continues else part.start
        for position in range(part.start, part.end):
            in_tail = position > plan.scored_from - settings.tail_tokens
            if position < first + settings.seam_tokens or in_tail:
                forced.add(position)
    return forced


def slow_choice(plan, scores, settings):
    """Token by token, for a selector without rules of its own."""
    positions = plan.positions().tolist()
    worth = dict(zip(positions, scores, strict=True))
    if settings.recompute_error >= 1 and settings.recompute_ratio in (0, 1):
        return set(positions) if settings.recompute_ratio else set()
    chosen = slow_forced(plan, settings)
    for position in sorted(positions, key=lambda p: (-worth[p], p)):
        if settings.recompute_error < 1:
            left = sum(worth[p] for p in positions if p not in chosen)
            enough = left <= settings.recompute_error * sum(worth.values()) + 1e-9
        else:
            enough = len(chosen) >= math.ceil(settings.recompute_ratio * len(positions))
        if enough:
            break
        if worth[position] > 0:
            chosen.add(position)
    return chosen


@given(plans(), SCORES, SETTINGS)
def test_the_best_scores_are_recomputed(plan, scores, settings):
    scores = np.array(scores[: plan.matched_tokens])
    marks = choose(selector_named("query"), plan, scores, settings)
    assert set(plan.positions()[marks].tolist()) == slow_choice(plan, scores, settings)
    forced = forced_tokens(plan, settings)
    assert set(plan.positions()[forced].tolist()) == slow_forced(plan, settings)


@pytest.mark.parametrize("name", NAMES)
@given(plan=plans())
def test_every_selector_gives_each_token_a_score(name, plan):
    selector = selector_named(name)
    given_ = signals(plan)
    scores = selector.score(plan, given_)
    assert scores.shape == (plan.matched_tokens,)
    assert (scores >= 0).all()
    again = selector.score(plan, given_)
    assert scores.tolist() == again.tolist()
    if selector.needs:
        # It follows what was measured.
        other = selector.score(plan, signals(plan, seed=1))
        assert not plan.matched_tokens or scores.tolist() != other.tolist()
    for ratio in (0.0, 1.0):
        marks = choose(selector, plan, scores, SelectionSettings(ratio, 4, 4))
        whole = ratio if selector.fixed_ratio is None else selector.fixed_ratio
        assert marks.tolist() == [bool(whole)] * plan.matched_tokens


@given(plans())
def test_scores_are_what_the_papers_say(plan):
    given_ = signals(plan)
    expected = {
        "dhd": given_.attention * given_.value_l1,
        "deviation": given_.value_l2,
        "key_deviation": given_.key_l2,
        "query": given_.attention,
        "influence": given_.influence,
        "contribution": given_.contribution,
    }
    for name, scores in expected.items():
        assert selector_named(name).score(plan, given_).tolist() == scores.tolist()


@given(plans(), SETTINGS)
def test_what_is_not_a_number_or_below_zero_counts_as_nothing(plan, settings):
    dhd = selector_named("dhd")
    scores = np.resize([math.nan, -1.0, 0.0], plan.matched_tokens)
    marks = choose(dhd, plan, scores, settings)
    nothing = choose(dhd, plan, np.zeros(plan.matched_tokens), settings)
    assert marks.tolist() == nothing.tolist()


def test_a_token_of_no_importance_is_not_recomputed_to_fill_a_ratio():
    plan = ReusePlan(60, 0, (span(2, 40),))
    scores = np.zeros(40)
    scores[[5, 9]] = 1.0
    marks = choose(selector_named("dhd"), plan, scores, SelectionSettings(0.5, 2, 0))
    assert np.flatnonzero(marks).tolist() == [0, 1, 5, 9]


def test_scores_of_another_length_are_an_error():
    plan = ReusePlan(60, 0, (span(2, 40),))
    with pytest.raises(ValueError, match="shape"):
        choose(selector_named("dhd"), plan, np.zeros(39), SelectionSettings(0.5, 2, 0))


def test_chance_is_fair_and_the_same_for_the_same_plan():
    plan = ReusePlan(4000, 0, (span(0, 3000),))
    marks = choose(
        selector_named("random"),
        plan,
        selector_named("random").score(plan, Signals()),
        SelectionSettings(0.2, 0, 0),
    )
    assert marks.sum() == 600
    for part in np.split(marks, 5):
        assert 70 < part.sum() < 170


# --- the registry --------------------------------------------------------------------------------


def test_the_registry_names_what_it_knows():
    assert selector_names() == NAMES
    with pytest.raises(ValueError, match="'best': allowed are all, contribution, dev"):
        selector_named("best")
    with pytest.raises(ValueError, match="registered already"):
        register_selector("seams", source="here")(lambda plan, signals: np.zeros(0))


def test_every_selector_has_a_file_and_says_where_it_comes_from():
    files = {path.stem for path in Path(selectors.__path__[0]).glob("*.py")}
    assert len(files) == len({"__init__", "registry", "choosing"}) + len(NAMES)
    for name in NAMES:
        selector = selector_named(name)
        assert selector.source
        assert selector.score.__doc__


# --- what a choice waits for ---------------------------------------------------------------------


def choice(name, attention="probe_pass", layers=24, check_layers=(1,), ratio=0.2, error=1.0):
    settings = SelectionSettings(ratio, 8, 8, error)
    return fitted(
        name,
        settings,
        attention=attention,
        check_layers=check_layers,
        max_deviation=9.0,
        probe_tokens=32,
        layers=layers,
    )


@pytest.mark.parametrize(
    ("name", "attention", "probes", "check_layers"),
    [
        ("seams", "probe_pass", False, ()),
        ("random", "check_layer", False, ()),
        ("query", "probe_pass", True, ()),
        ("query", "check_layer", True, ()),
        ("dhd", "probe_pass", True, (1,)),
        ("dhd", "check_layer", False, (1,)),
        ("deviation", "probe_pass", False, (1,)),
        ("influence", "probe_pass", False, (1,)),
    ],
)
def test_a_choice_waits_for_what_its_selector_needs(name, attention, probes, check_layers):
    made = choice(name, attention)
    assert (made.probes, made.check_layers) == (probes, check_layers)
    assert made.waits == bool(probes or check_layers)
    assert made.dense_layers == (1 if check_layers else 0)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_measured_where_nothing_is_to_be_chosen(name):
    assert not choice(name, ratio=0.0).waits
    assert not choice(name, ratio=1.0).waits
    assert choice(name, ratio=1.0, error=0.5).waits == bool(selector_named(name).needs)


def test_check_layers_that_would_leave_nothing_to_spare_are_left_out():
    assert choice("deviation", check_layers=(1, 22, 23, 40)).check_layers == (1, 22)
    instead = choice("deviation", layers=2)
    assert (instead.selector.name, instead.waits) == ("seams", False)
    assert choice("query", layers=2).probes


def test_needs_are_told_apart():
    assert {need.value for need in Need} == {
        "attention",
        "probe_attention",
        "deviation",
        "influence",
    }
