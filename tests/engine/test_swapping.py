"""Swapping on SGLang's real allocators, without a model: ranks in step, and small matters.

The scheduler that preempts is in ``test_live_swapping``.
"""

from __future__ import annotations

import math
import threading
from array import array
from types import SimpleNamespace

import pytest
import torch
from tree_machine import FakeReq, TreeCacheMachine

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

PROMPT = [5, 1, 2, 0, 2, 1, 1, 0, 0, 6, 7, 8]


def pool_of(slots):
    buffers = [torch.randn(slots, 2, 8) for _ in range(4)]
    return SimpleNamespace(
        start_layer=0,
        layer_num=2,
        get_key_buffer=buffers[:2].__getitem__,
        get_value_buffer=buffers[2:].__getitem__,
    )


def machine_with(*, host_tokens=100, tenant=None, **swapping):
    """A request that decodes, in a cache that swaps."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    from sglang_kvshare.engine.host_copies import Copier
    from sglang_kvshare.engine.state import RequestState, attach
    from sglang_kvshare.engine.swapping import Swapping
    from sglang_kvshare.request import RequestOptions
    from sglang_kvshare.scheduling.host_pool import HostPool
    from sglang_kvshare.scheduling.preemption_cost import PreemptionCost

    machine = TreeCacheMachine()
    machine.begin()
    copier = Copier(pool_of(machine.pool + 1), host_tokens * 4 * 64)
    machine.cache.swapping = Swapping(
        machine.cache,
        copier,
        HostPool(copier.capacity_tokens),
        PreemptionCost(copier.bytes_per_token),
        **{"way": "swap", **swapping},
    )
    req = FakeReq("r", array("q", PROMPT), None, None, kv=ReqKvInfo())
    attach(req, RequestState(RequestOptions("exact_prefix", 1.0, "seams"), tenant))
    machine.waiting.append(req)
    machine.admit(1000, False)
    for token in (1, 0, 2):
        machine.decode_one(req, token)
    return machine, machine.cache.swapping, req


def preempt(machine, swapping, req):
    """As ``release_req`` does, with the row left behind."""
    swapping._beside = True
    swapping.swap_out(req)
    machine.live.remove(req)
    left = machine.cache.claim_kv_row(req)
    swapping._beside = False
    if not left:
        machine.live.append(req)
        machine.let_go(req, checkpoint=False)
    return left


def promised(machine, req):
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    req.refresh()
    ids = req.full_untruncated_fill_ids
    match = machine.cache.match_prefix(
        MatchPrefixParams(RadixKey(ids, limit=len(ids) - 1), req=req)
    )
    req.prefix_len, req.last_node = match.device_prefix_len, match.last_device_node
    return match.device_prefix_len, match.host_hit_length


def in_step(script):
    """``script(rank, agree)`` on two ranks; what each returned."""
    barrier, said, told = threading.Barrier(2), [False, False], [None, None]

    def agree_of(rank):
        def agree(mine):
            said[rank] = mine
            barrier.wait(60)
            everybody = all(said)
            barrier.wait(60)
            return everybody

        return agree

    def run(rank):
        try:
            told[rank] = script(rank, agree_of(rank))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return told


def broken(*args, **kwargs):
    raise RuntimeError("injected")


@pytest.mark.parametrize("step", ["none", "_gather", "out", "back"])
def test_ranks_do_the_same_whoever_of_them_fails(step):
    """No rank's clock decides: both wait for two steps, however soon a copy is done."""

    def script(rank, agree):
        machine, swapping, req = machine_with(agree=agree, ranks=2)
        if rank == 1 and step != "none":
            setattr(swapping.copier, step, broken)
        log = [preempt(machine, swapping, req)]
        for _ in range(3):
            log.append((len(swapping.copying), swapping.used_tokens, len(swapping.left_rows())))
            swapping.step()
        log.append(promised(machine, req))
        tokens = log[-1][1]
        log.append(swapping.load(req, tokens) if tokens else 0)
        log.append(swapping.used_tokens)
        machine.cache.evict(SimpleNamespace(num_tokens=1000))
        log.append(machine.allocator.available_size())
        return log

    first, second = in_step(script)
    assert first == second
    # The last token is computed.
    tokens = len(PROMPT) + 3 - 1
    assert first[:4] == [True, (1, tokens, 1), (1, tokens, 1), (0, *first[3][1:2], 0)]
    prefix, host = first[4]
    if step in ("none", "back"):
        assert prefix + host == tokens
        assert host > 0
    else:
        assert host == 0
    loaded = host if step == "none" else 0
    assert first[5] == loaded
    assert first[6] == (tokens if step == "none" else 0)
    assert first[7] == 160 - loaded


