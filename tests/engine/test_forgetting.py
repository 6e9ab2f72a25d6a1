"""Quotas, time to live and forgetting in the tree (under any order of events: tree_machine.py)."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace

import pytest
import torch
from test_tree_cache import DONOR, PASSAGE, PROMPT, check_all, fresh
from tree_machine import QUOTA_TOKENS, TTL_S, FakeReq

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]
OTHER = [9, 9, *PASSAGE, 9]


def arrived(machine, tokens, tenant, salt=None):
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    from sglang_kvshare.engine.state import RequestState, attach
    from sglang_kvshare.request import RequestOptions

    req = FakeReq("r", array("q", tokens), salt, None, kv=ReqKvInfo())
    attach(req, RequestState(RequestOptions("approximate", 0.0, "seams"), tenant))
    machine.waiting.append(req)
    return req


def served(machine, tokens, tenant, salt=None):
    from sglang_kvshare.engine.state import state_of

    req = arrived(machine, tokens, tenant, salt)
    machine.serve(chunk=1000)
    machine.what_is_forgotten_serves_nobody_and_leaves()
    return state_of(req).report


def check(machine):
    check_all(machine)
    machine.what_is_forgotten_serves_nobody_and_leaves()
    machine.quotas_hold()


def test_forgetting_takes_one_tenants_text_and_leaves_the_others():
    machine = fresh()
    served(machine, DONOR, "ttl", "x")
    served(machine, DONOR, "quota", "y")
    before = machine.cache.index.live_tokens
    machine.forget("ttl")
    told = machine.cache.retention.forget("ttl")
    assert (told.removed_tokens, told.left_in_tree) == (0, 0)
    assert machine.cache.index.live_tokens == before - len(DONOR)
    assert len(machine.overwritten) == len(DONOR)
    check(machine)
    assert served(machine, PROMPT, "ttl", "x").reused_tokens == 0
    # Positive control: the other tenant's text is where it was.
    assert served(machine, PROMPT, "quota", "y").reused_tokens == 2 * len(PASSAGE)


def test_what_a_running_request_holds_serves_nobody_and_leaves_with_it():
    machine = fresh()
    served(machine, DONOR, "ttl")
    req = arrived(machine, [*DONOR, 3, 3], "ttl")
    machine.admit(chunk=1000, another_match=False)
    told = machine.cache.retention.forget("ttl")
    # Both what it found and what it has published of its own.
    assert (told.removed_tokens, told.left_nodes, told.left_in_tree) == (0, 2, len(DONOR) + 2)
    assert (told.left_in_index, told.left_windows) == (0, 0)
    machine.forgotten |= {slot for slot in machine.written if machine.written[slot].tenant == "ttl"}
    check(machine)
    assert machine.cache.retention.outlived(req._kvshare)
    # It goes on, and a newcomer gets nothing of it, prefix and branch included.
    report = served(machine, [*DONOR, 4], "quota")
    assert report.prefix_tokens == report.reused_tokens == 0
    nodes = len(machine.nodes())
    req.done = True
    machine.let_go(req, checkpoint=True)
    check(machine)
    assert len(machine.nodes()) == nodes - 2
    told = machine.cache.retention.forget("ttl")
    assert (told.removed_tokens, told.left_in_tree) == (0, 0)
    # Positive control: the newcomer's copy serves on.
    assert served(machine, [*DONOR, 5], "quota").prefix_tokens == len(DONOR)


def test_a_request_on_top_of_forgotten_text_keeps_its_slots_to_itself():
    """Its row names slots of a part of the tree that no insertion finds: it must not publish."""
    machine = fresh()
    served(machine, DONOR, "ttl")
    req = arrived(machine, [*DONOR, *OTHER], "quota")
    machine.admit(chunk=8, another_match=False)
    machine.forget("ttl")
    while req in machine.prefilling():
        machine.extend(req, 4)
        check(machine)
    machine.decode_one(req, 1)
    req.done = True
    machine.let_go(req, checkpoint=True)
    check(machine)
    assert not machine.nodes()
    # Positive control: afterwards the same text is published again.
    served(machine, [*DONOR, *OTHER], "quota")
    assert machine.nodes()


def test_a_plan_lets_go_of_a_forgotten_donor():
    """What was not copied yet is computed; the donor is gone at once."""
    from sglang_kvshare.engine.state import state_of

    for forgotten, reused in (("quota", 2 * len(PASSAGE)), ("ttl", 0)):
        machine = fresh()
        served(machine, DONOR, "ttl")
        req = arrived(machine, [*[3] * 8, *PROMPT], None)
        machine.admit(chunk=8, another_match=False)
        assert machine.cache.held_donor_locks == 1
        told = machine.cache.retention.forget(forgotten)
        # Positive control: to forget somebody else changes nothing.
        assert machine.cache.held_donor_locks == (forgotten == "quota")
        assert told.left_in_tree == 0
        while req in machine.prefilling():
            machine.extend(req, 1000)
        assert state_of(req).placed_tokens == reused
        check(machine)


def test_others_text_behind_a_tenants_goes_with_it_and_is_counted():
    machine = fresh()
    served(machine, DONOR, "ttl")
    served(machine, [*DONOR, 3, 3, 3], "quota")
    told = machine.cache.retention.forget("ttl")
    assert (told.removed_nodes, told.removed_tokens, told.of_others_tokens) == (
        2,
        len(DONOR) + 3,
        3,
    )
    check(machine)


def test_text_that_is_too_old_serves_neither_as_donor_nor_as_prefix():
    machine = fresh()
    served(machine, DONOR, "ttl")
    machine.now_s = TTL_S - 0.1
    # Positive control: until then it does both.
    assert served(machine, [*DONOR, 5], None).prefix_tokens == len(DONOR)
    assert served(machine, PROMPT, None).reused_tokens == 2 * len(PASSAGE)
    machine.now_s = TTL_S
    machine.step()
    check(machine)
    # Use does not make it younger. What rests on it, another's turn behind it, went with it.
    assert served(machine, [*DONOR, 6], "ttl").prefix_tokens == 0
    machine.now_s += TTL_S - 0.1
    assert served(machine, [*DONOR, 6, 6], None).prefix_tokens == len(DONOR) + 1


def test_the_halves_of_a_split_node_grow_old_together():
    machine = fresh()
    served(machine, [*DONOR, 3, 3], "ttl")
    machine.now_s = 5.0
    # A shorter one splits the node, and eviction takes the lower half.
    served(machine, [*DONOR, 4, 4], None)
    lower = next(node for node in machine.nodes() if list(node.key.token_ids) == [3, 3])
    machine.allocator.free(lower.value)
    machine.cache._delete_leaf(lower)
    machine.now_s = TTL_S
    machine.step()
    check(machine)
    assert not machine.nodes()


def test_beyond_the_quota_the_oldest_are_no_donors_and_still_prefixes():
    machine = fresh()
    served(machine, DONOR, "quota")
    filler = [100 + token for token in range(QUOTA_TOKENS)]
    served(machine, filler, "quota")
    check(machine)
    assert machine.cache.mirror.ledger.tokens("quota") == QUOTA_TOKENS
    assert served(machine, PROMPT, None).reused_tokens == 0
    assert served(machine, [*DONOR, 5], None).prefix_tokens == len(DONOR)
    # Positive control: what is within the quota serves.
    assert served(machine, [8, *filler, 8], None).reused_tokens == QUOTA_TOKENS


def test_a_time_to_live_needs_one_clock():
    from sglang_kvshare.engine.retention import Limits, limits_of
    from sglang_kvshare.engine.support import Unsupported
    from sglang_kvshare.tenants import Tenant

    tenants = {"a": Tenant(max_indexed_tokens=5), "b": Tenant(ttl_s=3)}
    assert limits_of(tenants, 1) == {"a": Limits(5), "b": Limits(ttl_s=3.0)}
    with pytest.raises(Unsupported, match=r"ttl_s \(tenant b\) with --tp-size 2"):
        limits_of(tenants, 2)
    assert limits_of({"a": tenants["a"]}, 2) == {"a": Limits(5)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_zeros_are_written_over_all_layers_of_the_slots_alone(dtype):
    from sglang_kvshare.engine.overwriting import Overwriter

    buffers = [torch.full((6, 2, 3), 1.5).to(dtype) for _ in range(4)]
    pool = SimpleNamespace(
        start_layer=0,
        layer_num=2,
        get_key_buffer=lambda layer: buffers[layer],
        get_value_buffer=lambda layer: buffers[2 + layer],
    )
    Overwriter(SimpleNamespace(token_to_kv_pool=pool))(torch.tensor([4, 1]))
    for buffer in buffers:
        rows = buffer.float().flatten(1).sum(1).tolist()
        assert rows == [9.0, 0.0, 9.0, 9.0, 0.0, 9.0]


# --- the operator's questions -----------------------------------------------------------------

KEY = "00" * 16
SALT = "a salt that nobody may see"


def asked(machine, question):
    """Through the hook, as the scheduler would call it."""
    from sglang_kvshare.engine.control import ANSWER, get_internal_state, message

    def stock(self, recv_req):
        return "stock"

    scheduler = SimpleNamespace(
        tree_cache=machine.cache,
        tp_cpu_group=None,
        running_batch=SimpleNamespace(reqs=machine.live),
    )
    told = get_internal_state(stock, scheduler, message(question)).internal_state[ANSWER]
    assert get_internal_state(stock, scheduler, SimpleNamespace(rid=None)) == "stock"
    assert get_internal_state(stock, scheduler, SimpleNamespace(rid="x")) == "stock"
    return json.loads(json.dumps(told))


def tree_question(most=100, namespace=None):
    return {"what": "tree", "key": KEY, "most": most, "namespace": namespace}


def test_a_snapshot_shows_lengths_and_no_token_and_no_salt():
    from sglang_kvshare.treeview import TreePicture

    machine = fresh()
    odd = [271828, *PASSAGE, 314159]
    served(machine, odd, "ttl", SALT)
    served(machine, [5, *PASSAGE, 6], "ttl", SALT)
    served(machine, DONOR, None)
    running = arrived(machine, [*DONOR, 3], None)
    machine.admit(chunk=1000, another_match=False)
    told = asked(machine, tree_question())
    for secret in (SALT, "271828", "314159"):
        assert secret not in json.dumps(told)
    picture = TreePicture.from_json(told)
    assert picture.tokens == sum(node.tokens for node in picture.nodes)
    assert picture.nodes_in_tree == len(picture.nodes) == len(machine.nodes())
    assert picture.indexed_tokens == sum(node.indexed_tokens for node in picture.nodes)
    assert (picture.hidden_nodes, picture.hidden_tokens) == (0, 0)
    edges = list(machine.cache.mirror.edges)
    assert edges, "the second prompt was served out of the first one"
    assert (len(picture.edges), picture.hidden_edges) == (len(edges), 0)
    holders = {node.id: node for node in picture.nodes}
    for edge in picture.edges:
        donor = holders[edge.donor]
        assert donor.start < edge.source + edge.length <= donor.end
        assert edge.anchor is None or holders[edge.anchor].end <= edge.start
        assert edge.namespace in {donor.namespace}
    by_id = {node.id: node for node in machine.nodes()}
    for node in picture.nodes:
        assert node.locks == by_id[node.id].lock_ref
        assert node.depth == machine.depth_of(by_id[node.id])
        assert node.tokens == len(by_id[node.id].key)
    assert max(node.depth for node in picture.nodes) == 1
    assert sum(node.locks for node in picture.nodes) > 0
    default, salted = sorted(picture.namespaces, key=lambda one: one.name != "default")
    assert (default.name, default.tenants, salted.tenants) == ("default", (), ("ttl",))
    only = asked(machine, tree_question(namespace="ttl"))
    assert {node["namespace"] for node in only["nodes"]} == {salted.name}
    assert only["hidden_nodes"] == sum(node.namespace == "default" for node in picture.nodes)
    assert asked(machine, tree_question(namespace=salted.name))["nodes"]
    refused = asked(machine, tree_question(namespace="bob"))
    assert refused["status"] == 400
    assert "default" in refused["error"]
    assert "ttl" in refused["error"]
    # Another asker's digest of the same salt is another one.
    other = asked(machine, {**tree_question(), "key": "11" * 16})
    assert salted.name not in json.dumps(other)
    machine.let_go(running, checkpoint=False)


def test_a_snapshot_is_bounded_and_shows_what_was_used_last(monkeypatch):
    machine = fresh()
    for number in range(8):
        served(machine, [10 + number, 1, 1], None)
    told = asked(machine, tree_question(most=3))
    assert (len(told["nodes"]), told["hidden_nodes"], told["hidden_tokens"]) == (3, 5, 15)
    last = sorted(node.id for node in machine.nodes())[-3:]
    assert sorted(node["id"] for node in told["nodes"]) == last
    monkeypatch.setattr("sglang_kvshare.engine.tree_snapshot.MOST_SEEN", 2)
    assert len(asked(machine, tree_question())["nodes"]) == 2


def test_the_operator_is_told_what_running_requests_hold():
    machine = fresh()
    served(machine, DONOR, "ttl")
    req = arrived(machine, [*DONOR, 3, 3], "ttl")
    machine.admit(chunk=1000, another_match=False)
    machine.decode_one(req, 1)
    told = asked(machine, {"what": "forget", "tenant": "ttl"})
    assert (told["running_requests"], told["left_in_running_requests"]) == (1, 1)
    assert told["left_tokens"] == len(DONOR) + 2 + 1
    req.done = True
    machine.let_go(req, checkpoint=True)
    told = asked(machine, {"what": "forget", "tenant": "ttl"})
    assert told["left_tokens"] == told["running_requests"] == 0
    refused = asked(machine, {"what": "forget", "tenant": "nobody"})
    assert refused["status"] == 400
    assert "'nobody': allowed are quota, ttl" in refused["error"]


def test_ranks_compare_what_they_do_not_measure():
    from sglang_kvshare.engine.control import comparable

    one = {"nodes": [{"tokens": 3, "idle_s": 1.0}], "took_ms": 2.0}
    assert comparable(one) == comparable({"nodes": [{"tokens": 3, "idle_s": 9.0}], "took_ms": 1.0})
    assert comparable(one) != comparable({"nodes": [{"tokens": 4, "idle_s": 1.0}], "took_ms": 2.0})


def test_a_fault_is_an_answer_and_the_scheduler_lives_on():
    machine = fresh()
    machine.cache.index.tokens_by_node = None
    told = asked(machine, tree_question())
    assert (told["status"], told["error"].split(":")[0]) == (500, "TypeError")


def test_what_cannot_be_overwritten_leaves_all_the_same_and_is_told():
    machine = fresh()
    served(machine, DONOR, "ttl", SALT)
    served(machine, [5, *PASSAGE, 6], None)

    def fail(slots):
        raise RuntimeError("injected")

    machine.cache.retention.condemned.overwrite = fail
    told = machine.cache.retention.forget("ttl")
    assert (told.left_in_tree, told.left_in_index, told.overwritten) == (0, 0, False)
    assert told.removed_tokens == len(DONOR)
    assert machine.faults == ["retention"]
    machine.slots_are_conserved()
    machine.cache.retention.condemned.overwrite = machine.overwrite
    assert machine.cache.retention.forget("ttl").overwritten


def test_time_that_cannot_pass_ends_no_step(monkeypatch):
    from sglang_kvshare.engine.retention import Retention, step

    machine = fresh()

    def fail(self):
        raise RuntimeError("injected")

    monkeypatch.setattr(Retention, "expire", fail)
    scheduler = SimpleNamespace(tree_cache=machine.cache)
    assert step(lambda self: "the batch", scheduler) == "the batch"
    assert machine.faults == ["retention"]
