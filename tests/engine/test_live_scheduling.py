"""Order, holds, reservations and victims in the real scheduler, each beside its control."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvshare_eval.live.process import in_a_process

pytestmark = pytest.mark.engine


def scheduler(folder: Path, *, kvshare: dict[str, Any], **server: Any) -> Any:
    import logging

    import torch
    from live_machine import tiny

    from kvshare_eval.live.scheduler import LiveScheduler
    from sglang_kvshare.config import KVShareConfig

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    basics = {"min_run_tokens": 8, "min_saved_tokens": 1, "seam_tokens": 2, "tail_tokens": 2}
    config = KVShareConfig(**(basics | {"gate": "off"} | kvshare))
    settings: dict[str, Any] = {
        "page_size": 1,
        "max_total_tokens": 2000,
        "chunked_prefill_size": 512,
        "max_running_requests": 8,
        "disable_overlap_schedule": True,
    }
    return LiveScheduler(tiny(0).write(folder), config, **(settings | server))


class Texts:
    """Random passages, always the same."""

    def __init__(self) -> None:
        self._random = random.Random(7)

    def __call__(self, tokens: int) -> list[int]:
        from tiny_models import VOCAB

        return [self._random.randrange(VOCAB) for _ in range(tokens)]


def faults(live: Any) -> int:
    from sglang_kvshare.engine.metrics import FAULTS

    return int(sum(n for (series, _), n in live.cache.metrics.totals.items() if series is FAULTS))


def admitted(live: Any) -> list[str]:
    """Requests in the order of their first prefill, filled as turns go by."""
    seen: list[str] = []

    def note(batch: Any) -> None:
        if batch.forward_mode.is_extend():
            seen.extend(req.rid for req in batch.reqs if req.rid not in seen)

    live.on_batch(note)
    return seen


def finish(live: Any) -> None:
    from live_machine import check_idle

    live.drain()
    check_idle(live)
    assert faults(live) == 0


# --- order ---------------------------------------------------------------------------------------


def order_of(folder: Path, schedule: str, salt: str | None, policy: str = "fcfs") -> list[str]:
    """Three cold prompts and then a warm one, of which one runs at a time."""
    live = scheduler(
        folder,
        kvshare={"schedule": schedule},
        max_running_requests=1,
        schedule_policy=policy,
    )
    text = Texts()
    passage = text(200)
    live.submit("donor", [*passage, *text(5)], 2)
    finish(live)
    seen = admitted(live)
    live.submit("busy", text(30), 6)
    live.step(2)
    for number in range(3):
        live.submit(f"cold{number}", text(220), 2)
    live.submit("warm", [*text(9), *passage, *text(9)], 2, cache_salt=salt)
    finish(live)
    assert len(seen) == 5
    return seen


@pytest.mark.parametrize("schedule", ["hit-rate", "effective-cost"])
def test_a_warm_prompt_goes_before_cold_ones(schedule, tmp_path):
    seen = in_a_process(order_of, tmp_path, schedule, None)
    assert seen == ["busy", "warm", "cold0", "cold1", "cold2"]


@pytest.mark.parametrize("schedule", ["fcfs", "stock"])
def test_first_come_first_served_where_that_is_asked_for(schedule, tmp_path):
    seen = in_a_process(order_of, tmp_path, schedule, None)
    assert seen == ["busy", "cold0", "cold1", "cold2", "warm"]


def test_a_hit_of_another_namespace_moves_nobody(tmp_path):
    seen = in_a_process(order_of, tmp_path, "hit-rate", "another")
    assert seen == ["busy", "cold0", "cold1", "cold2", "warm"]


def test_another_policy_of_sglang_stands(tmp_path):
    seen = in_a_process(order_of, tmp_path, "hit-rate", None, "lof")
    # Longest output first: all have the same.
    assert seen == ["busy", "cold0", "cold1", "cold2", "warm"]


def starving(folder: Path, most_bypasses: int) -> int:
    """How many warm prompts, which keep coming, a cold one is overtaken by."""
    live = scheduler(
        folder,
        # Nobody ages.
        kvshare={"most_bypasses": most_bypasses, "ttft_slo_ms": 1e9},
        max_running_requests=1,
    )
    text = Texts()
    passage = text(150)
    live.submit("donor", [*passage, *text(5)], 2)
    finish(live)
    seen = admitted(live)
    live.submit("busy", text(30), 4)
    live.step(2)
    live.submit("cold", text(220), 2)
    for number in range(30):
        # Faster than they are served.
        for which in "ab":
            live.submit(f"warm{number}{which}", [*text(9), *passage, *text(9)], 1)
        live.step()
        if "cold" in seen:
            break
    finish(live)
    return seen.index("cold") - 1


def test_nobody_is_overtaken_without_bound(tmp_path):
    assert 0 < in_a_process(starving, tmp_path, 6) < 6
    # The control: what the bound holds back.
    assert in_a_process(starving, tmp_path / "control", 64) > 10


# --- holds ---------------------------------------------------------------------------------------


def ten_with_one_document(folder: Path, hold_ms: float, overlap: bool) -> tuple[int, int]:
    """Prompt tokens that were computed as new, and requests that were held back."""
    live = scheduler(
        folder,
        kvshare={"hold_ms": hold_ms, "recompute_ratio": 0.1},
        disable_overlap_schedule=not overlap,
        max_total_tokens=6000,
        chunked_prefill_size=4096,
    )
    text = Texts()
    document = text(300)
    for number in range(6):
        live.submit(f"r{number}", [*text(4 + number), *document, *text(12)], 3)
    finish(live)
    new = sum(got.report["new_tokens"] for got in live.finished.values())
    from sglang_kvshare.engine.metrics import HELD

    return new, int(live.cache.metrics.totals[HELD, ()])


@pytest.mark.parametrize("overlap", [False, True])
def test_many_with_one_document_compute_it_once(overlap, tmp_path):
    new, held = in_a_process(ten_with_one_document, tmp_path, 60_000.0, overlap)
    assert held == 5
    assert new < 2 * 330
    new, held = in_a_process(ten_with_one_document, tmp_path / "control", 0.0, overlap)
    assert held == 0
    assert new > 5 * 300


# --- reservations and victims --------------------------------------------------------------------


def short_answers(folder: Path, reserve: str) -> tuple[int, int]:
    """Requests that run together at most, once it is known that answers are short."""
    live = scheduler(
        folder,
        kvshare={"reserve": reserve, "reuse": "exact_prefix"},
        max_total_tokens=1200,
        max_running_requests=16,
    )
    text = Texts()
    # What the model says to these ends them: every answer is of one or a few tokens.
    everything = range(live.scheduler.model_config.vocab_size // 2)
    for number in range(40):
        live.submit(f"before{number}", text(40), 400, stop=everything)
    live.drain()
    live.finished.clear()
    most = 0

    def note(batch: Any) -> None:
        nonlocal most
        most = max(most, len(batch.reqs))

    live.on_batch(note)
    for number in range(12):
        live.submit(f"r{number}", text(60), 400, stop=everything)
    finish(live)
    assert len(live.finished) == 12
    return most, sum(got.retractions for got in live.finished.values())


def test_more_run_together_where_answers_are_known_to_be_short(tmp_path):
    ours, retractions = in_a_process(short_answers, tmp_path, "estimate")
    stock, _ = in_a_process(short_answers, tmp_path / "control", "stock")
    assert ours > 2 * stock, (ours, stock)
    assert retractions == 0


def short_of_kv(folder: Path, kvshare: dict[str, Any], pool: int) -> dict[str, Any]:
    """Answers of eight requests, which outgrow the pool where it is small."""
    overlap = kvshare.pop("overlap", False)
    live = scheduler(
        folder,
        kvshare={"reuse": "exact_prefix"} | kvshare,
        max_total_tokens=pool,
        disable_overlap_schedule=not overlap,
    )
    text = Texts()
    never = [live.scheduler.model_config.vocab_size - 1]
    # Learnt from these: answers are short. Those to come are not.
    for number in range(30):
        live.submit(f"before{number}", text(20), 3, stop=never)
    live.drain()
    live.finished.clear()
    prompts = [text(40) for _ in range(8)]
    for number, prompt in enumerate(prompts):
        live.submit(f"r{number}", prompt, 80, stop=never)
    finish(live)
    from sglang_kvshare.engine.metrics import PREEMPTIONS

    totals = live.cache.metrics.totals
    return {
        "answers": {rid: got.ids for rid, got in live.finished.items()},
        "retractions": sum(got.retractions for got in live.finished.values()),
        "foreseen": int(totals[PREEMPTIONS, ("foreseen",)]),
        "pool_full": int(totals[PREEMPTIONS, ("pool_full",)]),
    }


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("victims", ["slo", "stock"])
def test_answers_are_those_of_a_pool_that_is_large_enough(victims, overlap, tmp_path):
    how = {"victims": victims, "overlap": overlap}
    untouched = in_a_process(short_of_kv, tmp_path / "large", dict(how), 2000)
    assert untouched["retractions"] == 0
    short = in_a_process(short_of_kv, tmp_path, dict(how), 420)
    assert short["answers"] == untouched["answers"]
    assert short["retractions"] > 0
    if victims == "slo":
        assert short["foreseen"] == short["retractions"]


def larger_than_the_pool(folder: Path) -> Any:
    live = scheduler(folder, kvshare={}, max_total_tokens=300)
    live.submit("large", Texts()(400), 4)
    live.submit("small", Texts()(40), 4)
    finish(live)
    return live.finished


def test_one_request_larger_than_the_pool_gets_an_error(tmp_path):
    finished = in_a_process(larger_than_the_pool, tmp_path)
    assert finished["large"].reason == "abort"
    assert "400" in finished["large"].message
    assert finished["small"].reason == "length"


# --- SLOs ----------------------------------------------------------------------------------------


def attained(folder: Path, slos: Sequence[float]) -> dict[tuple[str, str], int]:
    live = scheduler(folder, kvshare={"ttft_slo_ms": slos[0], "tbt_slo_ms": slos[1]})
    live.submit("r0", Texts()(40), 4)
    live.submit("r1", Texts()(40), 4, kvshare={"ttft_slo_ms": 1e-3, "tbt_slo_ms": 1e9})
    # One token has no time between tokens.
    live.submit("r2", Texts()(40), 1)
    finish(live)
    from sglang_kvshare.engine.metrics import ATTAINED

    totals = live.cache.metrics.totals
    return {
        (kind, outcome): int(totals.get((ATTAINED, (kind, outcome, "")), 0))
        for kind in ("ttft", "tbt")
        for outcome in ("met", "missed")
    }


def test_attainment_is_counted(tmp_path):
    seen = in_a_process(attained, tmp_path, (1e9, 1e-3))
    assert seen == {
        ("ttft", "met"): 2,
        ("ttft", "missed"): 1,
        ("tbt", "met"): 1,
        ("tbt", "missed"): 1,
    }


def test_without_an_slo_nothing_is_counted(tmp_path):
    seen = in_a_process(attained, tmp_path, (float("inf"), float("inf")))
    assert seen == {
        ("ttft", "met"): 0,
        ("ttft", "missed"): 1,
        ("tbt", "met"): 1,
        ("tbt", "missed"): 0,
    }


def warm_document(folder: Path, reuse: str) -> tuple[int, int]:
    """Requests held back, and prefill batches, where all know the document already."""
    live = scheduler(
        folder,
        kvshare={"hold_ms": 60_000.0, "recompute_ratio": 0.1, "reuse": reuse},
        max_total_tokens=6000,
        chunked_prefill_size=4096,
    )
    text = Texts()
    document = text(400)
    live.submit("first", [*document, *text(20)], 2)
    finish(live)
    batches = 0

    def note(batch: Any) -> None:
        nonlocal batches
        batches += batch.forward_mode.is_extend()

    live.on_batch(note)
    front = [] if reuse == "exact_prefix" else text(5)
    for number in range(6):
        live.submit(f"r{number}", [*front, *document, *text(120)], 3)
    finish(live)
    from sglang_kvshare.engine.metrics import HELD

    return int(live.cache.metrics.totals[HELD, ()]), batches


@pytest.mark.parametrize("reuse", ["exact_prefix", "approximate"])
def test_nobody_waits_for_what_is_cached_already(reuse, tmp_path):
    assert in_a_process(warm_document, tmp_path, reuse) == (0, 1)


def cut_beside_decoding(folder: Path, tbt_slo_ms: float) -> list[str]:
    """Kinds of batches while two long prompts are prefilled beside a request that decodes."""
    live = scheduler(
        folder,
        kvshare={"tbt_slo_ms": tbt_slo_ms, "gate": "measured", "reuse": "exact_prefix"},
        max_total_tokens=6000,
    )
    text = Texts()
    for tokens in (30, 60, 120, 250, 500) * 5:
        live.submit(f"learn{tokens}{live.turns}", text(tokens), 6)
        live.drain()
    live.finished.clear()
    live.submit("decodes", text(20), 60)
    live.step(4)
    kinds: list[str] = []
    live.on_batch(lambda batch: kinds.append(batch.forward_mode.name))
    for number in range(2):
        live.submit(f"long{number}", text(900), 2)
    finish(live)
    return kinds


def test_a_time_between_tokens_that_was_promised_cuts_prefills(tmp_path):
    kinds = in_a_process(cut_beside_decoding, tmp_path, 1.0)
    extends = kinds.count("EXTEND")
    assert extends > 8, kinds
    # No two follow each other while somebody decodes.
    assert not any(pair == ("EXTEND", "EXTEND") for pair in pairwise(kinds))
    free = in_a_process(cut_beside_decoding, tmp_path / "control", float("inf"))
    assert free.count("EXTEND") <= 4, free


def beside_one_that_came_another_way(folder: Path) -> int:
    """Requests that are held when one without a number comes into the queue."""
    from sglang_kvshare.engine.ordering import arrange
    from sglang_kvshare.engine.schedule import job_of

    live = scheduler(folder, kvshare={"hold_ms": 60_000.0}, max_running_requests=1)
    text = Texts()
    live.submit("busy", text(30), 12)
    live.step(2)
    document = text(300)
    for number in range(3):
        live.submit(f"r{number}", [*text(4), *document, *text(12)], 1)
    live.step()
    queue = list(live.scheduler.waiting_queue)
    arrange(live.cache.schedule, queue, 0)
    before = sum(job_of(req).held for req in queue)
    assert before == 2, before
    stranger = live.scheduler.waiting_queue[0]
    state, stranger._kvshare = stranger._kvshare, None
    arrange(live.cache.schedule, queue, 0)
    held = sum(job_of(req).held for req in queue if req is not stranger)
    stranger._kvshare = state
    finish(live)
    return held


def test_nobody_is_held_before_one_that_cannot_be_ordered(tmp_path):
    assert in_a_process(beside_one_that_came_another_way, tmp_path) == 0
