"""Statistics against plain references and simulations; every seed is fixed."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvshare_eval.serving.record import RequestRecord, WindowRecord
from kvshare_eval.stats import bootstrap as boot
from kvshare_eval.stats import paired, sample_size, serving

pytestmark = pytest.mark.unit


# --- bootstrap ------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n=st.integers(1, 12), q=st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.99, 1.0]))
def test_weighted_statistics_equal_those_of_repeated_cases(data, n, q):
    values = data.draw(st.lists(st.floats(0.01, 100), min_size=n, max_size=n))
    times = data.draw(
        st.lists(st.integers(0, 3), min_size=n, max_size=n).filter(lambda one: sum(one) > 0)
    )
    rows = np.array(values)[:, None]
    weights = np.array([times, [1] * n], dtype=float)
    repeated = np.repeat(values, times)
    for got, expected in (
        (boot.quantile(q), np.quantile(repeated, q)),
        (boot.mean, repeated.mean()),
        (boot.geometric_mean, stats.gmean(repeated)),
    ):
        assert got(rows, weights)[0] == pytest.approx(expected)
    assert boot.quantile(q)(rows, weights)[1] == pytest.approx(np.quantile(values, q))


def test_statistics_of_several_columns():
    rows = np.array([[1.0, 2.0, 0.5], [3.0, 4.0, 0.5]])
    weights = np.array([[1.0, 1.0], [2.0, 0.0]])
    assert boot.ratio_of_means(rows, weights) == pytest.approx([4 / 6, 1 / 2])
    assert boot.gap_recovered(rows, weights) == pytest.approx([3 / 5, 0.5 / 1.5])
    assert np.isnan(boot.ratio_of_means(np.zeros((1, 2)), np.ones((1, 1)))).all()
    parts = np.array([[1.0, 0], [3.0, 0], [10.0, 1]])
    assert boot.mean_over(1, boot.mean)(parts, np.ones((1, 3))) == pytest.approx([6.0])
    sides = np.array([[2.0, 0], [4.0, 0], [9.0, 1]])
    assert boot.ratio_of_quantiles(0.5)(sides, np.ones((1, 3))) == pytest.approx([3.0])


def clustered(random, groups, size, between, within):
    return random.normal(0, between, (groups, 1)) + random.normal(0, within, (groups, size))


@pytest.mark.parametrize("groups", [10, 30])
def test_intervals_cover_what_they_say(groups):
    """Means of clustered scores; intervals that take cases for independent do not cover them."""
    random = np.random.default_rng(groups)
    runs, size, covered, naive = 200, 4, 0, 0
    for run in range(runs):
        values = clustered(random, groups, size, 1.0, 0.5).ravel()
        found = boot.bootstrap_ci(
            boot.Sample.of(values, np.repeat(np.arange(groups), size).tolist()),
            boot.mean,
            resamples=400,
            seed=run,
        )
        covered += found.low <= 0 <= found.high
        alone = boot.bootstrap_ci(
            boot.Sample.of(values, list(range(len(values)))), boot.mean, resamples=400, seed=run
        )
        naive += alone.low <= 0 <= alone.high
    assert stats.binomtest(covered, runs, 0.95).pvalue > 1e-3, covered
    assert stats.binomtest(naive, runs, 0.95).pvalue < 1e-4, naive


def test_intervals_of_ratios_cover_what_they_say():
    random = np.random.default_rng(5)
    runs, groups, size, covered = 150, 40, 3, 0
    for _ in range(runs):
        logs = clustered(random, groups, size, 0.6, 1.0).ravel() - 0.3
        found = paired.geometric_mean_ratio(
            np.exp(logs), np.ones(len(logs)), np.repeat(np.arange(groups), size).tolist()
        )
        covered += math.log(found.low) <= -0.3 <= math.log(found.high)
    assert stats.binomtest(covered, runs, 0.95).pvalue > 1e-3, covered


def test_intervals_equal_the_normal_ones_for_many_groups():
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = boot.bootstrap_ci(boot.Sample.of(values, list(range(400))), boot.mean)
    assert (found.value, found.cases, found.groups) == (pytest.approx(values.mean()), 400, 400)
    error = values.std(ddof=1) / 20
    assert found.low == pytest.approx(values.mean() - 1.966 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.966 * error, abs=0.15 * error)


def test_large_samples_are_resampled_in_parts_with_the_same_result(monkeypatch):
    sample = boot.Sample.of(np.random.default_rng(2).normal(size=50), [i // 2 for i in range(50)])
    whole = boot.bootstrap_ci(sample, boot.mean, seed=3)
    monkeypatch.setattr(boot, "_CHUNK", 5000)
    assert boot.bootstrap_ci(sample, boot.mean, seed=3) == whole


def test_strata_keep_their_size():
    values = [0.0] * 5 + [1.0] * 5
    groups = list(range(10))
    free = boot.bootstrap_ci(boot.Sample.of(values, groups), boot.mean)
    held = boot.bootstrap_ci(boot.Sample.of(values, groups, values), boot.mean)
    assert free.low < 0.5 < free.high
    assert (held.low, held.high) == (0.5, 0.5)


def test_too_few_groups_have_no_interval():
    """All groups are on the same side of 0, which happens by chance: no certainty follows."""
    values = [1.0, 2.0, 3.0, 2.0, 2.0]
    found = boot.bootstrap_ci(boot.Sample.of(values, list("abcde")), boot.mean)
    assert (found.value, found.low, found.high) == (2.0, None, None)
    six = boot.bootstrap_ci(boot.Sample.of([*values, 2.0], list("abcdef")), boot.mean)
    assert six.above(0)
    assert not found.above(0)
    assert not found.below(9)


@pytest.mark.parametrize(
    ("values", "groups", "strata", "message"),
    [
        ([], [], None, "0 values"),
        ([1.0], ["a", "b"], None, "1 values, 2 groups"),
        ([1.0, math.nan], ["a", "b"], None, "finite"),
        ([1.0, 2.0], ["a", "a"], [0, 1], "two strata"),
    ],
)
def test_bad_samples(values, groups, strata, message):
    with pytest.raises(ValueError, match=message):
        boot.Sample.of(values, groups, strata)


# --- paired ---------------------------------------------------------------------------------------


def test_paired_figures_by_hand():
    new, base, groups = [1.0, 0.5, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], ["a", "a", "b", "c"]
    assert paired.paired_difference(new, base, groups).value == pytest.approx(-0.125)
    assert paired.fraction(new, base, groups).value == pytest.approx(2.5 / 3)
    assert paired.fraction(new, [0.0] * 4, groups) is None
    wins = paired.paired_wins(new, base, groups, lower_is_better=False)
    assert (wins.wins, wins.ties, wins.losses) == (1, 1, 2)
    assert wins.p == 1.0  # group c is ahead, a and b are behind: 1 of 3
    other = paired.paired_wins(new, base, groups, lower_is_better=True)
    assert (other.wins, other.losses) == (2, 1)


def test_the_sign_test_counts_groups_not_cases():
    together = paired.paired_wins([1.0] * 8, [0.0] * 8, ["g"] * 8, lower_is_better=False)
    apart = paired.paired_wins([1.0] * 8, [0.0] * 8, list(range(8)), lower_is_better=False)
    assert together.p == 1.0
    assert apart.p == pytest.approx(2 / 2**8)
    nothing = paired.paired_wins([1.0], [1.0], ["g"], lower_is_better=False)
    assert (nothing.ties, nothing.p) == (1, 1.0)


def test_one_exact_case_does_not_take_the_geometric_mean_to_zero():
    found = paired.geometric_mean_ratio([0.0, 0.02, 0.02], [0.04, 0.04, 0.04], [0, 1, 2])
    expected = statistics.geometric_mean([paired.KL_FLOOR / 0.04, 0.5, 0.5])
    assert found.value == pytest.approx(expected)
    equal = paired.geometric_mean_ratio([0.0, 1e-9] * 3, [1e-8, 0.0] * 3, list(range(6)))
    assert (equal.value, equal.low, equal.high) == (1.0, 1.0, 1.0)


def test_gap_recovered():
    full, floor = [1.0, 1.0, 0.8, 0.9] * 2, [0.0, 0.1, 0.0, 0.1] * 2
    groups = list(range(8))
    half = [(f + n) / 2 for f, n in zip(full, floor, strict=True)]
    for values, expected in ((full, 1.0), (floor, 0.0), (half, 0.5)):
        found = paired.performance_gap_recovered(values, full, floor, groups)
        assert found.value == pytest.approx(expected)
        assert found.low == pytest.approx(expected)
    assert paired.performance_gap_recovered(half, floor, full, groups) is None
    unclear = [1.0, 0.0, 1.0, 0.0] * 2, [0.0, 1.0, 0.0, 0.9] * 2
    assert paired.performance_gap_recovered([0.5] * 8, *unclear, groups) is None
    assert paired.performance_gap_recovered(half[:4], full[:4], floor[:4], groups[:4]) is None


# --- sample sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "icc"), [(1, 0.0), (4, 0.3)])
def test_required_cases_have_the_power_that_they_say(size, icc):
    spread = sample_size.Spread(sd=0.4, cases_per_group=size, icc=icc)
    margin = 0.15
    groups = sample_size.required_cases(margin, spread) // size
    random = np.random.default_rng(size)
    between, within = 0.4 * math.sqrt(icc), 0.4 * math.sqrt(1 - icc)
    means = np.array(
        [clustered(random, groups, size, between, within).mean(axis=1) for _ in range(3000)]
    )
    error = means.std(axis=1, ddof=1) / math.sqrt(groups)
    lower = means.mean(axis=1) - stats.t.ppf(0.975, groups - 1) * error
    power = float((lower > -margin).mean())
    assert 0.77 < power < 0.84
    ignoring = sample_size.required_cases(margin, sample_size.Spread(0.4, 1, 0.0)) // size
    assert (size == 1) == (ignoring == groups)


def test_half_width_is_that_of_the_simulated_interval():
    spread = sample_size.Spread(sd=1.15, cases_per_group=3, icc=0.2)
    random = np.random.default_rng(7)
    widths = []
    for _ in range(500):
        between, within = 1.15 * math.sqrt(0.2), 1.15 * math.sqrt(0.8)
        means = clustered(random, 20, 3, between, within).mean(axis=1)
        widths.append(stats.t.ppf(0.975, 19) * means.std(ddof=1) / math.sqrt(20))
    assert sample_size.half_width(60, spread) == pytest.approx(statistics.mean(widths), rel=0.04)
    assert sample_size.half_width(15, spread) == math.inf


def test_a_plan_says_what_the_sample_can_show():
    lines = sample_size.plan_lines(60, 15, gold=True)
    assert len(lines) == 3
    assert "60 cases in 15 groups of 4.0: a design effect of 1.30" in lines[0]
    need = sample_size.required_cases(0.1, sample_size.Spread(sample_size.score_sd(), 4.0))
    assert f"below 0.10 takes {need:,} cases" in lines[1]
    assert len(sample_size.plan_lines(60, 15, gold=False)) == 2
    assert "no intervals" in sample_size.plan_lines(20, 5, gold=True)[0]
    with pytest.raises(ValueError, match="above 0"):
        sample_size.required_cases(0, sample_size.Spread(1))


# --- serving --------------------------------------------------------------------------------------


def request(number, ttft, *, tbt=(10.0,), error=None, report=None, cached=0):
    return RequestRecord(
        key=f"w/{number}",
        window="w",
        number=number,
        due_ms=0.0,
        sent_ms=0.0,
        ttft_ms=ttft,
        tbt_ms=tuple(tbt),
        e2e_ms=None if ttft is None else ttft + sum(tbt),
        prompt_tokens=100,
        output_tokens=len(tbt) + 1,
        cached_tokens=cached,
        report=report or {},
        error=error,
    )


def load(requests, *, seconds=10.0, cpu=4.0):
    window = WindowRecord("w", "rag", "reuse", 1.0, 0.5, 100, 0, seconds, scheduler_cpu_s=cpu)
    return serving.Load(((window, tuple(requests)),))


def test_slo_goodput_and_throughput():
    one = load(
        [
            request(0, 100.0),
            request(1, 300.0),
            request(2, 100.0, tbt=(10.0, 10.0, 70.0)),
            request(3, 100.0, tbt=()),
            request(4, None, error="refused"),
        ]
    )
    slo = serving.Slo(200.0, 20.0)
    assert [slo.met(r) for r in one.requests] == [True, False, False, True, False]
    assert serving.attainment(one, slo) == pytest.approx(0.4)
    assert serving.goodput(one, slo) == pytest.approx(0.2)
    assert serving.attainment(one, serving.Slo(None, None)) == pytest.approx(0.8)
    assert serving.attainment(one, serving.Slo(None, 40.0)) == pytest.approx(0.8)
    assert serving.attainment(one, serving.Slo(None, 40.0, "p99")) == pytest.approx(0.6)
    done = serving.throughput(one)
    assert (done.requests, done.prompt_tokens, done.output_tokens) == pytest.approx((0.4, 40, 0.9))
    assert serving.cpu_seconds_per_request(one) == pytest.approx(1.0)
    assert serving.cpu_seconds_per_request(load([request(0, 1.0)], cpu=None)) is None
    assert serving.attainment(load([]), slo) is None
    assert serving.throughput(load([], seconds=0.0)) is None


def test_hit_shares_of_both_kinds_of_server():
    report = {"prefix_tokens": 10, "reused_tokens": 60, "recomputed_tokens": 10, "new_tokens": 20}
    found = serving.hit_shares(load([request(0, 1.0, report=report)]))
    assert found == {"prefix": 0.1, "reused": 0.6, "recomputed": 0.1, "new": 0.2}
    stock = serving.hit_shares(load([request(0, 1.0, cached=25), request(1, None, error="x")]))
    assert stock == {"prefix": 0.25, "reused": 0.0, "recomputed": 0.0, "new": 0.75}
    assert serving.hit_shares(load([])) is None


def test_percentiles():
    times, blocks = serving.ttft(load([request(i, float(i)) for i in range(100)]))
    assert len(set(blocks)) == 10
    found = serving.percentile(times, blocks, 0.95)
    assert found.value == pytest.approx(np.quantile(range(100), 0.95))
    assert found.low < found.value <= found.high
    assert serving.percentile(times, blocks, 0.99) is not None
    assert serving.percentile(times[:50], blocks[:50], 0.99) is None
    gaps, _ = serving.tbt(load([request(0, 1.0, tbt=(1.0, 2.0)), request(1, None, error="x")]))
    assert gaps == [1.0, 2.0]


def test_percentile_intervals_cover_under_queueing():
    """Neighbours are alike, as they are in a queue; blocks are what makes the interval honest."""
    random = np.random.default_rng(11)
    runs, n, covered, naive = 150, 200, 0, 0
    for _ in range(runs):
        noise = random.normal(size=n + 6)
        times = 100 + sum(noise[i : n + i] for i in range(7)) / math.sqrt(7)
        size = round(math.sqrt(n))
        values, blocks = serving.ttft(load([request(i, t) for i, t in enumerate(times.tolist())]))
        assert len(set(blocks)) == math.ceil(n / size)
        found = boot.bootstrap_ci(boot.Sample.of(values, blocks), boot.quantile(0.5), resamples=300)
        covered += found.low <= 100 <= found.high
        alone = boot.bootstrap_ci(
            boot.Sample.of(values, list(range(n))), boot.quantile(0.5), resamples=300
        )
        naive += alone.low <= 100 <= alone.high
    assert covered / runs > 0.87
    assert naive / runs < 0.75


def test_ratios_by_repeat():
    found = serving.paired_ratio([2.0, 2.2, 1.8], [1.0, 1.0, 1.0])
    logs = np.log([2.0, 2.2, 1.8])
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    assert found.value == pytest.approx(math.exp(logs.mean()))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert serving.paired_ratio([2.0], [1.0]).low is None
    with pytest.raises(ValueError, match="above 0"):
        serving.paired_ratio([0.0], [1.0])


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([1.0, 0.95, 0.85, 0.2], serving.Knee(2.5)),
        ([1.0, 0.8, 0.95, 0.35], serving.Knee(3 + 0.05 / 0.6)),
        ([1.0, 1.0, 1.0, 0.9], serving.Knee(4.0, at_least=True)),
        ([0.5, 0.4, 0.3, 0.2], serving.Knee(1.0, below=True)),
    ],
)
def test_knee(figures, expected):
    found = serving.knee([1.0, 2.0, 3.0, 4.0], figures, serving.ATTAINED)
    assert (found.at_least, found.below) == (expected.at_least, expected.below)
    assert found.rate == pytest.approx(expected.rate)
    assert serving.knee([], [], 0.9) is None