def test_matching_five_times_promises_the_same_and_changes_nothing():
    machine, swapping, req = machine_with()
    preempt(machine, swapping, req)
    # Not before it is there.
    assert promised(machine, req)[1] == 0 or not swapping.copying
    swapping.settle(*swapping.copying)
    told = {promised(machine, req) for _ in range(5)}
    assert len(told) == 1
    ((prefix, host),) = told
    assert (prefix, prefix + host) == (len(PROMPT), len(PROMPT) + 2)
    assert swapping.used_tokens == len(PROMPT) + 2
    machine.slots_are_conserved()


def test_logits_that_are_asked_for_again_are_not_skipped():
    """SGLang ends the prefix where log-probabilities of the prompt begin."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    machine, swapping, req = machine_with()
    preempt(machine, swapping, req)
    swapping.settle(*swapping.copying)
    machine.press(200)
    req.refresh()
    key = RadixKey(req.full_untruncated_fill_ids, limit=5)
    match = machine.cache.match_prefix(MatchPrefixParams(key, req=req))
    assert (match.device_prefix_len, match.host_hit_length) == (0, 5)


def test_what_is_computed_faster_is_not_copied():
    from sglang_kvshare.scheduling.forward_cost import Load

    machine, swapping, req = machine_with(way="auto")
    gate = SimpleNamespace(cost=SimpleNamespace(known=False))
    machine.cache.gate_of = lambda reqs: gate
    # Nothing is known: it is copied.
    assert swapping.way_of(req).way == "swap"
    from sglang_kvshare.scheduling.forward_cost import ForwardCost

    gate.cost = ForwardCost()
    for rows in (4, 16, 64):
        for _ in range(4):
            gate.cost.observe(Load.of(rows, rows), rows * 1.0, narrowed=False)
    for direction in (swapping.cost.observe_out, swapping.cost.observe_in):
        direction(1000, 1000.0)
    way = swapping.way_of(req)
    assert way.way == "recompute"
    assert way.ms < way.other_ms < math.inf
    assert not preempt(machine, swapping, req)
    assert swapping.used_tokens == 0
    # Positive control: with a fast copy.
    machine, swapping, req = machine_with(way="auto")
    machine.cache.gate_of = lambda reqs: gate
    for direction in (swapping.cost.observe_out, swapping.cost.observe_in):
        direction(1000, 0.001)
    assert swapping.way_of(req).way == "swap"
    assert preempt(machine, swapping, req)
    swapping.clear()


@pytest.mark.parametrize("why", ["weights", "forgotten", "ending", "special", "prefill"])
def test_a_request_whose_values_are_not_to_be_kept_is_recomputed(why):
    machine, swapping, req = machine_with(tenant="quota")
    if why == "weights":
        machine.cache.forget_donors()
    elif why == "forgotten":
        machine.cache.retention.forget("quota")
    elif why == "ending":
        req.to_finish = "abort"
    elif why == "special":
        req.return_hidden_states = True
    else:
        req.kv.kv_committed_len = 4
    swapping.swap_out(req)
    assert not swapping._copies
    assert swapping.used_tokens == 0


def test_a_copy_is_dropped_when_the_text_in_it_is_past_its_time():
    machine, swapping, req = machine_with(tenant="ttl")
    preempt(machine, swapping, req)
    swapping.settle(*swapping.copying)
    (copy,) = swapping._copies.values()
    machine.wait(9.0)
    machine.step()
    assert not copy.gone
    machine.wait(2.0)
    machine.step()
    assert copy.gone
    swapping._wait()
    assert swapping.used_tokens == 0
    assert not any(
        plane.any() for extent in copy.extents for plane in swapping.copier.memory.planes(extent)
    )
    assert promised(machine, req) == (0, 0)
