"""The tree cache under any order of events, and its faults (see tree_machine.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tree_machine import FakeReq, RecordingPlacer, TreeCacheMachine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("page_size", "similar"), [(1, False), (4, False), (16, False), (1, True), (4, True)]
)
@pytest.mark.usefixtures("sglang_cpu")
def test_slots_locks_and_index_under_any_order_of_events(page_size, similar):
    how = {"page_size": page_size, "pool": 160, "similar_donors": similar}
    machine = type("Machine", (TreeCacheMachine,), how)
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


def similar_machine():
    return fresh(type("Machine", (TreeCacheMachine,), {"similar_donors": True}))


#: Runs of two and three tokens between edits, which the run index (from 4 on) cannot see.
EDITED = [1, 2, 5, 2, 1, 1, 6, 0]
EDITED_ANEW = [1, 2, 6, 2, 1, 1, 5, 0]


@pytest.mark.usefixtures("sglang_cpu")
def test_short_runs_between_edits_are_reused_from_a_similar_donor():
    for machine, reused in ((fresh(), 0), (similar_machine(), 5)):
        served(machine, DONOR)
        report = served(machine, [7, *EDITED, 9])
        assert report.reused_tokens == reused
        check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize("step", ["find", "insert", "remove"])
def test_a_fault_among_similar_donors_costs_these_alone(step, monkeypatch):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    from sglang_kvshare.matching.semantic_index import SemanticIndex

    machine = similar_machine()
    served(machine, DONOR)

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(SemanticIndex, step, fail)
        report = served(machine, [7, *EDITED, 9, *PASSAGE, 8])
        if step == "remove":
            machine.cache.evict(EvictParams(num_tokens=1))
    assert report.reused_tokens >= 8, "runs serve on"
    assert machine.faults == ["similar"]
    assert machine.cache.mirror.similar is None
    assert not machine.cache.index_failed
    machine.flush()
    assert machine.cache.mirror.similar is not None, "until a flush"


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize("call", ["add", "search", "remove", "clear"])
def test_a_failing_faiss_costs_similar_donors_until_a_flush(call, monkeypatch):
    import faiss
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    from sglang_kvshare.matching.donor_index import DonorIndex

    where = {
        "add": (faiss.IndexIDMap2, "add_with_ids"),
        "search": (faiss.IndexIDMap2, "search"),
        "remove": (faiss.IndexIDMap2, "remove_ids"),
        # FAISS is not asked: its indices are let go.
        "clear": (DonorIndex, "clear"),
    }
    machine = similar_machine()
    served(machine, DONOR)
    # A second sequence, so that one can leave the index.
    served(machine, [3, *PASSAGE[::-1], 6])

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(*where[call], fail)
        if call == "clear":
            machine.flush()
            served(machine, DONOR)
        report = served(machine, [7, *EDITED, 9, *PASSAGE, 8])
        if call == "remove":
            machine.cache.evict(EvictParams(num_tokens=1))
    assert report.reused_tokens >= 8, "runs serve on"
    assert (machine.faults, machine.cache.index_failed) == (["similar"], False)
    report = served(machine, [4, *EDITED_ANEW, 9])
    assert (report.reused_tokens, report.reason) == (0, "no_match"), "a miss, with its reason"
    machine.slots_are_conserved()
    machine.locks_are_what_is_held()
    machine.flush()
    served(machine, DONOR)
    assert served(machine, [7, *EDITED, 9]).reused_tokens == 5, "after a flush they serve again"
    assert machine.faults == ["similar"]


def counted(machine):
    """Faults by step, as the metrics have them."""
    from sglang_kvshare.engine.metrics import FAULTS

    totals = machine.cache.metrics.totals
    return {values[0]: n for (series, values), n in totals.items() if series is FAULTS and n}


@pytest.fixture
def without_faiss(monkeypatch):
    """No FAISS is installed, and nothing that needs it was imported before."""
    monkeypatch.setitem(sys.modules, "faiss", None)
    for name in ("donor_index", "semantic_index"):
        monkeypatch.delitem(sys.modules, f"sglang_kvshare.matching.{name}", raising=False)


@pytest.mark.usefixtures("sglang_cpu", "without_faiss")
def test_without_faiss_similar_donors_are_given_up_and_runs_serve_on(caplog):
    machine = similar_machine()
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "similar_donors" in warning.message
    assert "pip install faiss-cpu" in warning.message
    assert "\n" not in warning.message
    assert warning.exc_info is None
    assert counted(machine) == {"similar": 1}
    served(machine, DONOR)
    report = served(machine, [7, *EDITED, 9])
    assert (report.reused_tokens, report.reason) == (0, "no_match")
    assert served(machine, [8, *PASSAGE, 4]).reused_tokens == 8, "runs serve on"
    machine.flush()
    served(machine, DONOR)
    assert served(machine, PROMPT).reused_tokens == 16
    assert machine.cache.mirror.similar is None
    assert (machine.faults, machine.cache.index_failed) == ([], False)
    assert counted(machine) == {"similar": 1}


@pytest.mark.usefixtures("sglang_cpu", "without_faiss")
def test_without_similar_donors_nobody_misses_faiss(caplog):
    machine = fresh()
    served(machine, DONOR)
    assert served(machine, PROMPT).reused_tokens == 16
    assert counted(machine) == {}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_faiss_is_imported_for_similar_donors_alone():
    """In a process of its own: first all that a server imports, then an index of similar donors."""
    code = """
