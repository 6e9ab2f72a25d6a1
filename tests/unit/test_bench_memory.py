"""The slope that decides whether memory is flat."""

from __future__ import annotations

import random

import pytest

from kvshare_eval.serving.bench_memory import fitted_growth

pytestmark = pytest.mark.unit
REQUESTS = list(range(250, 25_001, 250))


def noisy(slope: float, seed: int, step: bool = False) -> list[float]:
    """A megabyte of noise on a line; ``step``: a level that stays for a while."""
    rng = random.Random(seed)
    level, found = 0.0, []
    for count in REQUESTS:
        noise = rng.gauss(0, 1e6)
        level = 0.9 * level + noise if step else noise
        found.append(1e9 + slope * count + level)
    return found


def test_a_line_is_found_exactly():
    growth = fitted_growth(REQUESTS, [1e9 + 40.0 * count for count in REQUESTS])
    assert growth.slope == pytest.approx(40.0)
    assert growth.high == pytest.approx(40.0, abs=1e-3)


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("slope", [0.0, 500.0])
def test_the_interval_holds_the_slope_nineteen_times_in_twenty(slope, step):
    inside = sum(
        growth.low <= slope <= growth.high
        for seed in range(200)
        for growth in [fitted_growth(REQUESTS, noisy(slope, seed, step))]
    )
    assert inside >= (188 if not step else 170)


def test_a_leak_of_a_request_is_above_the_limit():
    """A `Req` that stays is 5,000 bytes and more; even a tenth of one is seen."""
    from kvshare_eval.serving.bench_memory import MAX_GROWTH

    for seed in range(20):
        assert fitted_growth(REQUESTS, noisy(500.0, seed)).low > MAX_GROWTH
        assert fitted_growth(REQUESTS, noisy(0.0, seed)).high < MAX_GROWTH


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="too few"):
        fitted_growth([1, 2, 3], [4, 5, 6])
