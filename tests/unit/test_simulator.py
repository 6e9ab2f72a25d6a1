"""The simulator: nothing is lost, jumps change nothing, and what has a closed form is met."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare_eval.errors import EvalError
from kvshare_eval.simulator.costs import PS_PER_MS, Costs, load_costs, presets
from kvshare_eval.simulator.felt import Felt
from kvshare_eval.simulator.machine import Machine
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.results import outcome
from kvshare_eval.simulator.settings import PARTS, Flags, side_named
from kvshare_eval.simulator.workloads import make_workload

pytestmark = pytest.mark.unit

#: Round figures, so that schedules can be reckoned by hand.
COSTS = Costs(
    name="round",
    prefill_floor_ms=10,
    prefill_row_ms=1,
    prefill_pair_ms=0,
    decode_floor_ms=5,
    decode_request_ms=1,
    decode_context_ms=0,
    kv_bytes_per_token=1000,
    pool_tokens=10_000,
    out_bytes_per_ms=100_000,
    in_bytes_per_ms=100_000,
    chunked_prefill_tokens=512,
    max_prefill_tokens=1024,
    max_running=64,
)
GROWING = dataclasses.replace(
    COSTS, prefill_pair_ms=0.001, decode_context_ms=0.003, pass_ms=0.2, copy_floor_ms=0.1
)
SIDES = [
    "stock",
    "lpm",
    "kvshare",
    "kvshare:reuse=true,order=effective-cost",
    "kvshare:preempt=swap,host_pool_tokens=150",
    "stock:preempt=swap,host_pool_tokens=100000",
    *(f"stock+{part}" for part in PARTS),
    *(f"kvshare-{part}" for part in PARTS),
]


def made(
    arrived_ms: list[float],
    prompt: list[int],
    output: list[int],
    max_new: list[int] | None = None,
    **more: object,
) -> Requests:
    return Requests(
        name="made",
        arrived_ps=np.array([round(at * PS_PER_MS) for at in arrived_ms], dtype=np.int64),
        prompt=np.array(prompt, dtype=np.int64),
        output=np.array(output, dtype=np.int64),
        max_new=np.array(max_new or output, dtype=np.int64),
        ignore_eos=max_new is None,
        **more,  # type: ignore[arg-type]
    )


def run(
    requests: Requests,
    side: str = "stock",
    costs: Costs = COSTS,
    jumps: bool = True,
    **flags: object,
) -> Felt:
    machine = Machine(
        requests, costs, Flags.of(costs, **flags), side_named(side), jumps=jumps, check=True
    )
    felt = machine.run()
    # Whatever happened, everything is given back.
    assert machine.cache.free == machine.cache.capacity
    assert machine.cache.private == machine.cache.locked == machine.link.tokens_out == 0
    assert machine.host_pool.used_tokens == 0
    return felt


def ms(times_ps: list[int]) -> list[float]:
    return [round(at / PS_PER_MS, 6) for at in times_ps]


# --- by hand --------------------------------------------------------------------------------------


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    felt = run(made([7], [100], [5]))
    assert ms(felt.first_ps) == [7 + 110]
    assert ms(felt.end_ps) == [117 + 4 * 6]
    assert ms(felt.gap_ps) == [6]
    assert felt.gaps.total == 4
    assert (felt.prefills, felt.steps, felt.rows) == (1, 4, 100)


def test_prefill_goes_before_decoding_and_the_first_one_feels_it() -> None:
    felt = run(made([0, 111], [100, 200], [5, 2]))
    # 110: first token of 0; a step to 116; then 200 rows to 326, and steps of two.
    assert ms(felt.first_ps) == [110, 326]
    assert ms(felt.end_ps) == [326 + 7 + 6 + 6, 333]
    assert ms(felt.gap_ps) == [333 - 116, 7]


def test_a_long_prompt_is_computed_in_chunks_and_decoding_waits_for_all() -> None:
    felt = run(made([0, 100], [50, 1100], [3, 1]))
    # 60: first token; steps until 102 would be past; at 66 nothing waits, at 72 request 0 ends.
    assert ms(felt.end_ps)[0] == 72
    # 100: 512 rows, 512 rows, 76 rows, each with the floor.
    assert ms(felt.first_ps)[1] == 100 + 522 + 522 + 86


def test_a_chunk_leaves_its_rest_to_the_next_waiting() -> None:
    felt = run(made([0, 0], [600, 100], [1, 1]))
    # 512 of the first; then its 88 and all of the second in one batch.
    assert ms(felt.first_ps) == [522 + 198, 522 + 198]


def test_stock_reserves_a_share_of_what_may_come() -> None:
    # Each may generate 1,000; the pool has 1,000: the second waits although 850 are free.
    two = made([0, 0], [150, 150], [10, 10], [500, 500])
    felt = run(two, pool_tokens=1000)
    # 150 + 500 + 1 of 1,000 are taken by the first: 349 are left, 651 would be needed.
    assert ms(felt.first_ps)[0] == 160
    assert ms(felt.first_ps)[1] == 160 + 9 * 6 + 160
    assert ms(run(two, pool_tokens=1400).first_ps) == [310, 310]


def test_stock_retracts_the_shortest_answer_and_recomputes_it() -> None:
    # They are taken to end early (ratio 0.7, decaying), but do not.
    two = made([0, 50], [100, 100], [195, 195], [200, 200])
    felt = run(two, pool_tokens=545)
    assert felt.preemptions == [0, 1]
    assert felt.recomputes == 1
    assert felt.tokens == 390
    assert felt.gap_ps[1] > felt.gap_ps[0]


def test_one_that_does_not_fit_is_refused_and_the_others_are_served() -> None:
    felt = run(made([0, 1, 2], [100, 2000, 100], [3, 3, 3]), pool_tokens=1000)
    assert felt.refused == 1
    assert felt.first_ps[1] == -1
    assert min(felt.end_ps[0], felt.end_ps[2]) > 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    blocks = [(1, 2, 3), (1, 2, 4), (9, 2, 4)]
    three = made([0, 1000, 2000], [300] * 3, [1] * 3, blocks=blocks, block_tokens=100)
    felt = run(three)
    assert felt.prefix == [0, 200, 0]
    assert ms(felt.first_ps) == [310, 1110, 2310]


def test_blocks_at_other_places_are_reused_only_where_that_is_on() -> None:
    blocks = [(1, 2, 3), (2, 1, 4)]
    two = made([0, 1000], [300] * 2, [1] * 2, blocks=blocks, block_tokens=100, chained=False)
    assert ms(run(two).first_ps)[1] == 1310
    felt = run(two, "stock:reuse=true,recompute_ratio=0.1")
    assert felt.reused == [0, 200]
    assert ms(felt.first_ps)[1] == 1010 + 100 + 20
    # Where a hash tells what stands before too, equal content elsewhere cannot be known.
    chained = dataclasses.replace(two, chained=True)
    assert run(chained, "stock:reuse=true").reused == [0, 0]


def test_a_whole_prompt_that_is_cached_computes_its_last_token() -> None:
    two = made([0, 1000], [200] * 2, [2] * 2, blocks=[(1, 2)] * 2, block_tokens=100)
    felt = run(two)
    assert felt.prefix == [0, 199]
    assert ms(felt.first_ps)[1] == 1011


def test_with_a_budget_decoding_goes_on_between_chunks() -> None:
    two = made([0, 100], [50, 1000], [60, 2]).with_slo(None, 100)
    stock, ours = run(two), run(two, "stock+budget")
    assert stock.gap_ps[0] > 1000 * PS_PER_MS
    assert ours.gap_ps[0] <= 100 * PS_PER_MS
    assert ours.first_ps[1] > stock.first_ps[1]


def test_of_two_with_one_document_the_second_waits_for_the_first() -> None:
    two = made([0, 0], [400, 400], [1, 1], blocks=[(1, 2, 3, 4), (1, 2, 3, 5)], block_tokens=100)
    assert run(two).rows == 800
    assert run(two, "stock+hold").rows == 500


def test_swapping_comes_back_without_computing_what_was_saved() -> None:
    two = made([0, 50], [100, 100], [195, 195], [200, 200])
    swapped = run(two, "stock:preempt=swap,host_pool_tokens=1000", pool_tokens=545)
    assert (swapped.swaps, swapped.recomputes) == (1, 0)
    assert swapped.rows < run(two, pool_tokens=545).rows
    without_room = run(two, "stock:preempt=swap,host_pool_tokens=1", pool_tokens=545)
    assert (without_room.swaps, without_room.recomputes) == (0, 1)


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "count"), [(0.3, 40_000), (0.6, 40_000), (0.8, 40_000)])
def test_waits_of_one_at_a_time_are_those_of_m_d_1(load: float, count: int) -> None:
    service_ms = 110.0
    requests = make_workload("plain:prompt=100,output=1", count, 3, None)
    requests = requests.at_rate(load / service_ms * 1e3)
    # The pool holds one prompt only, so that none is computed beside another.
    felt = run_quick(requests, pool_tokens=150)
    waited = np.array(felt.admitted_ps) - requests.arrived_ps
    expected = load / (2 * (1 - load)) * service_ms
    assert waited.mean() / PS_PER_MS == pytest.approx(expected, rel=0.05)
    busy = 1 - felt.idle_ps / felt.end_of_all_ps
    assert busy == pytest.approx(load, rel=0.02)


def run_quick(requests: Requests, side: str = "stock", **flags: object) -> Felt:
    return Machine(requests, COSTS, Flags.of(COSTS, **flags), side_named(side)).run()


def test_without_reuse_and_all_equal_the_order_makes_no_difference() -> None:
    requests = make_workload("plain:prompt=100,output=8", 2000, 5, None).at_rate(12)
    by_arrival, by_hits = (run(requests, f"stock:order={name}") for name in ("fcfs", "hit-rate"))
    assert by_arrival.first_ps == by_hits.first_ps
    assert by_arrival.end_ps == by_hits.end_ps
    # Unequal ones are not served in the same order: the comparison can fail.
    mixed = make_workload("plain:prompt=100,prompt_sigma=1,output=8", 2000, 5, None).at_rate(12)
    by_cost = run(mixed, "stock:order=effective-cost")
    assert by_cost.first_ps != run(mixed, "stock:order=fcfs").first_ps


def test_decode_throughput_is_batch_over_step() -> None:
    requests = made([0] * 20, [10] * 20, [1000] * 20)
    felt = run(requests, pool_tokens=30_000)
    steps_ms = (felt.end_ps[0] - felt.first_ps[0]) / PS_PER_MS
    assert steps_ms == pytest.approx(999 * (5 + 20))


# --- nothing is lost, and jumps change nothing ----------------------------------------------------


def mixture(seed: int, count: int = 250) -> Requests:
    """Short answers and long ones, shared prompts and own ones, bursts and pauses."""
    rng = np.random.default_rng(seed)
    arrived = np.cumsum(rng.exponential(40, count) * rng.choice([0, 1, 5], count))
    places = rng.integers(1, 5, count)
    blocks = [(*rng.integers(1, 12, many).tolist(), 1000 + i) for i, many in enumerate(places)]
    prompt = [50 * (len(b) - 1) + int(rng.integers(1, 51)) for b in blocks]
    output = rng.integers(1, 200, count)
    return made(
        arrived.tolist(),
        prompt,
        output.tolist(),
        [200] * count,
        blocks=blocks,
        block_tokens=50,
        chained=False,
    ).with_slo(2000, 60)


@pytest.mark.parametrize("side", SIDES)
def test_a_pool_that_holds_hardly_one_request(side: str) -> None:
    """Prompts of up to 200 tokens, answers as long, and 400 slots, in chunks of 64."""
    requests = mixture(1)
    felt = run(requests, side, GROWING, pool_tokens=400, chunked_prefill_tokens=64)
    assert felt.refused == felt.aborted == 0
    # An answer ends where SGLang says that it must: prompt and answer are less than the pool.
    room = 400 - 1 - requests.prompt - 1
    assert (room < requests.output).any()
    assert felt.tokens == int(np.minimum(requests.output, room).sum())


@pytest.mark.parametrize("side", SIDES)
def test_every_request_ends_once_with_all_of_its_tokens(side: str) -> None:
    requests = mixture(1)
    felt = run(requests, side, GROWING, pool_tokens=1500)
    assert felt.refused == felt.aborted == 0
    assert felt.tokens == int(requests.output.sum())
    assert felt.gaps.total == int((requests.output - 1).sum())
    first, end = np.array(felt.first_ps), np.array(felt.end_ps)
    assert (first > requests.arrived_ps).all()
    assert ((end > first) == (requests.output > 1)).all()
    assert (np.array(felt.admitted_ps) >= requests.arrived_ps).all()
    assert sum(felt.preemptions) == felt.swaps + felt.recomputes
    assert felt.peak_tokens <= 1500
    assert felt.idle_ps + 0 <= felt.end_of_all_ps
    largest = np.array(felt.gap_ps)
    mean = (end - first) / np.maximum(requests.output - 1, 1)
    assert (largest >= np.floor(mean)).all()


def test_the_mixture_preempts_so_that_all_this_is_of_preemptions_too() -> None:
    assert sum(run(mixture(1), "stock", GROWING, pool_tokens=1500).preemptions) > 0
    assert run(mixture(1), SIDES[5], GROWING, pool_tokens=1500).swaps > 0


@pytest.mark.parametrize("side", SIDES)
def test_jumping_over_steps_is_taking_them_one_by_one(side: str) -> None:
    for seed in (1, 2):
        jumped = run(mixture(seed), side, GROWING, pool_tokens=1500)
        single = run(mixture(seed), side, GROWING, jumps=False, pool_tokens=1500)
        assert jumped.gaps.counts == single.gaps.counts
        for field in dataclasses.fields(Felt):
            if field.name not in ("gaps", "passes"):
                assert getattr(jumped, field.name) == getattr(single, field.name), field.name
        assert jumped.passes < single.passes


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pool=st.integers(500, 4000),
    running=st.integers(1, 12),
    chunk=st.sampled_from([0, 64, 512]),
    side=st.sampled_from(SIDES),
)
def test_any_small_server_serves_everything(
    seed: int, pool: int, running: int, chunk: int, side: str
) -> None:
    requests = mixture(seed, 60)
    flags = {"pool_tokens": pool, "max_running": running, "chunked_prefill_tokens": chunk}
    jumped = run(requests, side, GROWING, **flags)
    single = run(requests, side, GROWING, jumps=False, **flags)
    assert jumped.tokens == int(np.minimum(requests.output, 200).sum()) - _cut(requests, pool)
    assert jumped.end_ps == single.end_ps
    assert jumped.gaps.counts == single.gaps.counts


def _cut(requests: Requests, pool: int) -> int:
    """Tokens that SGLang does not let a request ask for in so small a pool."""
    room = np.maximum(0, pool - 2 - requests.prompt)
    return int(np.maximum(0, requests.output - room).sum())


def test_the_same_seed_gives_the_same_and_another_gives_another() -> None:
    first, again, other = (
        outcome(made_, run_quick(made_, "kvshare"), COSTS.pool_tokens)
        for made_ in (
            make_workload("rag", 100, seed, None).at_rate(1).with_slo(3000, 200)
            for seed in (1, 1, 2)
        )
    )
    assert first == again
    assert first != other


# --- workloads and settings -----------------------------------------------------------------------


def test_a_trace_is_gone_through_again_with_other_blocks(tmp_path) -> None:  # type: ignore[no-untyped-def]
    lines = [
        f'{{"timestamp": {1000 * i}, "input_length": {600 + i}, "output_length": {i + 1}, '
        f'"hash_ids": [0, {i + 1}]}}'
        for i in range(4)
    ]
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(lines) + "\n")
    requests = make_workload("mooncake", 10, 1, tmp_path)
    assert len(requests) == 10
    # Each copy has every request once, and its own blocks.
    assert sorted(requests.prompt[:4].tolist()) == [600, 601, 602, 603]
    assert sorted(requests.prompt[4:8].tolist()) == [600, 601, 602, 603]
    firsts = [blocks[0] for blocks in requests.blocks]
    assert len(set(firsts[:4])) == 1
    assert len({firsts[0], firsts[4], firsts[8]}) == 3
    assert requests.rate == pytest.approx(1)
    assert requests.at_rate(7).rate == pytest.approx(7)
    assert make_workload("mooncake", 10, 1, tmp_path).blocks == requests.blocks


def test_presets_are_complete_and_told_by_name() -> None:
    assert {"this-cpu", "h100-llama-3.1-8b"} <= set(presets())
    for name in presets():
        costs = load_costs(name)
        assert costs.name == name
        assert costs.about
        assert costs.prefill_ms(100, 10_000) < costs.prefill_ms(1000, 1_000_000)
    with pytest.raises(EvalError, match="presets are"):
        load_costs("nothing")


def test_costs_survive_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.yaml"
    path.write_text(GROWING.to_yaml())
    assert load_costs(str(path)) == GROWING
    path.write_text("name: x\nspeed: 3\n")
    with pytest.raises(EvalError, match="unknown 'speed'"):
        load_costs(str(path))
    with pytest.raises(EvalError, match="takes some time"):
        dataclasses.replace(COSTS, decode_floor_ms=0, decode_request_ms=0)


def test_sides_are_named_by_their_parts() -> None:
    assert side_named("stock+order").order == "hit-rate"
    assert side_named("stock+order+victims").victims == "slo"
    without = side_named("kvshare-reserve")
    assert (without.reserve, without.victims) == ("stock", "slo")
    assert side_named("kvshare:most_bypasses=7").most_bypasses == 7
    for wrong in (
        "stock+",
        "other",
        "kvshare-none",
        "stock:order=x",
        "stock:a=1",
        "stock:budget=x",
    ):
        with pytest.raises(EvalError):
            side_named(wrong)


def test_longer_bounds_than_sglang_reserves_are_refused() -> None:
    with pytest.raises(EvalError, match="4096"):
        run(made([0], [10], [5000]), pool_tokens=20_000)


def test_shares_and_percentiles_of_an_outcome() -> None:
    requests = made([0, 0], [100, 100], [1, 3]).with_slo(210, 5)
    felt = run(requests)
    told = outcome(requests, felt, COSTS.pool_tokens)
    assert told.ttft_p50_ms == 210
    assert (told.ttft_slo, told.tbt_slo, told.slo) == (1, 0.5, 0.5)
    assert told.mean_tbt_p50_ms == pytest.approx(6)
    assert told.tbt_p99_ms == pytest.approx(6, rel=0.005)
    assert math.isclose(told.tbt_mean_ms, 6)
