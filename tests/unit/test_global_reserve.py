"""The reserve for what estimates miss."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvshare.scheduling.reserve import GlobalReserve

pytestmark = pytest.mark.unit


def seen(*overruns, **more):
    reserve = GlobalReserve(100_000, **more)
    for overrun in overruns:
        reserve.observe(overrun)
    return reserve


def test_it_grows_with_overruns_and_less_than_with_requests():
    """Mean 5.1 and standard deviation 22 of every twentieth answer 100 tokens too long."""
    reserve = seen(*(100 if number % 20 == 0 else -50 for number in range(256)))
    assert reserve.tokens(1) == pytest.approx(49, abs=3)
    assert reserve.tokens(100) == pytest.approx(945, abs=20)
    assert reserve.tokens(100) < 25 * reserve.tokens(1)


def test_bounds():
    assert seen().tokens(0) == 0
    assert seen().tokens(1) == seen(*[500] * 15).tokens(1) == 64
    assert seen(*[500] * 16).tokens(1) == 500
    assert seen(*[500] * 16).tokens(10**9) == 5000
    # Estimates that are never too short need none.
    assert seen(*[-5] * 16).tokens(100) == 0
    assert GlobalReserve(0).tokens(5) == 0


@pytest.mark.parametrize("running", [1, 10, 100])
def test_it_is_enough_in_all_but_few_cases(running):
    """Sums of that many overruns, drawn from what was observed."""
    draw = np.random.default_rng(0)
    overruns = np.where(draw.random(4000) < 0.05, draw.exponential(80, 4000), 0).astype(int)
    kept = seen(*overruns[-256:].tolist()).tokens(running)
    sums = draw.choice(overruns, (2000, running)).sum(axis=1)
    assert (sums > kept).mean() < 0.06
    # And far less than what each for itself would need.
    assert running == 1 or kept <= running * np.quantile(overruns, 0.97)


def test_it_follows_a_change():
    reserve = seen(*[400] * 300)
    before = reserve.tokens(10)
    for _ in range(256):
        reserve.observe(0)
    assert (before, reserve.tokens(10)) == (4000, 0)
