"""Which form is chosen: limits that always hold, and directions that costs must not turn round."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_launches import kept_rows

from sglang_kvshare.attention.launch_choice import (
    SLOT_BYTES,
    AttentionCosts,
    choose,
    cost_ns,
)
from sglang_kvshare.attention.launches import (
    AttentionPlan,
    Form,
    Sees,
    in_runs,
    in_two_parts,
    with_mask,
)

pytestmark = pytest.mark.unit
COSTS = AttentionCosts()


def scattered(tokens: int, share: float, seed: int = 0) -> np.ndarray:
    """Positions of ``share`` of the tokens, drawn one by one; the last is among them."""
    generator = np.random.default_rng(seed)
    kept = generator.random(tokens) < share
    kept[-1] = True
    return np.flatnonzero(kept)


def listed_bytes(plan: AttentionPlan) -> int:
    return SLOT_BYTES * sum(int(launch.key_counts.sum()) for launch in plan.launches)


def form(positions: np.ndarray, costs: AttentionCosts = COSTS, group: int = 4) -> Form:
    return choose(positions, [len(positions)], group=group, costs=costs).form


@settings(max_examples=60, deadline=None)
@given(kept_rows(), st.sampled_from([1, 4, 8]), st.data())
def test_the_cheapest_that_is_allowed_is_chosen(rows, group, data):
    costs = AttentionCosts(
        launch_ns=data.draw(st.sampled_from([0.0, 1e3, 1e5])),
        masked=data.draw(st.sampled_from([1.0, 1.25, 5.0])),
        block_rows=data.draw(st.integers(1, 8)),
        mask_limit_tokens=data.draw(st.integers(1, 60)),
        mask_limit_bytes=data.draw(st.integers(1, 200)),
        list_limit_bytes=data.draw(st.integers(1, 2000)),
    )
    chosen = choose(*rows, group=group, costs=costs)
    height = costs.block_rows
    while height < max(rows[1]) and listed_bytes(in_two_parts(*rows, height)) > (
        costs.list_limit_bytes
    ):
        height *= 2
    allowed = [in_two_parts(*rows, height)]
    for plan in (with_mask(*rows, costs.block_rows), in_runs(*rows)):
        (launch,) = plan.launches
        masked = launch.sees is Sees.MASKED
        if (
            launch.key_counts.sum() * SLOT_BYTES <= costs.list_limit_bytes
            and (not masked or launch.mask_bytes <= costs.mask_limit_bytes)
            and (not masked or launch.key_ends.max() <= costs.mask_limit_tokens)
        ):
            allowed.append(plan)
    assert chosen.form in {plan.form for plan in allowed}
    best = min(cost_ns(plan, group, costs) for plan in allowed)
    assert cost_ns(chosen, group, costs) == pytest.approx(best)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.4])
@pytest.mark.parametrize("tokens", [20_000, 32_768, 131_072])
def test_a_long_prompt_allocates_no_mask_of_whole_rows(tokens, share):
    positions = scattered(tokens, share)
    plan = choose(positions, [len(positions)], group=4)
    assert plan.form is not Form.MASK
    # Linear: a block's height for each key, and not the kept rows.
    bits = 8 * sum(launch.mask_bytes for launch in plan.launches)
    height = max(launch.row_counts.max() for launch in plan.launches)
    assert height <= COSTS.block_rows * (1 if tokens < 100_000 else 4)
    assert bits <= height * tokens + 8 * len(positions)
    assert listed_bytes(plan) <= COSTS.list_limit_bytes
    # The control: the mask of whole rows would be many times as large.
    (whole,) = with_mask(positions, [len(positions)], COSTS.block_rows).launches
    assert 8 * whole.mask_bytes > 5 * COSTS.block_rows * tokens


def test_the_limit_holds_and_not_the_cost_alone():
    """Where a mask would be cheapest, the length of one request still forbids it."""
    free = replace(COSTS, masked=0.1, launch_ns=1e9)
    assert form(scattered(16_000, 0.1), free) is Form.MASK
    assert form(scattered(16_500, 0.1), free) is not Form.MASK
    assert form(scattered(16_500, 0.1), replace(free, mask_limit_tokens=20_000)) is Form.MASK


def test_few_long_runs_need_no_mask():
    positions = np.concatenate([np.arange(0, 400), np.arange(3000, 3600), np.arange(7900, 8192)])
    assert form(positions) is Form.RUNS


def test_many_short_runs_share_tiles():
    assert form(scattered(8192, 0.1)) is not Form.RUNS
    assert form(scattered(32_768, 0.1)) is Form.TWO_PARTS


def test_a_few_rows_are_one_launch():
    assert form(np.array([3, 10, 40, 99])) in (Form.RUNS, Form.MASK)


def test_all_rows_are_one_run_a_request():
    positions = np.concatenate([np.arange(900), np.arange(100, 500)])
    plan = choose(positions, [900, 400], group=4)
    assert plan.form is Form.RUNS
    assert plan.launches[0].entries == 2


def test_costs_grow_with_rows_and_keys():
    def cost(tokens: int, share: float) -> float:
        positions = scattered(tokens, share)
        return cost_ns(choose(positions, [len(positions)], group=4), 4, COSTS)

    shares = [cost(8192, share) for share in (0.05, 0.1, 0.2, 0.4)]
    lengths = [cost(tokens, 0.1) for tokens in (2048, 8192, 32_768, 131_072)]
    assert shares == sorted(shares)
    assert lengths == sorted(lengths)


def test_a_choice_is_made_within_two_milliseconds():
    """A batch of 16 requests of 4,096 tokens, a tenth of the rows kept; the fastest of some."""
    parts = [scattered(4096, 0.1, seed) for seed in range(16)]
    positions, counts = np.concatenate(parts), [len(part) for part in parts]
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        choose(positions, counts, group=4)
        times.append(time.perf_counter() - begin)
    assert min(times) < 2e-3


def test_every_cost_says_what_it_is():
    for field in fields(AttentionCosts):
        assert f"{field.name}: " in (AttentionCosts.__doc__ or "")