import sys
import sglang_kvshare.engine.tree_cache as tree_cache
from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.sketch import Sketcher
import numpy as np
print("faiss" in sys.modules)
tree_cache.similar_donors(RunIndex(8, 4), KVShareConfig(), Sketcher(np.eye(8)), print)
print("faiss" in sys.modules)
"""
    env = os.environ | {"SGLANG_PLATFORM": "kvshare_cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["False", "True"], done.stderr[-2000:]


@pytest.mark.usefixtures("sglang_cpu")
def test_donors_that_are_not_finite_are_no_similar_donors_either():
    machine = similar_machine()
    served(machine, DONOR)
    similar, index = machine.cache.mirror.similar, machine.cache.index
    before = similar.windows
    machine.cache.mirror.discard(np.flatnonzero(index.nodes_of(np.arange(index.slots)) >= 0))
    assert before > 0
    assert (similar.windows, index.live_tokens) == (0, 0)
    assert served(machine, [7, *EDITED, 9]).reused_tokens == 0


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize("dims", [8, 24, 100])
def test_embeddings_are_looked_up_in_blocks_and_projected(dims, monkeypatch):
    from sglang_kvshare.engine import embeddings
    from sglang_kvshare.matching.sketch import projection

    monkeypatch.setattr(embeddings, "_BLOCK_IDS", 7)
    layer = torch.nn.Embedding(30, 24)
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=30), get_input_embeddings=lambda: layer
    )
    weight = layer.weight.detach().numpy()
    expected = weight @ projection(24, dims) if dims < 24 else weight
    told = embeddings.input_embeddings(model, dims)
    np.testing.assert_allclose(told, expected, atol=1e-5)
    inner = SimpleNamespace(config=model.config, model=SimpleNamespace(embed_tokens=layer))
    assert (embeddings.input_embeddings(inner, dims) == told).all()


@pytest.mark.usefixtures("sglang_cpu")
def test_donors_of_one_request_have_an_order_of_eviction():
    """Equal times would be told apart by memory addresses: differently on every rank and run."""
    machine = fresh()
    served(machine, DONOR)
    other = [2, 2, 2, 2, 1, 0, 1, 0]
    served(machine, [4, *other])
    report = served(machine, [7, *PASSAGE, 8, *other, 9])
    assert report.donors == 2
    times = [node.last_access_time for node in machine.nodes()]
    assert len(set(times)) == len(times)


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
def test_a_plan_made_ahead_is_not_made_again_and_counts_for_its_own_prefix_only(monkeypatch):
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    from sglang_kvshare.engine.admission import plan_admitted
    from sglang_kvshare.engine.state import RequestState, attach, state_of
    from sglang_kvshare.plan import ReusePlan
    from sglang_kvshare.request import RequestOptions

    machine = fresh()
    served(machine, DONOR)
    req = FakeReq("r", array("q", [3] * 8 + PROMPT), None, None, kv=ReqKvInfo())
    attach(req, RequestState(RequestOptions("approximate", 0.0, "seams")))
    machine.waiting.append(req)
    machine.admit(chunk=8, another_match=False)
    cache, state = machine.cache, state_of(req)
    plan_admitted(cache, req)
    expected, ahead, made = state.report, cache.plan(req), []
    assert expected.reused_tokens == 2 * len(PASSAGE)
    plan = cache.plan
    monkeypatch.setattr(cache, "plan", lambda req: made.append(req) or plan(req))
    plan_admitted(cache, req, ahead)
    assert (state.report, len(made)) == (expected, 0)
    other = ReusePlan(ahead.prompt_tokens, ahead.prefix_tokens + 4)
    plan_admitted(cache, req, other)
    assert (state.report, len(made)) == (expected, 1)
    monkeypatch.undo()
    machine.extend(req, 1000)
    assert state.report.reused_tokens == expected.reused_tokens
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


class Injected(RuntimeError):
    pass


def broken(*args, **kwargs):
    raise Injected


def half_broken_lock(cache):
    """Takes the first lock and fails at the second."""
    lock, calls = cache.donors._lock, []

    def locking(node):
        calls.append(node)
        if len(calls) > 1:
            raise Injected
        return lock(node)

    return locking


TWO_DONORS = ([5, *PASSAGE, 6], [5, 2, *PASSAGE[::-1], 6])
TWO_PASSAGES = [7, *PASSAGE, 8, *PASSAGE[::-1], 9]

#: step -> (what is broken, its name, by what).
FAULTS = {
    "match": ("sglang_kvshare.engine.tree_cache.plan_reuse", broken),
    "select": ("sglang_kvshare.engine.admission.choose", broken),
    "lock": ("sglang_kvshare.engine.donor_locks.time.monotonic", broken),
    "copy": ("sglang_kvshare.engine.forward._copy", broken),
}


@pytest.mark.parametrize("where", FAULTS)
@pytest.mark.usefixtures("sglang_cpu")
def test_a_fault_at_any_step_is_counted_and_costs_a_miss(where, monkeypatch):
    target, fault = FAULTS[where]
    machine = fresh(FaultyMachine)
    served(machine, DONOR)
    if where == "lock":
        # Only ours: SGLang's tree asks the same clock.
        monkeypatch.setattr(
            "sglang_kvshare.engine.donor_locks.time", SimpleNamespace(monotonic=broken)
        )
    else:
        monkeypatch.setattr(target, fault)
    report = served(machine, PROMPT)
    assert machine.faults == [where]
    reason = "placement_failed" if where == "copy" else "planning_failed"
    assert (report.decision, report.reason) == ("none", reason)
    assert (report.reused_tokens, report.new_tokens) == (0, len(PROMPT))
    check_all(machine)
    # Positive control, and nothing stays behind: without the fault the next one reuses.
    monkeypatch.undo()
    assert served(machine, [4, *PROMPT]).reused_tokens > 0
    assert machine.faults == [where]
    check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
def test_locks_taken_before_a_fault_are_given_back(monkeypatch):
    machine = fresh(FaultyMachine)
    for donor in TWO_DONORS:
        served(machine, donor, reuse="exact_prefix")
    monkeypatch.setattr(machine.cache.donors, "_lock", half_broken_lock(machine.cache))
    assert served(machine, TWO_PASSAGES).reason == "planning_failed"
    assert machine.faults == ["lock"]
    assert machine.cache.held_donor_locks == 0
    check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
def test_a_branch_that_cannot_be_published_or_followed_costs_itself(monkeypatch):
    machine = fresh(FaultyMachine)
    served(machine, DONOR)
    with monkeypatch.context() as patch:
        patch.setattr("sglang_kvshare.engine.branches.exact_ancestor", broken)
        assert served(machine, PROMPT).reused_tokens == 16
    assert set(machine.faults) == {"publish"}
    assert not any(machine.depth_of(node) for node in machine.nodes())
    check_all(machine)
    assert served(machine, PROMPT).reused_tokens == 16
    machine.faults.clear()
    longer = [*PROMPT, 1, 1]
    with monkeypatch.context() as patch:
        patch.setattr("sglang_kvshare.engine.branches.longest_branch", broken)
        # The donor serves instead.
        assert served(machine, longer).donors == 1
    assert set(machine.faults) == {"match"}
    check_all(machine)
    # Positive control: the branch is there.
    machine.from_branches = 0
    served(machine, [*longer, 1])
    assert machine.from_branches > 0


@pytest.mark.usefixtures("sglang_cpu")
def test_donors_that_cannot_give_way_do_not_end_the_scheduler(monkeypatch):
    machine = fresh(FaultyMachine)
    served(machine, DONOR)
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    machine.cache.donors._holders[object()] = None
    monkeypatch.setattr(machine.cache.donors, "release_all", broken)
    evicted = machine.cache.evict(EvictParams(num_tokens=1000)).num_tokens_evicted
    assert evicted == len(DONOR)
    assert machine.faults == ["alloc"]


class NotFinite(RecordingPlacer):
    """The first donor token holds a NaN."""

    def place(self, copy):
        return super().place(copy, finite=False)

    def invalid(self, slots):
        return slots[:1]


@pytest.mark.usefixtures("sglang_cpu")
def test_a_donor_that_is_not_finite_serves_nobody_any_more(monkeypatch):
    machine = fresh(FaultyMachine)
    served(machine, DONOR)
    monkeypatch.setattr(FaultyMachine, "placer_class", NotFinite)
    report = served(machine, PROMPT)
    assert (report.decision, report.reason) == ("none", "donor_invalid")
    assert machine.faults == ["copy"]
    machine.slots_are_conserved()
    machine.locks_are_what_is_held()
    # The token is gone from the index, the others of its donor and of the prompt are there.
    slots = torch.cat([node.value for node in machine.nodes()]).numpy()
    held = machine.cache.index.nodes_of(slots) >= 0
    # The donor came first: its tokens have the slots from 1 on.
    assert list(slots[~held]) == [1 + DONOR.index(1)]


@pytest.mark.usefixtures("sglang_cpu")
def test_a_clock_that_goes_back_changes_nothing(monkeypatch):
    """LRU order is SGLang's; that slots and locks are right does not hang on it."""
    ticks = iter(range(10**9, 0, -1))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    machine = fresh()
    served(machine, DONOR)
    assert served(machine, PROMPT).reused_tokens == 16
    machine.press(tokens=5)
    served(machine, [3, *PROMPT])
    check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize("chunk", [1000, 8])
