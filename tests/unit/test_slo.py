"""Service level objectives: precedence, what can still be met, and attainment."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.slo import Attainment, Slo, SloBook, feasible

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


def test_attainment_is_counted_by_tenant_and_kind():
    book, slo = SloBook(), Slo(100, 10)
    for ttft, gap in ((100, 11), (101, 10), (1, 5)):
        book.observe_ttft("a", ttft, slo)
        book.observe_tbt("a", gap, slo)
    book.observe_ttft("b", 1, slo)
    book.lost("b", "ttft")
    # Where nothing was promised there is nothing to count.
    book.observe_ttft("c", 1, Slo(None, 10))
    book.observe_tbt("c", 1, Slo(100, None))
    assert book.attainment == {
        ("a", "ttft"): Attainment(2, 1),
        ("a", "tbt"): Attainment(2, 1),
        ("b", "ttft"): Attainment(1, 1),
    }
    assert book.attainment["b", "ttft"].share == 0.5
    assert Attainment().share == 1.0


def test_memory_is_bounded():
    book = SloBook()
    for number in range(5000):
        book.observe_ttft(f"t{number}", 1, Slo(ttft_ms=2))
    assert len(book.attainment) <= 2050
    assert sum(each.met for each in book.attainment.values()) == 5000
