"""The tree cache under any order of events, and its faults (see tree_machine.py)."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tree_machine import FakeReq, RecordingPlacer, TreeCacheMachine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.usefixtures("sglang_cpu")
def test_slots_locks_and_index_under_any_order_of_events(page_size):
    machine = type("Machine", (TreeCacheMachine,), {"page_size": page_size, "pool": 160})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


PASSAGE = [1, 2, 0, 2, 1, 1, 0, 0]
DONOR, PROMPT = [5, *PASSAGE, 6], [7, *PASSAGE, 8, *PASSAGE, 9]


def served(machine, tokens, chunk=1000, reuse="approximate"):
    """One request from its arrival to its end; what it was told."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    from sglang_kvshare.engine.state import RequestState, attach, state_of
    from sglang_kvshare.request import RequestOptions

    req = FakeReq("r", array("q", tokens), None, None, kv=ReqKvInfo())
    attach(req, RequestState(RequestOptions(reuse, 0.0, "seams")))
    machine.waiting.append(req)
    machine.serve(chunk=chunk)
    return state_of(req).report


def fresh(machine_class=TreeCacheMachine):
    machine = machine_class()
    machine.begin()
    return machine


def check_all(machine):
    machine.slots_are_conserved()
    machine.the_index_holds_what_may_serve()
    machine.the_tree_says_where_its_values_come_from()
    machine.locks_are_what_is_held()


@pytest.mark.usefixtures("sglang_cpu")
def test_the_machine_does_reuse():
    """Positive control: with these fakes, a passage is placed elsewhere, twice in one prompt."""
    machine = fresh()
    served(machine, DONOR)
    report = served(machine, PROMPT)
    assert (report.reused_tokens, report.donors, report.decision) == (16, 1, "reuse")
    # The donor, the one exact token before the first reused one, and a branch with the rest.
    lengths = {machine.depth_of(node): len(node.key) for node in machine.nodes()}
    assert sum(len(node.key) for node in machine.nodes()) == len(DONOR) + len(PROMPT)
    assert lengths[1] == len(PROMPT) - 1
    check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
def test_donors_give_way_before_an_allocation_fails():
    """Between two chunks somebody needs the memory that the donor has."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    from sglang_kvshare.engine.state import RequestState, attach, state_of
    from sglang_kvshare.request import RequestOptions

    machine = fresh()
    served(machine, DONOR)
    req = FakeReq("r", array("q", [3] * 8 + PROMPT), None, None, kv=ReqKvInfo())
    attach(req, RequestState(RequestOptions("approximate", 0.0, "seams")))
    machine.waiting.append(req)
    machine.admit(chunk=8, another_match=False)
    assert machine.cache.held_donor_locks == 1
    free = machine.allocator.available_size()
    taken = machine.allocate(free + len(DONOR))
    assert taken is not None
    assert machine.cache.held_donor_locks == 0
    machine.allocator.free(taken)
    machine.extend(req, 1000)
    report = state_of(req).report
    assert (report.decision, report.reason) == ("none", "donor_evicted")
    assert report.new_tokens == len(PROMPT) + 8
    check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
def test_an_index_that_fails_costs_reuse_and_nothing_else(monkeypatch):
    machine = fresh()
    served(machine, DONOR)

    def broken(*args):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(machine.cache.index, "insert", broken)
        served(machine, [3, 3, 3, 3, 3])
    report = served(machine, PROMPT)
    assert (report.decision, report.reason) == ("none", "index_failed")
    assert report.new_tokens == len(PROMPT)
    assert served(machine, DONOR, reuse="exact_prefix").prefix_tokens == len(DONOR) - 1
    machine.slots_are_conserved()
    machine.locks_are_what_is_held()
    # Evicting what the index does not know does no harm, and a flush makes all well.
    machine.press(tokens=200)
    machine.slots_are_conserved()
    machine.flush()
    served(machine, DONOR)
    assert served(machine, PROMPT).reused_tokens == 16
    check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
def test_a_plan_that_fails_costs_a_miss(monkeypatch):
    machine = fresh()
    served(machine, DONOR)

    def broken(*args, **kwargs):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(machine.cache, "plan", broken)
        report = served(machine, PROMPT)
    assert (report.decision, report.reason) == ("none", "planning_failed")
    assert (report.reused_tokens, report.new_tokens) == (0, len(PROMPT))
    check_all(machine)


class FaultyPlacer(RecordingPlacer):
    def place(self, copy):
        raise RuntimeError("injected")


class FaultyMachine(TreeCacheMachine):
    """The copy of donors fails; the batch is computed in full."""

    placer_class = FaultyPlacer
    faulty = True

    def check_kept(self, *args):
        raise AssertionError("nothing may be narrowed")


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize("chunk", [1000, 8])
def test_a_copy_that_fails_costs_a_miss_and_is_not_counted_as_reuse(chunk):
    machine = fresh(FaultyMachine)
    served(machine, DONOR)
    report = served(machine, PROMPT, chunk)
    assert report.prompt_tokens == len(PROMPT)
    assert report.reused_tokens == 0, report
    assert report.decision == "none", report
    machine.slots_are_conserved()
    machine.locks_are_what_is_held()
