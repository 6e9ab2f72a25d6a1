"""Prefill beside decoding."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.forward_cost import ForwardCost
from sglang_kvshare.scheduling.prefill_budget import prefill_tokens

pytestmark = pytest.mark.unit


def test_as_much_as_the_tightest_slo_leaves():
    # One millisecond a token; of 100 ms 80 may be used, 20 go to decoding.
    assert prefill_tokens(lambda rows, _: rows, 20, 100, 512, floor_tokens=16) == 60
    assert prefill_tokens(lambda rows, _: rows, 20, None, 512) == 512
    assert prefill_tokens(ForwardCost(), 20, 100, 512) == 512
    assert prefill_tokens(lambda rows, _: rows, 200, 100, 512, floor_tokens=16) == 16
