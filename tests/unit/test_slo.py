"""Service level objectives: precedence, and what can still be met."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.slo import Slo, SloBook, feasible

pytestmark = pytest.mark.unit


def test_request_before_tenant_before_default():
    book = SloBook(Slo(1000, 100), {"a": Slo(tbt_ms=50)})
    assert book.of("a") == Slo(1000, 50)
    assert book.of("a", Slo(ttft_ms=10)) == Slo(10, 50)
    assert book.of("a", Slo(tbt_ms=70)) == Slo(1000, 70)
    assert book.of("b") == Slo(1000, 100)
    assert SloBook().of("b") == Slo()


def test_an_slo_is_feasible_as_long_as_time_is_left():
    assert feasible(500, 500, 1000)
    assert not feasible(501, 500, 1000)
    assert feasible(1e9, 1e9, None)
