"""SGLang's own reservation, as an object."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.jobs import Running
from sglang_kvshare.scheduling.stock import NewTokenRatio, StockBudget

pytestmark = pytest.mark.unit


def running(output_tokens, max_new_tokens):
    return Running("r", 0, 100, output_tokens, max_new_tokens, 100, 10)


def test_the_ratio_decays_to_a_seventh_in_600_steps():
    ratio = NewTokenRatio.of()
    assert ratio.current == 0.7
    for _ in range(300):
        ratio.step()
    assert ratio.current == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(400):
        ratio.step()
    assert ratio.current == pytest.approx(0.098)
    ratio.idle()
    assert ratio.current == 0.7
    assert NewTokenRatio.of(conservativeness=2.0).current == 1.0


def test_a_retraction_sets_the_ratio_anew():
    ratio = NewTokenRatio.of()
    ratio.retracted([running(100, 200), running(50, 400)])
    assert ratio.current == pytest.approx((150 + 40) / 601)
    ratio.retracted([running(100, 100)])
    assert ratio.current == 1.0
    ratio.retracted([])
    assert ratio.current == 0.0


def test_running_requests_are_charged_a_share_of_what_they_may_generate():
    # 0.5 of 400 and of at most 4096.
    budget = StockBudget(3000, [running(100, 500), running(0, 10_000)], 0.5)
    assert not budget.admit(500, 251)
    assert budget.admit(500, 250)
    assert not budget.admit(0, 0)


def test_one_that_is_admitted_is_charged_all_it_may_generate():
    budget = StockBudget(1000, [], 0.7, page_tokens=16)
    # 100 tokens are 7 pages, and one page for rounding.
    assert budget.admit(100, 500)
    assert not budget.admit(100, 256)
    assert not budget.exhausted
    assert budget.admit(100, 255)
    # Rounded up only when it is charged: the last one may take more than there was.
    assert budget.exhausted


def test_the_answer_so_far_of_one_that_was_retracted_counts_once():
    assert StockBudget(1000, [], 0.7).admit(500, 900, output_tokens=450)
    assert not StockBudget(1000, [], 0.7).admit(500, 900)
