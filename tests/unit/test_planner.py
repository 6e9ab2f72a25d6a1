"""Plans: which spans continue the one before them behind a short edit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.matching.planner import MOST_EDITED_TOKENS, plan_reuse
from sglang_kvshare.matching.run_index import RunIndex

pytestmark = pytest.mark.unit

SHORTEST = 4


def ints(values):
    return np.array(list(values), dtype=np.int64)


def indexed(*paths):
    """An index of paths that share no prefix; a path may be of several nodes."""
    index, slot, node = RunIndex(10_000, SHORTEST), 0, 0
    for path in paths:
        parent = -1
        for tokens in path:
            slots = np.arange(slot, slot + len(tokens))
            index.insert(node, b"", ints(tokens), slots, parent)
            slot, node, parent = slot + len(tokens), node + 1, int(slots[-1])
    return index


def planned(index, prompt):
    return plan_reuse(index, ints(prompt), 0, b"", 8).spans


def flags(index, prompt):
    return [span.continues for span in planned(index, prompt)]


PASSAGE = list(range(100, 160))


@pytest.mark.parametrize("cut", [60, 20, 37, 38, 42])
def test_an_edited_passage_continues_behind_its_edit(cut):
    index = indexed([part for part in (PASSAGE[:cut], PASSAGE[cut:]) if part])
    replaced = [*PASSAGE[:30], 1, 2, 3, *PASSAGE[33:], 0]
    inserted = [*PASSAGE[:30], 1, 2, 3, *PASSAGE[30:], 0]
    dropped = [*PASSAGE[:30], *PASSAGE[33:], 0]
    for prompt in (replaced, inserted, dropped):
        assert flags(index, prompt) == [False, True]


def test_an_edit_that_is_long_on_either_side_parts_two_spans():
    index = indexed([PASSAGE])
    most = MOST_EDITED_TOKENS
    for edit in range(most - 1, most + 3):
        shown = edit <= most
        assert flags(index, [*PASSAGE[:20], *[1] * edit, *PASSAGE[20:], 0]) == [False, shown]
        assert flags(index, [*PASSAGE[:20], *PASSAGE[20 + edit :], 0]) == [False, shown]


def test_a_span_of_another_donor_does_not_continue_wherever_it_stood():
    """Both stood just where a continuation would have."""
    other = [*range(300, 332), *range(400, 428)]
    index = indexed([PASSAGE], [other])
    prompt = [*PASSAGE[:30], 1, 2, *other[32:], 0]
    assert flags(index, prompt) == [False, False]
    # The positive control: the same positions of the same donor.
    assert flags(index, [*PASSAGE[:30], 1, 2, *PASSAGE[32:], 0]) == [False, True]


def test_a_sibling_does_not_continue_and_a_child_does():
    """Two branches of one trunk stand at the same positions."""
    index = RunIndex(1_000, SHORTEST)
    trunk, left, right = range(100, 120), range(200, 220), range(300, 320)
    index.insert(0, b"", ints(trunk), np.arange(20), -1)
    index.insert(1, b"", ints(left), np.arange(20, 40), 19)
    index.insert(2, b"", ints(right), np.arange(40, 60), 19)
    # Left's first half, then right's second half: siblings.
    assert flags(index, [*left[:10], 1, *right[11:], 0]) == [False, False]
    assert flags(index, [*trunk[:15], 1, *right[3:], 0]) == [False, True]


def test_what_comes_back_earlier_in_the_donor_does_not_continue():
    index = indexed([PASSAGE])
    assert flags(index, [*PASSAGE[30:], 1, *PASSAGE[:30], 0]) == [False, False]
    assert flags(index, [*PASSAGE[:20], 1, *PASSAGE[15:30], 0])[0] is False


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_continuations_equal_their_definition(data):
    """Against positions on paths that are written out."""
    lengths = st.lists(st.integers(1, 25), min_size=1, max_size=4)
    number, paths = 1_000, []
    for _ in range(data.draw(st.integers(1, 3))):
        path = []
        for length in data.draw(lengths):
            path.append(list(range(number, number + length)))
            number += length
        paths.append(path)
    index = indexed(*paths)
    whole = [[token for part in path for token in part] for path in paths]
    home = {token: (n, at) for n, path in enumerate(whole) for at, token in enumerate(path)}
    prompt = []
    for _ in range(data.draw(st.integers(1, 6))):
        path = data.draw(st.sampled_from(whole))
        begin = data.draw(st.integers(0, len(path) - 1))
        prompt += path[begin : begin + data.draw(st.integers(1, 25))]
        prompt += [0] * data.draw(st.integers(0, 10))
    spans = planned(index, [*prompt, 0])
    told = [span.continues for span in spans]
    expected = []
    for n, span in enumerate(spans):
        before = spans[n - 1] if n else None
        if before is None:
            expected.append(False)
            continue
        (path, last), (its, first) = home[prompt[before.end - 1]], home[prompt[span.start]]
        edited, dropped = span.start - before.end, first - last - 1
        most = MOST_EDITED_TOKENS
        expected.append(path == its and edited <= most and 0 <= dropped <= most)
    assert told == expected
