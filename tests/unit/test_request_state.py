"""What a request's state keeps over a preemption whose values come back, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.state import RequestState
from sglang_kvshare.request import parse_request_options

pytestmark = pytest.mark.unit


def prefilled(exact_until: int | None, depth: int) -> RequestState:
    state = RequestState(parse_request_options(None, KVShareConfig()))
    state.begin_prefill(20, 0, 0, generation=3)
    state.reported = True
    state.exact_until, state.depth, state.planned_depth = exact_until, depth, depth
    if exact_until is not None:
        state.placed.append(np.arange(exact_until, exact_until + 5))
    state.decode_steps = 7
    return state


@pytest.mark.parametrize(
    ("exact_until", "depth", "found", "found_depth", "expected", "expected_depth"),
    [
        # All of it is exact, whatever of it is found in the tree.
        (None, 0, 10, 0, None, 0),
        # Approximate from 30 on: what is found before that changes nothing,
        (30, 1, 10, 0, 30, 1),
        # and what others computed exactly since then moves the border, not what lies behind it.
        (30, 1, 50, 0, 50, 1),
        # Behind a branch that rests on more approximations.
        (30, 1, 30, 2, 30, 2),
    ],
)
def test_approximate_values_stay_so_when_they_come_back(
    exact_until, depth, found, found_depth, expected, expected_depth
):
    state = prefilled(exact_until, depth)
    lasting = state.lasting()
    state.end()
    assert (state.exact_until, state.placed, state.depth) == (None, [], 0)
    state.go_on(lasting, exact_tokens=found, depth=found_depth)
    assert (state.exact_until, state.depth) == (expected, expected_depth)
    assert state.placed_tokens == (0 if exact_until is None else 5)
    assert (state.generation, state.decode_steps, state.again) == (3, 7, False)


def test_a_prefill_that_begins_anew_forgets_them():
    state = prefilled(30, 1)
    state.end()
    state.begin_prefill(10, 0, 0, generation=4)
    assert (state.exact_until, state.placed_tokens, state.generation) == (None, 0, 4)
    assert state.again
