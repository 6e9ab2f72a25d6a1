"""What can happen to a preempted request, on the scheduler of ``swap_rig``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from swap_rig import Rig

from sglang_kvshare.scheduling.host_pool import HostPool

EXACT = {"kvshare": {"reuse": "exact_prefix"}}


def three(rig: Rig) -> dict[str, tuple[list[int], int]]:
    """Requests that fit side by side; the first is longer than a chunk where three of such are
    not more than the pool. Each is longer than a page when it is preempted."""
    first = min(rig.config.chunk + 12, rig.config.pool // 3 - 40)
    second, third = max(30, rig.config.page_size + 9), max(21, rig.config.page_size + 5)
    return {"a": (rig.new(first), 24), "b": (rig.new(second), 40), "c": (rig.new(third), 40)}


def submit(rig: Rig, calls: dict[str, tuple[list[int], int]], **settings: Any) -> None:
    for rid, (prompt, n_new) in calls.items():
        rig.live.submit(rid, prompt, n_new, **(settings or EXACT))


def copied_beside_the_others(rig: Rig) -> None:
    """With a copy that does not come to its end for long: its slots stay, the others decode."""
    calls = three(rig)
    said = rig.untouched(calls, **EXACT)
    submit(rig, calls)
    with rig.held_worker():
        rig.preempt("a")
        assert rig.copying
        rig.admits = False
        outputs = rig.live.scheduler.running_batch.reqs[0].output_ids
        before = len(outputs)
        rig.turn(5)
        assert len(outputs) > before
        (copy,) = rig.swapping.copying
        assert copy.left is not None
        assert rig.swapping.used_tokens == copy.tokens
        assert not rig.swapping.ready(next(iter(rig.live.scheduler.waiting_queue)))
    rig.until(lambda: not rig.swapping.copying)
    # Its row is free, and was overwritten.
    assert copy.held
    assert not rig.swapping.left_rows()
    rig.live.evict(10_000)
    rig.turn(2)
    assert rig.same(rig.finish(), said)
    assert rig.compared["a"] >= copy.tokens
    tokens = copy.end - copy.loaded_at
    assert rig.counted() == {
        "swaps_total out": 1,
        "swaps_total in": 1,
        "swapped_tokens_total out": copy.tokens,
        "swapped_tokens_total in": tokens,
    }
    # The last page at most is computed.
    assert copy.end > len(calls["a"][0]) + 1 - rig.config.page_size


def a_copy_that_hangs(rig: Rig) -> None:
    """It is waited for, and given up; those behind it in the queue go first."""
    from sglang_kvshare.engine import swapping

    calls = three(rig)
    said = rig.untouched(calls, **EXACT)
    submit(rig, calls)
    with rig.held_worker(), pytest.MonkeyPatch.context() as patch:
        rig.preempt("a")
        (copy,) = rig.swapping.copying
        rig.live.submit("d", calls["c"][0], 4, **EXACT)
        rig.until(lambda: "d" in rig.live.finished)
        assert rig.waiting("a")
        assert rig.swapping.copying == [copy]
        patch.setattr(swapping, "MOST_SECONDS", 0.0)
        rig.until(lambda: rig.decoding("a"))
        # Its slots are free, its host memory is not yet.
        assert not rig.swapping.left_rows()
        assert rig.swapping.used_tokens == copy.tokens
    del rig.live.finished["d"]
    assert rig.same(rig.finish(), said)
    assert rig.counted() == {"swap_fallbacks_total copy_failed": 1, "faults_total swap": 1}


def memory_runs_out(rig: Rig) -> None:
    """SGLang retracts; what is copied is waited for, and free at once."""
    from sglang.srt.managers import schedule_policy

    size = rig.config.pool // 6
    calls = {f"r{i}": (rig.new(size // 3), size * 3 // 2) for i in range(6)}
    said = {}
    for rid, call in calls.items():
        said |= rig.untouched({rid: call}, **EXACT)
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is kept free for what they will say.
        patch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 2)
        submit(rig, calls)
        assert rig.same(rig.finish(), said)
    counted = rig.counted()
    # Of some the tree had all at their return.
    assert counted["swaps_total out"] >= counted["swaps_total in"] > 0
    assert not [name for name in counted if "fallbacks" in name or "faults" in name], counted


def an_allocation_waits_for_copies(rig: Rig) -> None:
    """Slots that are still being copied are waited for before an allocation fails."""
    calls = three(rig)
    said = rig.untouched(calls, **EXACT)
    submit(rig, calls)
    with rig.held_worker() as go:
        rig.preempt("a")
        rig.admits = False
        (copy,) = rig.swapping.copying
        available = rig.live.allocator.available_size()
        go.set()
        rig.live.allocator.evict_to_free_tokens(rig.live.cache, available + 1)
        assert copy.held or rig.live.cache.evictable_size() > 0
        rig.live.allocator.evict_to_free_tokens(rig.live.cache, rig.config.pool)
        assert copy.held
        assert not rig.swapping.left_rows()
    assert rig.same(rig.finish(), said)


def retracted_every(steps: int) -> Callable[[Rig], None]:
    def case(rig: Rig) -> None:
        calls = three(rig)
        said = rig.untouched(calls, **EXACT)
        submit(rig, calls)
        for number in range(200):
            if number % steps == 0:
                rig.live.retract_next()
            rig.turn()
            rig.live.retract_no_more()
            # Nothing of it is found in the tree.
            rig.live.evict(10_000)
            if rig.live.idle:
                break
        assert rig.same(rig.finish(), said)
        assert rig.counted()["swaps_total in"] > 1
        assert not [name for name in rig.counted() if "fall" in name or "faults" in name]

    return case


def penalties_count_what_was_said_before(**sampling: float) -> Callable[[Rig], None]:
    """A request that comes back is penalised as one that was never away.

    Without overlap: with it SGLang counts a token late or twice, depending on what runs between.
    """

    def case(rig: Rig) -> None:
        calls = three(rig)
        plain = rig.untouched(calls, **EXACT)
        said = rig.untouched(calls, **EXACT, sampling=sampling)
        assert said != plain
        submit(rig, calls, **EXACT, sampling=sampling)
        for rid in calls:
            rig.preempt(rid)
        after = rig.finish()
        assert rig.counted()["swaps_total out"] == len(calls)
        assert rig.config.overlap or rig.same(after, said)
        assert {rid: len(ids) for rid, ids in after.items()} == {
            rid: call[1] for rid, call in calls.items()
        }

    return case


def a_host_pool_of(requests: int) -> Callable[[Rig], None]:
    def case(rig: Rig) -> None:
        calls = three(rig)
        said = rig.untouched(calls, **EXACT)
        submit(rig, calls)
        rig.until(lambda: rig.decoding("b", 3) and rig.decoding("a", 3))
        page = rig.config.page_size
        (a,) = (r for r in rig.live.scheduler.running_batch.reqs if r.rid == "a")
        # For "a" by the time it is preempted, and not for "b" beside it.
        room = (a.seqlen + 4) // page * page
        rig.swapping.pool = HostPool(room * requests)
        rig.admits = False
        rig.wanted += ["a", "b"]
        rig.until(lambda: not rig.wanted)
        rig.until(lambda: not rig.swapping.copying)
        full = 2 - requests if requests else 0
        assert rig.counted().get("swaps_total out", 0) == requests, rig.counted()
        assert rig.counted().get("swap_fallbacks_total pool_full", 0) == full
        rig.live.evict(10_000)
        assert rig.same(rig.finish(), said)
        assert rig.counted().get("swaps_total in", 0) == requests
        rig.swapping.pool = HostPool(rig.capacity_tokens)

    return case


def a_failing_copy(rig: Rig) -> None:
    """Out and back: both are recomputed, no slot is lost, and the next one is swapped."""
    calls = three(rig)
    said = rig.untouched(calls, **EXACT)
    for name, reason in (("_gather", "copy_failed"), ("back", "load_failed")):
        rig.seen = rig.counts()
        setattr(rig.copier, name, broken)
        submit(rig, calls)
        swapped_and_evicted(rig, "a")
        assert rig.same(rig.finish(), said)
        delattr(rig.copier, name)
        assert rig.counted()[f"swap_fallbacks_total {reason}"] == 1
        assert rig.counted()["faults_total swap"] == 1
        rig.live.finished.clear()
    rig.seen = rig.counts()
    submit(rig, calls)
    swapped_and_evicted(rig, "a")
    assert rig.same(rig.finish(), said)
    assert rig.counted()["swaps_total in"] == 1


def swapped_and_evicted(rig: Rig, rid: str) -> None:
    """Copied, and nothing of it left in the tree."""
    rig.preempt(rid)
    rig.admits = False
    rig.until(lambda: not rig.swapping.copying)
    rig.live.evict(10_000)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


def aborted_while(state: str) -> Callable[[Rig], None]:
    def case(rig: Rig) -> None:
        calls = three(rig)
        said = rig.untouched(calls, **EXACT)
        submit(rig, calls)
        with rig.held_worker() as go:
            rig.preempt("a")
            rig.admits = False
            (copy,) = rig.swapping.copying
            if state == "swapped":
                go.set()
                rig.until(lambda: copy.held)
            rig.live.abort("a")
            rig.turn()
            # The slots at once; host memory as soon as nothing writes to it.
            assert copy.gone
            assert not rig.swapping.left_rows()
            if state == "swapped":
                assert rig.swapping.used_tokens == 0
            go.set()
        got = rig.finish()
        assert rig.same({rid: got[rid] for rid in "bc"}, {rid: said[rid] for rid in "bc"})
        assert rig.live.finished["a"].reason == "abort"
        assert not [name for name in rig.counted() if "fall" in name], rig.counted()

    return case


def emptied_while_swapped(rig: Rig) -> None:
    """A flush, and other weights, of a paused scheduler: the copy serves nobody any more."""
    for new_weights in (False, True):
        rig.begin()
        call = {"a": (rig.new(rig.config.page_size + 39), 20)}
        said = rig.untouched(call, **EXACT)
        submit(rig, call)
        rig.preempt("a")
        rig.admits = False
        rig.until(lambda: not rig.swapping.copying)
        rig.live.pause("in_place")
        (copy,) = rig.swapping._copies.values()
        if new_weights:
            assert rig.live.update_weights(rig.folders[1])
        else:
            assert rig.live.flush()
        assert copy.gone
        assert rig.swapping.used_tokens == 0
        rig.live.resume()
        got = rig.finish()
        assert rig.counted()["swap_fallbacks_total dropped"] == 1
        assert "swaps_total in" not in rig.counted()
        if not new_weights:
            assert rig.same(got, said)
    assert rig.live.update_weights(rig.folders[0])
    rig.live.cache.generation = 0


def its_tenant_is_forgotten(rig: Rig) -> None:
    """What was hers is zero in host memory, and nobody else's is touched."""
    from sglang_kvshare.engine.state import state_of

    calls = three(rig)
    said = rig.untouched(calls, **EXACT)
    submit(rig, calls)
    rig.until(lambda: rig.decoding("a") and rig.decoding("b"))
    for req in rig.live.scheduler.running_batch.reqs:
        # As the HTTP process says on a server with tenants.
        state_of(req).tenant = {"a": "alice", "b": "bob"}.get(req.rid)
    for rid in "ab":
        swapped_and_evicted(rig, rid)
    copies = {copy.state.tenant: copy for copy in rig.swapping._copies.values()}
    assert copies.keys() == {"alice", "bob"}
    planes = {
        tenant: [p for e in copy.extents for p in rig.copier.memory.planes(e)]
        for tenant, copy in copies.items()
    }
    kept = [plane.clone() for plane in planes["bob"]]
    assert any(plane.any() for plane in planes["alice"])
    told = rig.live.cache.retention.forget("alice")
    assert told.removed_from_host == copies["alice"].tokens
    assert not any(plane.any() for plane in planes["alice"])
    assert all(map(torch.equal, kept, planes["bob"]))
    assert rig.same(rig.finish(), said)
    assert rig.counted()["swap_fallbacks_total dropped"] == 1
    assert rig.counted()["swaps_total in"] == 1
    # What is dropped in the ordinary way is overwritten too.
    assert not any(plane.any() for plane in planes["bob"])


