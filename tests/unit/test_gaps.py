"""Short runs beside longer ones of the same donor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.matching.gaps import GapSettings
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex

pytestmark = pytest.mark.unit

SHORTEST = 16
GAPS = GapSettings(min_run_tokens=4, min_coverage=0.5)
PASSAGE = list(range(100, 400))


def ints(values):
    return np.array(list(values), dtype=np.int64)


def indexed(*paths, depth=0):
    """Paths of one or more nodes each."""
    index, slot, node = RunIndex(10_000, SHORTEST), 0, 0
    for path in paths:
        parent = -1
        for tokens in path:
            slots = np.arange(slot, slot + len(tokens))
            index.insert(node, b"", ints(tokens), slots, parent, depth=depth)
            slot, node, parent = slot + len(tokens), node + 1, int(slots[-1])
    return index


def found(index, prompt, gaps=GAPS, prefix=0, **options):
    spans = plan_reuse(index, ints(prompt), prefix, b"", 8, gaps=gaps, **options).spans
    return [(s.start, s.source, s.length, s.kind) for s in spans]


def with_edits(passage, *places):
    told = list(passage)
    for place in places:
        told[place] = 1
    return told


@pytest.mark.parametrize("cut", [300, 120, 46, 50])
def test_what_lies_between_two_runs_is_aligned_with_their_donor(cut):
    index = indexed([part for part in (PASSAGE[:cut], PASSAGE[cut:]) if part])
    prompt = [7, *with_edits(PASSAGE, 40, 46, 53), 8]
    alone = [(1, 0, 40, "exact_run"), (55, 54, 246, "exact_run")]
    assert found(index, prompt, gaps=None) == alone
    assert found(index, prompt) == [
        alone[0],
        (42, 41, 5, "semantic"),
        (48, 47, 6, "semantic"),
        alone[1],
    ]


def test_runs_go_on_beyond_both_ends_for_as_long_as_most_is_equal():
    index = indexed([PASSAGE])
    # Every seventh token is another one, but for twenty in the middle.
    places = [n for n in range(0, 300, 7) if not 140 <= n < 160]
    spans = found(index, [7, *with_edits(PASSAGE, *places), 8])
    assert sum(kind == "exact_run" for *_, kind in spans) == 1
    matched = sum(length for _, _, length, _ in spans)
    assert matched == 300 - len(places)
    # Every fourth: runs of three are no runs.
    places = [n for n in range(0, 300, 4) if not 140 <= n < 160]
    assert len(found(index, [7, *with_edits(PASSAGE, *places), 8])) == 1


def test_fragments_that_cover_little_do_not_count():
    index = indexed([PASSAGE])
    rest = [token if n % 20 < 6 else 1 for n, token in enumerate(PASSAGE[100:])]
    prompt = [7, *PASSAGE[:100], *rest, 8]
    spans = found(index, prompt)
    assert spans == [(1, 0, 106, "exact_run")]
    # The positive control: the same fragments, closer together.
    rest = [token if n % 8 < 6 else 1 for n, token in enumerate(PASSAGE[100:])]
    assert len(found(index, [7, *PASSAGE[:100], *rest, 8])) > 20


def test_a_gap_that_only_one_side_has_is_no_run():
    index = indexed([PASSAGE])
    assert len(found(index, [7, *PASSAGE[:50], *range(1000, 1040), *PASSAGE[50:], 8])) == 2
    assert len(found(index, [7, *PASSAGE[:50], *PASSAGE[90:], 8])) == 2


def test_another_donor_fills_no_gap():
    other = list(range(500, 800))
    index = indexed([PASSAGE], [other])
    between = other[60:70]
    prompt = [7, *PASSAGE[:50], *between, *PASSAGE[60:], 8]
    assert len(found(index, prompt)) == 2
    assert len(found(index, [7, *PASSAGE[:50], 1, *PASSAGE[51:59], 1, *PASSAGE[60:], 8])) == 3


def test_deeper_tokens_fill_a_gap_only_for_who_accepts_them():
    index = indexed([PASSAGE], depth=1)
    prompt = [7, *with_edits(PASSAGE, 40, 46, 53), 8]
    deeper = GapSettings(4, 0.5, max_depth=1)
    assert len(found(index, prompt, gaps=deeper, max_depth=1)) == 4
    assert found(index, prompt) == []


def test_the_prefix_and_the_scored_tokens_are_left_alone():
    index = indexed([PASSAGE])
    prompt = with_edits(PASSAGE, 40, 46, 53)
    spans = found(index, prompt, prefix=44)
    assert min(start for start, *_ in spans) >= 44
    assert (47, 47, 6, "semantic") in spans
    prompt = with_edits(PASSAGE[:100], 60, 66)
    last = found(index, prompt, scored_tokens=30)[-1]
    assert last == (67, 67, 3, "semantic") or last[0] + last[2] <= 70


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_spans_hold_what_the_prompt_does_and_share_no_position(data):
    """Whatever the edits: each span's tokens are its donor's, from one place on."""
    paths, number = [], 10
    for _ in range(data.draw(st.integers(1, 3))):
        path = []
        for length in data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)):
            path.append(list(range(number, number + length)))
            number += length
        paths.append(path)
    index = indexed(*paths)
    whole = [[token for part in path for token in part] for path in paths]
    content = dict(enumerate(token for path in whole for token in path))
    place = {token: (n, at) for n, path in enumerate(whole) for at, token in enumerate(path)}
    prompt = []
    for _ in range(data.draw(st.integers(1, 4))):
        piece = list(data.draw(st.sampled_from(whole)))
        for _ in range(data.draw(st.integers(0, 8))):
            at = data.draw(st.integers(0, len(piece) - 1))
            edit = data.draw(st.sampled_from(["replace", "drop", "insert"]))
            piece[at : at + (edit != "insert")] = [] if edit == "drop" else [1]
            if not piece:
                break
        prompt += piece
    prompt.append(0)
    prefix = data.draw(st.integers(0, len(prompt) - 1))
    alone = plan_reuse(index, ints(prompt), prefix, b"", 8)
    plan = plan_reuse(index, ints(prompt), prefix, b"", 8, gaps=GAPS)
    again = plan_reuse(index, ints(prompt), prefix, b"", 8, gaps=GAPS)
    assert plan.slots().tolist() == again.slots().tolist()
    kept = [s for s in plan.spans if s.kind == "exact_run"]
    assert [(s.start, s.length) for s in kept] == [(s.start, s.length) for s in alone.spans]
    for span in plan.spans:
        tokens = prompt[span.start : span.end]
        assert [content[slot] for slot in span.slots.tolist()] == tokens
        homes = [place[token] for token in tokens]
        assert homes == [(homes[0][0], span.source + n) for n in range(len(homes))]
        if span.kind == "semantic":
            assert span.length >= 4
            assert GAPS.min_coverage <= span.similarity <= 1
