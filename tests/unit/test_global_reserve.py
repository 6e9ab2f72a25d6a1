"""The reserve for what estimates miss."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.reserve import GlobalReserve

pytestmark = pytest.mark.unit


def test_it_grows_with_overruns_and_less_than_with_requests():
    reserve = GlobalReserve(100_000, z=2.0)
    assert (reserve.tokens(0), reserve.tokens(1)) == (0, 64)
    for number in range(256):
        reserve.observe(100 if number % 20 == 0 else -50)
    one, hundred = reserve.tokens(1), reserve.tokens(100)
    # Mean 5, standard deviation 22.
    assert one == pytest.approx(49, abs=3)
    assert hundred == pytest.approx(945, abs=20)
    assert reserve.tokens(10**9) == 5000
