"""Plans, selections and what follows from them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.plan import ReusePlan, Span, everything, place
from sglang_kvshare.recompute.selectors import (
    SelectionSettings,
    Signals,
    choose,
    selector_named,
)

pytestmark = pytest.mark.unit


def span(start, length, source=0, slot=100, continues=False):
    slots = np.arange(slot, slot + length, dtype=np.int64)
    return Span(start, source, slots, continues=continues)


@st.composite
def plans(draw):
    edge = prefix = draw(st.integers(0, 20))
    spans = []
    for _ in range(draw(st.integers(0, 5))):
        start = edge + draw(st.integers(0, 9))
        length = draw(st.integers(1, 30))
        source, continues = draw(st.integers(0, 50)), bool(spans) and draw(st.booleans())
        spans.append(span(start, length, source, slot=1000 * len(spans), continues=continues))
        edge = start + length
    return ReusePlan(edge + draw(st.integers(1, 9)), prefix, tuple(spans))


SETTINGS = st.builds(
    SelectionSettings, st.floats(0, 1, allow_nan=False), st.integers(0, 12), st.integers(0, 12)
)


def select(name, plan, settings):
    """By the plan alone."""
    selector = selector_named(name)
    return choose(selector, plan, selector.score(plan, Signals()), settings)


def slow_seams(plan, settings):
    """The definition, token by token."""
    marked, first = [], 0
    for part in plan.spans:
        first = first if part.continues else part.start
        seam_tokens = max(0, first + settings.seam_tokens - part.start)
        width = max(seam_tokens, int(np.ceil(settings.recompute_ratio * part.length)))
        for position in range(part.start, part.end):
            seam = position < part.start + width
            tail = position >= plan.prompt_tokens - settings.tail_tokens
            marked.append(seam or tail)
    return marked


@given(plans(), SETTINGS)
def test_seams_equal_their_definition(plan, settings):
    chosen = select("seams", plan, settings).tolist()
    if settings.recompute_ratio == 0:
        assert not any(chosen)
    elif settings.recompute_ratio == 1:
        assert all(chosen)
    else:
        assert chosen == slow_seams(plan, settings)


@given(plans(), SETTINGS)
def test_the_counts_sum_to_the_prompt(plan, settings):
    placed = place(plan, select("seams", plan, settings))
    assert (
        plan.prefix_tokens + placed.reused_tokens + placed.recomputed_tokens + plan.new_tokens
        == plan.prompt_tokens
    )
    assert (placed.positions < plan.prompt_tokens - 1).all()
    assert (np.diff(placed.positions) > 0).all()


@given(plans(), SETTINGS, st.lists(st.integers(1, 40), max_size=6))
def test_chunks_partition_a_placement(plan, settings, sizes):
    placed = place(plan, select("seams", plan, settings))
    edges = np.cumsum([0, *sizes, plan.prompt_tokens])
    parts = [placed.within(int(a), int(b)) for a, b in pairwise(edges)]
    assert np.concatenate([part.positions for part in parts]).tolist() == placed.positions.tolist()
    assert np.concatenate([part.slots for part in parts]).tolist() == placed.slots.tolist()


def test_a_placement_pairs_each_position_with_its_donor():
    plan = ReusePlan(20, 2, (span(4, 3, source=40, slot=100), span(10, 2, source=7, slot=200)))
    placed = place(plan, np.array([True, False, False, False, True]))
    assert placed.positions.tolist() == [5, 6, 10]
    assert placed.sources.tolist() == [41, 42, 7]
    assert placed.slots.tolist() == [101, 102, 200]
    assert placed.exact_until == 5
    assert placed.recomputed_tokens == 2
    with pytest.raises(ValueError, match="shape"):
        place(plan, np.array([True]))


def test_nothing_spared_means_everything_is_exact():
    plan = ReusePlan(10, 0, (span(2, 5),))
    placed = place(plan, np.ones(5, dtype=bool))
    assert placed.exact_until is None
    assert placed.reused_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "prefix", "spans"),
    [
        (10, 3, (span(2, 4),)),  # reaches into the prefix
        (10, 0, (span(1, 4), span(4, 2))),  # overlap
        (10, 0, (span(5, 5),)),  # covers the last token
        (10, 0, (span(5, 0),)),  # empty
    ],
)
def test_an_impossible_plan_is_refused(prompt, prefix, spans):
    with pytest.raises(ValueError, match="span"):
        ReusePlan(prompt, prefix, spans)


@given(plans(), st.integers(0, 200))
def test_what_is_left_of_a_plan_when_a_part_is_computed(plan, position):
    left = plan.after(position)
    pairs = list(zip(plan.positions(), plan.sources(), plan.slots(), strict=True))
    assert list(zip(left.positions(), left.sources(), left.slots(), strict=True)) == [
        pair for pair in pairs if pair[0] >= position
    ]
    assert left.scored_from == plan.scored_from


@given(plans(), st.data())
def test_what_is_recomputed_of_a_placement_is_counted(plan, data):
    whole = everything(plan)
    assert whole.reused_tokens == plan.matched_tokens
    marks = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(whole.slots), max_size=len(whole.slots))),
        dtype=bool,
    )
    spared = whole.without(marks)
    assert spared.positions.tolist() == plan.positions()[~marks].tolist()
    assert spared.recomputed_tokens == marks.sum()
    first = data.draw(st.integers(0, 60))
    part = whole.indices(first, first + 30)
    assert whole.positions[part].tolist() == whole.within(first, first + 30).positions.tolist()
