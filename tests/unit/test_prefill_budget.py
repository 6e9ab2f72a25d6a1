"""Prefill beside decoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.forward_cost import ForwardCost, Load
from sglang_kvshare.scheduling.prefill_budget import prefill_tokens

pytestmark = pytest.mark.unit


def test_as_much_as_the_tightest_slo_leaves():
    # One millisecond a token; of 100 ms 80 may be used, 20 go to decoding.
    assert prefill_tokens(lambda rows, _: rows, 20, 100, 512, floor_tokens=16) == 60
    # Nobody to wait for, or nothing known of forwards.
    assert prefill_tokens(lambda rows, _: rows, 20, None, 512) == 512
    assert prefill_tokens(ForwardCost(), 20, 100, 512) == 512


def test_a_long_context_makes_the_chunk_smaller():
    def cost(rows, context):
        return rows * context / 100

    assert prefill_tokens(cost, 0, 1000, 512, context_tokens=0) == 282
    assert prefill_tokens(cost, 0, 1000, 512, context_tokens=1000, floor_tokens=1) == 74


def test_a_little_goes_in_any_case():
    assert prefill_tokens(lambda rows, _: rows, 200, 100, 512, floor_tokens=16) == 16
    assert prefill_tokens(lambda rows, _: rows, 200, 100, 8, floor_tokens=16) == 8


def test_forwards_are_told_by_what_was_measured():
    forwards = ForwardCost()
    for rows in (16, 64, 256, 1024) * 4:
        forwards.observe(Load.of(rows, rows), 2 + rows / 10, narrowed=False)
    assert prefill_tokens(forwards, 20, 100, 2048) == pytest.approx(580, rel=0.05)


@given(
    st.floats(0, 50),
    st.floats(1, 500),
    st.integers(1, 3000),
    st.integers(0, 2000),
    st.integers(1, 99),
)
def test_it_is_the_largest_that_keeps_the_slo(decode_ms, slo_ms, limit, context, floor):
    def cost(rows, context):
        return 0.05 * rows + 1e-5 * rows * context

    def keeps(tokens):
        return decode_ms + cost(tokens, context + tokens) <= 0.8 * slo_ms + 1e-9

    tokens = prefill_tokens(cost, decode_ms, slo_ms, limit, context, floor)
    assert min(floor, limit) <= tokens <= limit
    if tokens > min(floor, limit):
        assert keeps(tokens)
    if tokens < limit:
        assert not keeps(tokens + 1)