def test_a_copy_that_fails_costs_a_miss_and_is_not_counted_as_reuse(chunk, monkeypatch):
    monkeypatch.setattr("sglang_kvshare.engine.forward._copy", broken)
    machine = fresh(FaultyMachine)
    served(machine, DONOR)
    report = served(machine, PROMPT, chunk)
    assert report.prompt_tokens == len(PROMPT)
    assert report.reused_tokens == 0, report
    assert report.decision == "none", report
    check_all(machine)


class FaultyMachine(TreeCacheMachine):
    """Plans may fail to be carried out."""

    faulty = True


class Closed:
    """A gate that knows its mind."""

    def __init__(self, looks, pays):
        self.looks, self.verdict, self.searched = looks, pays, 0

    def worth_a_look(self, rows, context_tokens):
        return self.looks

    def pays(self, rows, spared_rows, context_tokens):
        return self.verdict

    def observe_match(self, tokens, ms):
        self.searched += 1

    def observe_copy(self, tokens, ms):
        assert tokens > 0


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize(
    ("looks", "pays", "searched", "reused"),
    [(False, True, 0, 0), (True, False, 1, 0), (True, True, 1, 16)],
)
def test_a_closed_gate_costs_at_most_the_search(looks, pays, searched, reused):
    machine = fresh()
    served(machine, DONOR)
    machine.cache.gate = Closed(looks, pays)
    report = served(machine, PROMPT)
    assert report.reused_tokens == reused
    assert report.reason == ("ok" if reused else "gate_closed")
    assert machine.cache.gate.searched == searched
    check_all(machine)


