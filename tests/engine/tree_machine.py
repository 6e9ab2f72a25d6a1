"""KVShareRadixCache on SGLang's real allocators, under any order of events.

No model runs. Instead every slot remembers what was written to it (token, position, trust domain,
provenance), so that each copy and each published slot can be checked.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sglang_kvshare.attention.layerwise_copy import Copying

WINDOW = 4
ROWS, CONTEXT = 5, 160
DOMAINS = [(None, None), ("s", None), (None, "s"), ("a", "b")]
#: Three different tokens only, so that passages share runs and beginnings by chance as well.
PASSAGES = np.random.default_rng(7).integers(0, 3, size=(5, 30)).tolist()


@dataclass(frozen=True)
class Written:
    """``depth``: approximations that rest on each other, 0 for exact; ``moved``: copied here;
    ``tenant``: of the request that wrote it."""

    token: int
    position: int
    domain: tuple
    depth: int
    moved: bool = False
    tenant: str | None = None


@dataclass(eq=False)
class FakeReq:
    """The attributes of ``Req`` that the tree cache, admission and placement read."""

    rid: str
    origin_input_ids: array
    cache_salt: str | None
    extra_key: str | None
    kv: object
    output_ids: array = field(default_factory=lambda: array("q"))
    done: bool = False
    prefix_len: int = 0
    extend_end: int = 0
    last_node: object = None
    lock: object = None
    priority: int = 0
    skip_radix_cache_insert: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    return_hidden_states: bool = False
    input_embeds = positional_embed_overrides = multimodal_inputs = session = None
    beam_group = multi_item_delimiter_indices = token_indices_to_pool = None
    full_untruncated_fill_ids: array = field(default_factory=lambda: array("q"))

    to_finish = None

    def finished(self) -> bool:
        return self.done

    @property
    def cache_request_handle(self) -> str:
        return self.rid

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def detach_kv(self) -> object:
        kv, self.kv = self.kv, type(self.kv)()
        return kv

    def refresh(self) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    @property
    def domain(self) -> tuple:
        return (self.cache_salt, self.extra_key)


#: The first has a quota of indexed tokens, the second a time to live.
TENANTS = ["quota", "ttl"]
QUOTA_TOKENS, TTL_S = 30, 10.0
#: Of the model that is not there.
LAYERS = 4
EMBEDDINGS = np.random.default_rng(8).standard_normal((300, 16)).astype(np.float32)


class RecordingPlacer:
    """Stands in for the copy of KV: moves what the slots remember."""

    #: None is under way when the next one begins.
    copying = None

    def __init__(self, machine):
        self.machine = machine

    def place(self, copy, *, finite=True):
        # All donors are read before a target is written.
        read = [self.machine.written.get(int(slot)) for slot in copy.source_slots]
        columns = (copy.target_slots, copy.source_positions, copy.target_positions)
        for was, target, source, position in zip(
            read, *map(torch.Tensor.tolist, columns), strict=True
        ):
            assert was is not None, "a donor slot that nobody wrote"
            assert was.depth <= self.machine.max_depth, "a donor that is too far from exact"
            assert not was.moved, "a key that was rotated already"
            assert was.position == source, (was, source)
            self.machine.write(
                target, Written(was.token, position, was.domain, was.depth + 1, moved=True)
            )
        return Copying(torch.tensor([int(not finite)]))

    def finite(self, copying):
        return copying.finite()


class TreeCacheMachine(RuleBasedStateMachine):
    page_size = 1
    pool = 160
    max_depth = 1
    similar_donors = False

    @initialize()
    def begin(self):
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from sglang_kvshare.config import KVShareConfig
        from sglang_kvshare.engine.retention import Limits
        from sglang_kvshare.engine.tree_cache import KVShareRadixCache
        from sglang_kvshare.matching.sketch import Sketcher

        common = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
        if self.page_size == 1:
            self.allocator = TokenToKVPoolAllocator(self.pool, **common)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(self.pool, self.page_size, **common)
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
        )
        config = KVShareConfig(
            selector="seams",
            min_run_tokens=WINDOW,
            min_saved_tokens=1,
            seam_tokens=1,
            max_depth=self.max_depth,
            similar_donors=self.similar_donors,
            sketch_tokens=8,
            min_semantic_run_tokens=2,
        )
        sketcher = Sketcher(EMBEDDINGS, size_tokens=8) if self.similar_donors else None
        limits = {"quota": Limits(QUOTA_TOKENS), "ttl": Limits(ttl_s=TTL_S)}
        self.cache = KVShareRadixCache(
            params, config, layers=LAYERS, sketcher=sketcher, limits=limits
        )
        self.now_s = self.step_s = 0.0
        self.cache.retention.clock = lambda: self.now_s
        self.cache.retention.condemned.overwrite = self.overwrite
        #: When each slot of the tree came into it.
        self.since_s: dict[int, float] = {}
        #: Slots with text of a forgotten tenant that were not written since, and those of them that
        #: were overwritten.
        self.forgotten: set[int] = set()
        self.overwritten: set[int] = set()
        self.faults: list[str] = []
        self.cache.fault = self.faults.append
        #: Tokens that came from approximate branches: the run did what it is for.
        self.from_branches = 0
        self.written: dict[int, Written] = {}
        #: Slots written by weights that are gone, and requests that began with them.
        self.old_weights: set[int] = set()
        self.old_requests: set[FakeReq] = set()
        self.live: list[FakeReq] = []
        self.waiting: list[FakeReq] = []
        self.count = 0
        self.seen: list[list[int]] = []

    # --- the life of a request, as the scheduler leads it --------------------------------------

    @rule(
        data=st.data(),
        reuse=st.sampled_from(["approximate"] * 5 + ["exact_prefix", "off"]),
        ratio=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        selector=st.sampled_from(["seams", "query", "dhd"]),
        domain=st.sampled_from(DOMAINS[:1] * 5 + DOMAINS),
        tenant=st.sampled_from([None, None, *TENANTS]),
    )
    def arrive(self, data, reuse, ratio, selector, domain, tenant):
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        from sglang_kvshare.engine.state import RequestState, attach
        from sglang_kvshare.request import RequestOptions

        if len(self.waiting) > 3:
            return
        # Passages that come back, cut anywhere, with single tokens between them.
        piece = st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(6, 24))
        pieces = data.draw(st.lists(piece, min_size=1, max_size=4))
        tokens = [data.draw(st.integers(0, 2))]
        if self.seen and data.draw(st.booleans()):
            # A prompt that shares its beginning with an earlier one: nodes are split.
            tokens = data.draw(st.sampled_from(self.seen))[: data.draw(st.integers(1, 40))]
        for number, begin, length in pieces:
            tokens += [*PASSAGES[number][begin : begin + length], number % 3]
        tokens = tokens[:70]
        self.seen = [*self.seen[-8:], tokens]
        req = FakeReq(f"r{self.count}", array("q", tokens), *domain, kv=ReqKvInfo())
        self.count += 1
        attach(req, RequestState(RequestOptions(reuse, ratio, selector), tenant))
        self.waiting.append(req)

    def write(self, slot, written):
        self.written[slot] = written
        # A slot may leave the tree and come back within one rule.
        self.since_s.pop(slot, None)
        self.forgotten.discard(slot)
        self.overwritten.discard(slot)

    @precondition(lambda self: self.waiting and len(self.live) < ROWS)
    @rule(chunk=st.sampled_from([8, 32, 1000]), another_match=st.booleans())
    def admit(self, chunk, another_match):
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        from sglang_kvshare.engine.admission import plan_admitted
        from sglang_kvshare.engine.state import state_of

        self.step()
        req = self.waiting.pop(0)
        req.refresh()
        ids = req.full_untruncated_fill_ids
        for _ in range(1 + another_match):
            match = self.cache.match_prefix(
                MatchPrefixParams(
                    RadixKey(ids, req.extra_key, limit=len(ids) - 1, cache_salt=req.cache_salt),
                    req=req,
                )
            )
        if state_of(req).options.reuse == "off":
            assert match.device_prefix_len == 0
            assert match.last_device_node is self.cache.root_node
        assert not self.condemned(match.last_device_node)
        req.prefix_len = match.device_prefix_len
        req.last_node = match.last_device_node
        req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        branch_tokens = plan_admitted(self.cache, req)
        assert branch_tokens == 0 or state_of(req).options.reuse == "approximate"
        self.from_branches += branch_tokens
        self.live.append(req)
        self.extend(req, chunk)

    @precondition(lambda self: self.waiting and len(self.live) < ROWS)
    @rule(chunk=st.sampled_from([16, 1000]))
    def serve(self, chunk):
        """From the queue to the end, with nothing in between."""
        req = self.waiting[0]
        self.admit(chunk, False)
        while req in self.live and req in self.prefilling():
            self.extend(req, chunk)
        if req in self.live:
            req.done = True
            self.let_go(req, checkpoint=True)

    def prefilling(self):
        return [r for r in self.live if r.prefix_len < len(r.full_untruncated_fill_ids)]

    @precondition(lambda self: self.prefilling())
    @rule(data=st.data(), chunk=st.sampled_from([4, 16, 1000]))
    def next_chunk(self, data, chunk):
        self.extend(data.draw(st.sampled_from(self.prefilling())), chunk)

    placer_class = RecordingPlacer
    faulty = False

    def extend(self, req, chunk):
        """Allocate, place, 'compute' and publish one chunk."""
        from sglang_kvshare.engine.forward import WorkerParts, _finish, _place_or_miss
        from sglang_kvshare.engine.kept_rows import Extend
        from sglang_kvshare.engine.row_program import RowProgram
        from sglang_kvshare.engine.state import state_of

        total, start = len(req.full_untruncated_fill_ids), req.prefix_len
        end = min(total, start + chunk)
        if end < total:
            end = max(end // self.page_size * self.page_size, start + self.page_size)
            end = min(end, total)
        slots = self.allocate(end - start)
        if slots is None:
            self.let_go(req, checkpoint=False)
            return
        if not req.kv.holds_kv:
            assert self.rows.alloc_rows is not None
            req.kv.req_pool_idx = self.rows.alloc_rows(1)[0]
            row = self.rows.req_to_token[req.kv.req_pool_idx]
            row[:start] = self.cache.prefix_device_indices(req)[:start].to(torch.int32)
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[start:end] = slots[: end - start].to(torch.int32)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        req.extend_end = end

        state = state_of(req)
        placed = set()
        if state.placement is not None:
            inside = state.placement.within(start, end)
            placed = set(inside.positions.tolist())
            # What is about to be copied is still in the tree, where the plan saw it.
            assert set(inside.slots.tolist()) <= self.serving_slots()
        batch = SimpleNamespace(
            reqs=[req],
            prefix_lens=[start],
            extend_lens=[end - start],
            out_cache_loc=slots[: end - start],
            tree_cache=self.cache,
        )
        for slot in slots.tolist():
            self.written.pop(slot, None)
            self.note_weights(req, slot)
        parts = WorkerParts(self.placer_class(self), 0, LAYERS, None, None, None)
        chunks = _place_or_miss(parts, batch).chunks
        for chunk in chunks:
            if chunk.choice is not None:
                # The prompt ends here. What the forward would choose is any tokens.
                assert end == total
                chunk.recompute = chunk.placement.positions % 3 == 1
                chunk.choice = None
        if placed and chunks:
            assert {p for c in chunks for p in c.placement.positions.tolist()} == placed
            placed = {p for c in chunks for p in c.spared.positions.tolist()}
            program = RowProgram(Extend.of(batch), chunks, 0, LAYERS)
            assert program.narrow(0).tolist() == program.current.rows.tolist()
            self.check_kept(program.current, placed, start, end)
        else:
            assert not placed or self.faulty
            placed = set()
        _finish(batch, chunks, batch.extend_lens)
        depth = max((self.written[int(slot)].depth for slot in row[:start]), default=0)
        for position in range(start, end):
            slot, token = int(row[position]), req.full_untruncated_fill_ids[position]
            if position in placed:
                was = self.written[slot]
                assert (was.token, was.position, was.domain) == (token, position, req.domain)
                depth = max(depth, was.depth)
                self.written[slot] = replace(was, tenant=state.tenant)
            else:
                self.write(slot, Written(token, position, req.domain, depth, tenant=state.tenant))
        if end < total:
            self.cache.checkpoint(req, up_to=end)
        else:
            assert state.placement is None
            assert not state.donor_locks
            # Counted once, at the first prefill: a retracted request is longer by its output.
            assert state.report.prompt_tokens == len(req.origin_input_ids)
            assert state.report.new_tokens >= 1
            self.cache.checkpoint(req, up_to=end)
        req.prefix_len = end

    def check_kept(self, kept, placed, start, end):
        count = end - start
        rows = kept.rows.tolist()
        expected = [row for row in range(count) if row + start not in placed]
        assert rows == (expected or [count - 1])
        assert (kept.counts, kept.kv_lengths) == ([len(rows)], [end])
        assert kept.positions.tolist() == [row + start for row in rows]
        if not expected:
            # One row runs for the sake of running, and must not write over a placed value.
            assert kept.cache_loc.tolist() == [0]

    def allocate(self, tokens):
        size = -(-tokens // self.page_size) * self.page_size
        self.allocator.evict_to_free_tokens(self.cache, size)
        slots = self.allocator.alloc(size)
        # Donors give way before an allocation fails.
        assert slots is not None or self.cache.held_donor_locks == 0
        return slots

    def note_weights(self, req, slot):
        (self.old_weights.add if req in self.old_requests else self.old_weights.discard)(slot)

    def decoding(self):
        return [r for r in self.live if r.prefix_len >= len(r.full_untruncated_fill_ids)]

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), token=st.integers(0, 2))
    def decode(self, data, token):
        self.decode_one(data.draw(st.sampled_from(self.decoding())), token)

    def decode_one(self, req, token):
        from sglang_kvshare.engine.state import state_of

        position = req.kv.kv_committed_len
        if position >= CONTEXT - 1:
            return
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        if position % self.page_size == 0:
            slots = self.allocate(1)
            if slots is None:
                self.retract(req)
                return
            slot = int(slots[0])
        else:
            slot = int(row[position - 1]) + 1
        row[position] = slot
        self.note_weights(req, slot)
        req.output_ids.append(token)
        req.refresh()
        req.prefix_len = len(req.full_untruncated_fill_ids)
        depth = max(self.written[int(slot)].depth for slot in row[:position])
        self.write(slot, Written(token, position, req.domain, depth, tenant=state_of(req).tenant))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = position + 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), checkpoint=st.booleans())
    def abort(self, data, checkpoint):
        req = data.draw(st.sampled_from(self.live))
        req.done = True
        self.let_go(req, checkpoint=checkpoint)

    @precondition(lambda self: self.decoding())
    @rule(data=st.data())
    def finish(self, data):
        req = data.draw(st.sampled_from(self.decoding()))
        req.done = True
        self.let_go(req, checkpoint=True)

    @precondition(lambda self: self.decoding())
    @rule(data=st.data())
    def retract_one(self, data):
        self.retract(data.draw(st.sampled_from(self.decoding())))

    def retract(self, req):
        self.let_go(req, checkpoint=False)
        req.prefix_len = req.extend_end = 0
        req.kv.cache_protected_len = req.kv.cache_inserted_len = req.kv.kv_committed_len = 0
        self.waiting.append(req)

    def let_go(self, req, *, checkpoint):
        """``release_kv_cache`` of SGLang, for a request without extras."""
        self.live.remove(req)
        self.old_requests.discard(req)
        if req.kv.holds_kv:
            owned = req.kv.kv_committed_len
            if checkpoint:
                self.cache.checkpoint(req, up_to=owned)
            self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, owned)])
            self.cache.unlock(req.lock)
            self.cache.on_release(req, checkpointed=checkpoint)
            self.rows.free(req)
            req.kv.mark_kv_released()
        else:
            self.cache.unlock(req.lock)
            self.cache.on_release(req, checkpointed=False)
        req.lock = None

    @rule(tokens=st.sampled_from([1, 20, 200]))
    def press(self, tokens):
        """Somebody else needs memory."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))

    @precondition(lambda self: not self.live)
    @rule()
    def flush(self):
        self.cache.reset()
        self.allocator.clear()
        self.rows.clear()
        self.old_weights.clear()
        self.forgotten.clear()
        assert not self.old_requests
        assert self.cache.index.live_tokens == 0

    @rule(data=st.data())
    def look(self, data):
        """Matching five times gives one answer and leaves nothing behind."""
        if not self.seen:
            return
        tokens = data.draw(st.sampled_from(self.seen))
        domain = data.draw(st.sampled_from(DOMAINS))
        req = FakeReq("look", array("q", tokens), *domain, kv=None)
        req.refresh()
        req.last_node = self.cache.root_node
        self.step()
        serving = self.serving_slots()
        locks = {n.id: n.lock_ref for n in self.nodes()}
        edges = list(self.cache.mirror.edges)
        plans = [self.cache.plan(req) for _ in range(3)]
        assert list(self.cache.mirror.edges) == edges
        for plan in plans:
            assert plan.positions().tolist() == plans[0].positions().tolist()
            assert plan.slots().tolist() == plans[0].slots().tolist()
            for position, source, slot in zip(
                plan.positions(), plan.sources(), plan.slots(), strict=True
            ):
                was = self.written[int(slot)]
                assert (was.token, was.position, was.domain) == (tokens[position], source, domain)
                assert was.depth <= plan.depth <= self.max_depth
                assert not was.moved
                assert int(slot) in serving - self.forgotten
                assert was.tenant != "ttl" or self.now_s < self.since_s[int(slot)] + TTL_S
        assert locks == {n.id: n.lock_ref for n in self.nodes()}

    # --- tenants ---------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds):
        self.now_s += seconds

    @rule()
    def step(self):
        """The scheduler begins a pass."""
        self.cache.retention.expire()
        self.step_s = self.now_s

    @rule(tenant=st.sampled_from(TENANTS))
    def forget(self, tenant):
        from sglang_kvshare.engine.tenant_nodes import tenant_of

        before = {node.id: node for node in self.nodes()}
        theirs = {number for number, node in before.items() if tenant_of(node) == tenant}
        told = self.cache.retention.forget(tenant)
        for slot, was in self.written.items():
            if was.tenant == tenant and (slot in self.since_s or slot in self.row_slots()):
                self.forgotten.add(slot)
        after = {node.id for node in self.nodes()}
        for number, node in before.items():
            path = {number}
            above = node.parent
            while above is not None:
                path.add(above.id)
                above = above.parent
            # Positive control: what is neither the tenant's nor below it stays as it was.
            if not path & theirs and not self.condemned(node):
                assert number in after
        left = [node for node in self.nodes() if tenant_of(node) == tenant]
        assert all(node.lock_ref for node in left)
        assert (told.left_nodes, told.left_in_tree) == (
            len(left),
            sum(len(node.key) for node in left),
        )
        assert (told.left_in_index, told.left_windows) == (0, 0)
        if not self.live:
            assert not left

    @precondition(lambda self: self.live)
    @rule(data=st.data(), whose=st.sampled_from(["request", "prefix"]), end=st.booleans())
    def forget_under_a_request(self, data, whose, end):
        """While it runs: its own tenant, or one whose text it found."""
        from sglang_kvshare.engine.state import state_of
        from sglang_kvshare.engine.tenant_nodes import tenant_of

        req = data.draw(st.sampled_from(self.live))
        state = state_of(req)
        path = [req.last_node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        found = [name for name in map(tenant_of, path) if name not in (None, state.tenant)]
        tenant = state.tenant
        if found and (whose == "prefix" or tenant is None):
            tenant = data.draw(st.sampled_from(found))
        if tenant is None:
            return
        decoding = req in self.decoding()
        if decoding:
            self.decode_one(req, 2)
        if req not in self.live:
            return
        self.forget(tenant)
        self.what_is_forgotten_serves_nobody_and_leaves()
        if req in self.prefilling():
            self.extend(req, 16)
        elif end:
            self.decode_one(req, 1)
            if req in self.live:
                req.done = True
                self.let_go(req, checkpoint=True)

    def overwrite(self, slots):
        assert not set(slots.tolist()) & self.row_slots()
        self.overwritten |= set(slots.tolist())

    def row_slots(self):
        rows = set()
        for req in self.live:
            if req.kv.holds_kv:
                row = self.rows.req_to_token[req.kv.req_pool_idx]
                rows |= set(row[: req.kv.kv_allocated_len].tolist())
        return rows

    def serving_slots(self):
        """Slots of the tree that may serve."""
        nodes = [node for node in self.nodes() if not self.condemned(node)]
        return {slot for node in nodes for slot in node.value.tolist()}

    def condemned(self, node):
        from sglang_kvshare.engine.condemned import is_condemned

        return is_condemned(node)

    @invariant()
    def what_is_forgotten_serves_nobody_and_leaves(self):
        held = {slot for node in self.nodes() for slot in node.value.tolist()}
        self.since_s = {slot: self.since_s.get(slot, self.now_s) for slot in held}
        condemned = [node for node in self.nodes() if self.condemned(node)]
        # As soon as nobody needs it, and until then below what is condemned with it.
        assert all(node.lock_ref for node in condemned)
        assert self.cache.retention.condemned.nodes == len(condemned)
        assert all(self.condemned(child) for node in condemned for child in node.children.values())
        serving = self.serving_slots()
        assert not self.forgotten & serving
        for slot in serving:
            if self.written[slot].tenant == "ttl":
                assert self.step_s < self.since_s[slot] + TTL_S
        # Nothing of it stays in the pool's memory either.
        assert self.forgotten - held - self.row_slots() <= self.overwritten
        for node in condemned:
            assert (self.cache.index.nodes_of(node.value.numpy()) == -1).all()

    @invariant()
    def quotas_hold(self):
        from sglang_kvshare.engine.tenant_nodes import tenant_of

        by_node = self.cache.index.tokens_by_node()
        indexed = Counter()
        for node in self.nodes():
            indexed[tenant_of(node)] += by_node.pop(node.id, 0)
        assert not by_node
        ledger = self.cache.mirror.ledger
        assert ledger.tokens("quota") == indexed["quota"] <= QUOTA_TOKENS
        assert ledger.tokens("ttl") == indexed["ttl"]

    # --- what always holds -----------------------------------------------------------------------

    def nodes(self):
        stack, found = list(self.cache.root_node.children.values()), []
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found

    @invariant()
    def slots_are_conserved(self):
        held = 0
        for req in self.live:
            if req.kv.holds_kv:
                end = -(-req.kv.kv_allocated_len // self.page_size) * self.page_size
                held += end - req.kv.cache_protected_len
        cache = self.cache
        parts = (self.allocator.available_size(), cache.evictable_size(), cache.protected_size())
        assert sum(parts) + held == self.pool, (parts, held)
        free = self.allocator.get_all_free_pages()
        assert torch.unique(free).numel() == free.numel()

    @rule()
    def new_weights(self):
        """Without a flush: SGLang keeps its prefixes, and no donor and no branch serves."""
        self.cache.forget_donors()
        assert self.cache.index.live_tokens == 0
        assert self.cache.held_donor_locks == 0
        self.old_weights |= self.written.keys()
        self.old_requests |= set(self.live)

    @invariant()
    def the_index_holds_what_may_serve(self):
        """Computed values of the tree that are near enough to exact, of today's weights, and of no
        forgotten tenant; of one with a quota some of them."""
        # A fault of the index is swallowed (the tree serves on), and so must be looked for.
        assert not self.cache.index_failed
        from sglang_kvshare.engine.tenant_nodes import tenant_of

        index, total = self.cache.index, 0
        for node, begin in self.placed_nodes():
            slots = node.value.numpy()
            never = self.depth_of(node) > self.max_depth or self.condemned(node)
            limited = tenant_of(node) == "quota"
            for offset, slot in enumerate(slots.tolist()):
                absent = never or self.written[slot].moved or slot in self.old_weights
                absent = absent or (limited and not index.holds(slot))
                assert int(index.nodes_of(slots[offset : offset + 1])[0]) == (
                    -1 if absent else node.id
                )
                if not absent:
                    assert index.position_of(slot) == begin + offset
                    total += 1
        assert index.live_tokens == total
        assert not self.cache.mirror.similar_failed
        similar = self.cache.mirror.similar
        assert (similar is not None) == self.similar_donors
        if similar is not None:
            ends = np.flatnonzero(similar._length)
            assert (index.nodes_of(ends) >= 0).all()
            assert similar.windows == len(ends)
            # What eviction left of a path may be too little for a window.
            assert total or not len(ends)

    @invariant()
    def no_edge_dangles(self):
        """Both ends of every reuse edge are there, and in one namespace."""
        from sglang_kvshare.engine.branches import untagged
        from sglang_kvshare.matching.namespace import Namespace

        index, edges = self.cache.index, self.cache.mirror.edges
        anchors = {node.id for node in self.nodes()} | {self.cache.root_node.id}
        nodes = {node.id: node for node in self.nodes()}
        assert len(list(edges)) == len(edges)
        for edge in edges:
            assert edge.anchor in anchors
            donor = index.around(edge.last_slot, edge.length - 1, 0)
            assert (donor.position, len(donor.slots)) == (edge.source, edge.length)
            for number in set(index.nodes_of(donor.slots).tolist()):
                key = nodes[number].key
                named = Namespace(key.cache_salt, untagged(key.extra_key)).encode()
                assert named == edge.namespace

    def placed_nodes(self):
        """Every node with the position of its first token."""
        stack = [(child, 0) for child in self.cache.root_node.children.values()]
        while stack:
            node, begin = stack.pop()
            yield node, begin
            stack += [(child, begin + len(node.key)) for child in node.children.values()]

    def depth_of(self, node):
        from sglang_kvshare.engine.branches import depth_of

        return depth_of(node)

    @invariant()
    def the_tree_says_where_its_values_come_from(self):
        """A branch is approximate and says how far; everything else is exact."""
        from sglang_kvshare.engine.branches import is_approximate, untagged

        for node, begin in self.placed_nodes():
            domain = (node.key.cache_salt, untagged(node.key.extra_key))
            assert self.depth_of(node) <= self.max_depth + 1
            if not self.condemned(node):
                assert is_approximate(node) == (self.depth_of(node) > 0)
                assert not is_approximate(node.parent) or is_approximate(node)
            pairs = zip(node.key.raw_token_ids(), node.value.tolist(), strict=True)
            for offset, (token, slot) in enumerate(pairs):
                was = self.written[slot]
                assert (was.token, was.position, was.domain) == (token, begin + offset, domain)
                assert was.depth <= self.depth_of(node)

    @invariant()
    def locks_are_what_is_held(self):
        from sglang_kvshare.engine.state import state_of

        expected, donor_locks = Counter(), 0
        for req in self.live:
            state = state_of(req)
            donor_locks += len(state.donor_locks)
            for lock in [req.lock, *state.donor_locks]:
                node = lock.node
                while node is not self.cache.root_node:
                    expected[node.id] += 1
                    node = node.parent
        for node in self.nodes():
            assert node.lock_ref == expected[node.id], (node.id, node.lock_ref)
        assert self.cache.held_donor_locks == donor_locks
        for req in self.waiting:
            assert not state_of(req).donor_locks

    @invariant()
    def rows_point_at_what_was_written(self):
        from sglang_kvshare.engine.state import state_of

        for req in self.live:
            if req.kv.holds_kv:
                row = self.rows.req_to_token[req.kv.req_pool_idx]
                for position in range(req.kv.kv_committed_len):
                    was = self.written[int(row[position])]
                    token = (req.origin_input_ids + req.output_ids)[position]
                    assert (was.token, was.position, was.domain) == (token, position, req.domain)
                    if state_of(req).options.reuse != "approximate":
                        assert was.depth == 0, "an approximation in an exact request"

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for req in list(self.live):
            self.let_go(req, checkpoint=True)
        assert self.cache.held_donor_locks == 0
        assert self.cache.protected_size() == 0
        assert self.allocator.available_size() + self.cache.evictable_size() == self.pool
