"""Parts of the simulator by themselves: gaps, the KV pool, copies, searches, fits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshare_eval.simulator.calibrate import Point, _fitted
from kvshare_eval.simulator.copies import Link
from kvshare_eval.simulator.costs import PS_PER_MS, load_costs
from kvshare_eval.simulator.decode_batch import steps_until
from kvshare_eval.simulator.experiments import ablation_sides, against, rate_at
from kvshare_eval.simulator.gaps import GapHistogram, LargestSince
from kvshare_eval.simulator.kv_cache import KvCache, Node
from kvshare_eval.simulator.results import Outcome

pytestmark = pytest.mark.unit


@settings(max_examples=200, deadline=None)
@given(
    first=st.integers(1, 10**12),
    rise=st.integers(0, 10**9),
    steps=st.integers(1, 300),
    weight=st.integers(1, 5),
)
def test_a_run_of_gaps_is_its_gaps_one_by_one(
    first: int, rise: int, steps: int, weight: int
) -> None:
    run, single = GapHistogram(), GapHistogram()
    run.add_run(first, rise, steps, weight)
    for step in range(steps):
        single.add(first + rise * step, weight)
    assert run.counts == single.counts


def test_percentiles_of_gaps_are_right_to_half_a_percent() -> None:
    gaps = GapHistogram()
    values = np.random.default_rng(1).lognormal(3, 1, 20_000)
    for value in values:
        gaps.add(round(value * PS_PER_MS), 1)
    for q in (0.5, 0.95, 0.99):
        assert gaps.quantile_ms(q) == pytest.approx(np.quantile(values, q), rel=0.006)
    assert gaps.share_up_to(20) == pytest.approx((values <= 20).mean(), abs=0.005)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=50), st.data())
def test_the_largest_since_a_step(gaps: list[int], data: st.DataObject) -> None:
    largest = LargestSince()
    for step, gap in enumerate(gaps):
        largest.add(step, gap)
    since = data.draw(st.integers(0, len(gaps) + 1))
    assert largest.since(since) == max(gaps[since:], default=0)


@settings(max_examples=200, deadline=None)
@given(
    span=st.integers(1, 10**14),
    first=st.integers(1, 10**10),
    rise=st.integers(0, 10**7),
)
def test_the_fewest_steps_that_take_so_long(span: int, first: int, rise: int) -> None:
    def took(steps: int) -> int:
        return steps * first + rise * (steps * (steps - 1) // 2)

    most = -(-span // first)
    steps = steps_until(span, first, rise, most)
    assert took(steps) >= span
    assert steps == 1 or took(steps - 1) < span
    # No more than are allowed, even where these do not take so long.
    fewer = max(1, steps // 2)
    assert steps_until(span, first, rise, fewer) == fewer


class CacheMachine(RuleBasedStateMachine):
    """Requests come, publish, grow and leave; slots are never lost, and locked ones stay."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(120, donors=True)
        self.held: list[tuple[list[Node], int]] = []
        self.answers = 0

    @rule(contents=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def comes(self, contents: list[int]) -> None:
        path = self.cache.matched(contents)
        self.cache.lock(path)
        rest = contents[len(path) :]
        if self.cache.available < 10 * len(rest):
            self.cache.unlock(path)
            return
        self.cache.take(10 * len(rest))
        path, _ = self.cache.publish(path, [(content, 10, True) for content in rest])
        self.held.append((path, 0))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.integers(1, 5))
    def grows(self, data: st.DataObject, tokens: int) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        path, own = self.held[place]
        if self.cache.available < tokens:
            with pytest.raises(ValueError, match="are free"):
                self.cache.take(tokens)
            return
        self.cache.take(tokens)
        self.held[place] = path, own + tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ends=st.booleans())
    def leaves(self, data: st.DataObject, ends: bool) -> None:
        path, own = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if ends:
            self.answers += 1
            self.cache.leave(path, own, -self.answers)
        else:
            self.cache.give(own)
            self.cache.unlock(path)

    @invariant()
    def sums_hold(self) -> None:
        self.cache.check()
        assert self.cache.private == sum(own for _, own in self.held)
        locked = {node.number: node.tokens for path, _ in self.held for node in path}
        assert self.cache.locked == sum(locked.values())
        exact = {node.content for node in self.cache._nodes.values() if node.exact}
        assert exact == set(self.cache._donors or {})
        assert all(
            node.key[0] == KvCache.ROOT or node.key[0] in self._numbers()
            for node in self.cache._nodes.values()
        ), "a child outlived its parent"

    def _numbers(self) -> set[int]:
        return {node.number for node in self.cache._nodes.values()}


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_the_oldest_is_evicted_and_a_used_one_stays() -> None:
    cache = KvCache(30)
    for content in (1, 2, 3):
        cache.take(10)
        path, _ = cache.publish([], [(content, 10, True)])
        cache.unlock(path)
    cache.touch(cache.matched((1,)))
    cache.take(10)
    assert [bool(cache.matched((content,))) for content in (1, 2, 3)] == [True, False, True]


def test_copies_of_one_direction_wait_for_each_other() -> None:
    costs = dataclasses.replace(
        load_costs("this-cpu"), copy_floor_ms=1, kv_bytes_per_token=1000, out_bytes_per_ms=1e5
    )
    link = Link(costs)
    assert link.copy_out(100, 1, 0) == 2 * PS_PER_MS
    assert link.copy_out(100, 2, 0) == 4 * PS_PER_MS
    assert link.tokens_out == 200
    assert link.done(2 * PS_PER_MS) == [(1, 100)]
    assert link.next_end_ps == 4 * PS_PER_MS
    assert link.copy_in(0, 0) == PS_PER_MS


def test_the_rate_at_which_attainment_falls() -> None:
    for border in (0.3, 5.0, 77.0):
        found = rate_at(lambda rate, at=border: float(rate <= at), 0.5, 4.0)
        assert found == pytest.approx(border, rel=0.02)


def test_an_ablation_has_each_part_off_and_alone() -> None:
    sides = ablation_sides()
    assert sides[:2] == ["stock", "kvshare"]
    assert len(sides) == len(set(sides)) == 2 + 2 * 6


def test_sides_are_compared_repeat_by_repeat() -> None:
    names = [field.name for field in dataclasses.fields(Outcome)]
    base = [Outcome(**dict.fromkeys(names, value)) for value in (1.0, 3.0)]
    ours = [Outcome(**dict.fromkeys(names, value)) for value in (0.5, 1.5)]
    found = against("ours", ours, base)
    assert found.ratios["ttft_p99_ms"].value == pytest.approx(2)
    assert found.gains["slo"] == pytest.approx(-100)


def test_a_fit_finds_costs_that_were_put_in() -> None:
    points = [
        Point("prefill", (1.0, n, n * n), 3 + 0.5 * n + 1e-4 * n * n) for n in (16, 256, 2048)
    ]
    points += [
        Point("decode", (1.0, b, b * c), 20 + 2 * b + 1e-3 * b * c)
        for b in (1, 8)
        for c in (32, 512)
    ]
    found = _fitted(load_costs("this-cpu"), points)
    assert found.worst_error("prefill") < 1e-6
    assert found.costs.prefill_row_ms == pytest.approx(0.5)
    assert found.costs.decode_request_ms == pytest.approx(2)