def a_shared_prefix_stays_in_the_tree(rig: Rig) -> None:
    """It is not copied, and if it is gone at the return, the request is recomputed."""
    page = rig.config.page_size
    shared = rig.new(max(2 * page, 40))
    # A page becomes full soon after the prompt.
    own = 10 if page == 1 else (page - 2 - len(shared)) % page
    calls = {"a": (shared + rig.new(own), 20), "b": (shared + rig.new(7), 30)}
    said = rig.untouched(calls, **EXACT)
    for evicted in (False, True):
        rig.seen = rig.counts()
        submit(rig, {"b": calls["b"]})
        rig.until(lambda: rig.decoding("b"))
        submit(rig, {"a": calls["a"]})
        rig.preempt("a")
        rig.admits = False
        rig.until(lambda: not rig.swapping.copying)
        (copy,) = rig.swapping._copies.values()
        assert copy.start == len(shared) // page * page
        if evicted:
            rig.until(lambda: "b" in rig.live.finished)
            rig.turn(2)
            rig.live.evict(10_000)
        assert rig.same(rig.finish(), said)
        assert rig.counted().get("swaps_total in", 0) == (not evicted)
        assert rig.counted().get("swap_fallbacks_total prefix_gone", 0) == evicted
        rig.live.finished.clear()


