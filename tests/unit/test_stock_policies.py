"""SGLang's own reservation, as an object."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.stock import NewTokenRatio, StockBudget

pytestmark = pytest.mark.unit


def test_the_ratio_decays_to_a_seventh_in_600_steps():
    ratio = NewTokenRatio.of()
    assert ratio.current == 0.7
    for _ in range(601):
        ratio.step()
    assert ratio.current == pytest.approx(0.098)
    ratio.idle()
    assert ratio.current == 0.7


def test_a_pass_ends_when_the_budget_does():
    budget = StockBudget(1000, [], 0.7)
    assert budget.admit(100, 500)
    assert not budget.admit(100, 500)
    assert budget.admit(100, 200)
    assert not budget.exhausted
