"""Cases that chance may miss, on the scheduler of ``live_machine``, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from live_machine import (
    DOMAINS,
    PASSAGES,
    STATES,
    Bench,
    LiveMachine,
    check_empty,
    check_idle,
)


def machine_on(bench: Bench) -> LiveMachine:
    """The state machine, moved by hand."""
    machine = type("Machine", (LiveMachine,), {"bench": bench})()
    machine.begin()
    return machine


def options(**kvshare: Any) -> dict[str, Any]:
    return {
        "kvshare": kvshare,
        "domain": DOMAINS[0],
        "n_new": 4,
        "logprobs": None,
        "turns": 0,
    }


DONOR = list(range(len(PASSAGES) - 2))


def a_permuted_passage_is_reused(bench: Bench) -> None:
    """Positive control of reuse, and of the domains: elsewhere the same prompt finds nothing."""
    machine = machine_on(bench)
    machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
    machine.run_until_idle()
    before = bench.counts["reused tokens"]
    settings = options(recompute_ratio=0.0)
    machine.arrive_with_passages(DONOR[::-1], glue=5, question=2, settings=settings)
    machine.run_until_idle()
    reused = bench.counts["reused tokens"]
    assert reused - before > 30, (before, reused)
    for domain in DOMAINS[1:]:
        machine.arrive_with_passages(
            DONOR, glue=2, question=1, settings=settings | {"domain": domain}
        )
        machine.run_until_idle()
        assert bench.counts["reused tokens"] == reused, domain
    machine.teardown()


def tokens_are_chosen_in_the_forward_and_refreshed_in_decoding(bench: Bench) -> None:
    """Positive control of both: one alone, and one that another one matches meanwhile."""
    machine = machine_on(bench)
    machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
    machine.run_until_idle()
    refreshed, chosen = bench.counts["refreshed tokens"], bench.counts["selector query"]
    settings = options(selector="query", recompute_ratio=0.2, refresh_tokens=4) | {"n_new": 12}
    for glue in (5, 7):
        machine.arrive_with_passages(DONOR[::-1], glue=glue, question=2, settings=settings)
    machine.run_until_idle()
    assert bench.counts["refreshed tokens"] > refreshed + 20
    # Where it does not fit into one chunk, the early ones fall back.
    fell_back = bench.counts["selector query+seams"]
    assert bench.counts["selector query"] + fell_back >= chosen + 1
    machine.teardown()


def an_approximation_never_serves_as_exact(bench: Bench) -> None:
    """The same prompt, and the turn that follows it, right after it was served approximately."""
    machine = machine_on(bench)
    machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
    machine.run_until_idle()
    approximate = options(recompute_ratio=0.0) | {"n_new": 12}
    machine.arrive_with_passages(DONOR[::-1], glue=5, question=3, settings=approximate)
    machine.run_until_idle()
    checked = bench.counts["texts checked"]
    for exact in ({"reuse": "exact_prefix"}, {"recompute_ratio": 1.0}, {"reuse": "off"}):
        settings = options(**exact) | {"n_new": 8, "logprobs": "output"}
        # After each of them its own exact values are cached as well.
        prompt, answer = machine.said[1][0].prompt, machine.said[1][1]
        machine.submit([*prompt, *answer, *machine.new(4)], settings)
        machine.submit(prompt, settings)
        machine.run_until_idle()
        assert machine.live.flush()
        machine.emptied()
        machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
        machine.run_until_idle()
        machine.submit(prompt, approximate)
        machine.run_until_idle()
    assert bench.counts["texts checked"] == checked + 6
    machine.teardown()


def abort_in(state: str, ratio: float) -> Callable[[Bench], None]:
    """Bring a request that takes from donors into ``state``, abort it there, and go on."""

    def case(bench: Bench) -> None:
        machine = machine_on(bench)
        machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
        machine.run_until_idle()
        wish = options(recompute_ratio=ratio) | {"n_new": 12}
        # Longer than a chunk, and short enough for another request beside it.
        order = DONOR[::-1] * (2 if bench.config.chunk > 100 else 1)
        machine.arrive_with_passages(order, glue=20, question=3, settings=wish)
        machine.arrive_with_passages(DONOR, glue=7, question=3, settings=wish)
        if state == "waiting":
            # Received but not run: no row is left for it.
            for _ in range(6):
                machine.arrive_fresh(20, settings=options() | {"n_new": 12})
        before = bench.counts[f"abort while {state}"]
        for _ in range(60):
            machine.turn()
            if state == "retracted":
                machine.live.retract_next()
            machine.abort(state, 0)
            if bench.counts[f"abort while {state}"] > before:
                break
        machine.live.retract_no_more()
        assert bench.counts[f"abort while {state}"] == before + 1, state
        machine.run_until_idle()
        check_idle(machine.live)
        # What was aborted left nothing that serves wrongly.
        machine.arrive_with_passages(DONOR[::-1], 20, 3, options(recompute_ratio=1.0))
        machine.arrive_with_passages(DONOR[::-1], 20, 3, options(reuse="exact_prefix"))
        machine.teardown()

    return case


def a_preempted_request_comes_back(bench: Bench) -> None:
    """Positive control of swapping: copied out, and back."""
    machine = machine_on(bench)
    swapped, preempted = bench.swaps()["swaps_total in"], bench.counts["preempted"]
    settings = options(reuse="exact_prefix") | {"n_new": 12}
    # A page becomes full while they decode, which the tree does not have.
    machine.arrive_fresh(63, settings=settings)
    machine.arrive_fresh(63, settings=settings)
    for _ in range(40):
        machine.turn()
        running = bench.live.scheduler.running_batch.reqs
        if running and all(len(req.output_ids) > 1 for req in running):
            machine.preempt(pick=0, others=False)
        if bench.counts["preempted"] > preempted:
            break
    machine.run_until_idle()
    assert bench.counts["preempted"] == preempted + 1
    assert bench.swaps()["swaps_total in"] == swapped + 1
    machine.teardown()


def new_weights_while_paused(bench: Bench) -> None:
    """Requests sent back by a pause outlive a change of the weights; no old donor does."""
    machine = machine_on(bench)
    machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
    machine.run_until_idle()
    settings = options(recompute_ratio=0.0) | {"n_new": 10}
    machine.arrive_with_passages(DONOR[::-1], glue=5, question=2, settings=settings)
    machine.turn()
    machine.turn()
    machine.pause("retract")
    machine.empty(new_weights=True)
    assert machine.model == 1
    assert machine.live.cache.index.live_tokens == 0
    machine.resume()
    machine.run_until_idle()
    before = bench.counts["texts checked"]
    machine.arrive_with_passages(DONOR, glue=5, question=2, settings=options(reuse="exact_prefix"))
    machine.teardown()
    assert bench.counts["texts checked"] == before + 1
    check_empty(machine.live)


CASES = (
    a_permuted_passage_is_reused,
    tokens_are_chosen_in_the_forward_and_refreshed_in_decoding,
    an_approximation_never_serves_as_exact,
    *(abort_in(state, ratio=0.0) for state in STATES),
    abort_in("chunked", ratio=1.0),
    a_preempted_request_comes_back,
    new_weights_while_paused,
)