def an_approximation_stays_one(refresh_tokens: int) -> Callable[[Rig], None]:
    """Its report, its provenance and its refresh queue are those of a request that nobody
    disturbed, and what it publishes serves nobody who wants exact values."""

    def case(rig: Rig) -> None:
        from sglang_kvshare.engine.state import state_of

        passages = [rig.new(32), rig.new(34)]
        donor = rig.new(3) + passages[0] + rig.new(2) + passages[1]
        prompt = rig.new(5) + passages[1] + rig.new(3) + passages[0] + rig.new(3)
        wish = {"kvshare": {"recompute_ratio": 0.0, "refresh_tokens": refresh_tokens}}
        reports, texts = [], []
        for swapped in (False, True):
            submit(rig, {"donor": (donor, 2)})
            rig.until(lambda: "donor" in rig.live.finished)
            rig.live.submit("a", prompt, 24, **wish)
            rig.until(lambda: rig.decoding("a", 3))
            if swapped:
                (req,) = rig.live.scheduler.running_batch.reqs
                before = state_of(req).lasting()
                swapped_and_evicted(rig, "a")
                rig.admits = True
                rig.until(lambda: rig.decoding("a", 7))
                after = state_of(req).lasting()
                assert after["exact_until"] == before["exact_until"] is not None
                assert after["depth"] == before["depth"] == 1
                assert list(map(list, after["placed"])) == list(map(list, before["placed"]))
                assert after["queue"] is before["queue"]
                assert (after["queue"] is not None) == (refresh_tokens > 0)
            rig.until(lambda: "a" in rig.live.finished)
            reports.append(dict(rig.live.finished["a"].report))
            texts.append(rig.live.finished["a"].ids)
            # The same prompt, exactly: as from an empty cache.
            rig.live.submit("exact", prompt, 8, **EXACT)
            rig.until(lambda: "exact" in rig.live.finished)
            exact = rig.live.finished["exact"]
            rig.finish()
            rig.live.finished.clear()
            rig.live.submit("cold", prompt, 8, **EXACT)
            rig.finish()
            assert rig.same({"": rig.live.finished["cold"].ids}, {"": exact.ids})
            assert exact.report["reused_tokens"] == 0
            rig.live.finished.clear()
        assert reports[0]["reused_tokens"] > 30
        assert (reports[0]["refreshed_tokens"] > 30) == (refresh_tokens > 0)
        assert reports[0] == reports[1]
        if rig.config.page_size == 1 and not refresh_tokens:
            # Otherwise the tokens behind the last whole page are computed, placed ones as well,
            # or a step in between refreshes none.
            assert rig.same({"": texts[0]}, {"": texts[1]})
        assert rig.compared["a"] > 0
        assert rig.counted()["swaps_total in"] == 1

    return case


CASES = (
    copied_beside_the_others,
    a_copy_that_hangs,
    memory_runs_out,
    an_allocation_waits_for_copies,
    retracted_every(2),
    retracted_every(5),
    penalties_count_what_was_said_before(frequency_penalty=0.3),
    penalties_count_what_was_said_before(presence_penalty=0.5, repetition_penalty=1.3),
    a_host_pool_of(0),
    a_host_pool_of(1),
    a_failing_copy,
    aborted_while("copying"),
    aborted_while("swapped"),
    emptied_while_swapped,
    its_tenant_is_forgotten,
    a_shared_prefix_stays_in_the_tree,
    an_approximation_stays_one(refresh_tokens=0),
    an_approximation_stays_one(refresh_tokens=8),
)