@pytest.mark.usefixtures("sglang_cpu")
def test_a_queue_is_made_once_and_goes_on_in_mixed_batches():
    """There a decoding request is an extend of one token, which ends what it has, every time."""
    from sglang_kvshare.engine.forward import _finish
    from sglang_kvshare.engine.state import RequestState, attach
    from sglang_kvshare.recompute.refresh_queue import LeftOver
    from sglang_kvshare.request import RequestOptions

    state = RequestState(RequestOptions("approximate", 0.0, "none", refresh_tokens=2))
    state.left_over = [LeftOver(np.arange(10, dtype=np.int64), None, None)]
    req = SimpleNamespace(full_untruncated_fill_ids=[0] * 20)
    attach(req, state)
    batch = SimpleNamespace(reqs=[req], prefix_lens=[12], extend_lens=[8], tree_cache=fresh().cache)
    _finish(batch, [], [8.0])
    assert state.queue.take(4).tolist() == [0, 1, 2, 3]
    batch.prefix_lens, batch.extend_lens = [19], [1]
    _finish(batch, [], [1.0])
    # What was refreshed is not queued again.
    assert state.queue.positions.tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.usefixtures("sglang_cpu")
def test_events_tell_of_exact_nodes_only():
    from sglang_kvshare.engine.branches import is_approximate
    from sglang_kvshare.engine.exact_events import ExactEvents

    stored, removed = [], []
    machine = fresh()
    machine.cache.kv_events = ExactEvents(
        SimpleNamespace(record_store=stored.append, record_remove=removed.append, enabled=True)
    )
    served(machine, DONOR)
    served(machine, PROMPT)
    # Positive control: there is a branch that was not told of.
    assert any(is_approximate(node) for node in machine.nodes())
    assert len(stored) == 2
    machine.press(tokens=200)
    assert not machine.nodes()
    assert not any(map(is_approximate, [*stored, *removed]))
    assert len(removed) == 2
    assert machine.cache.kv_events.enabled


@pytest.mark.usefixtures("sglang_cpu")
def test_an_index_that_cannot_forget_is_given_up(monkeypatch):
    """Donors of old weights must not serve, whatever happens when they are dropped."""
    machine = fresh(FaultyMachine)
    served(machine, DONOR)
    monkeypatch.setattr(machine.cache.index, "clear", broken)
    machine.cache.forget_donors()
    assert machine.faults == ["index"]
    assert served(machine, PROMPT).reason == "index_failed"
