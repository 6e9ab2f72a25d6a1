"""A state machine over the real scheduler: any order of requests, turns and disturbances.

``test_live_machine`` runs it for a while, ``soak`` for long. What must hold is checked after every
turn of the event loop; what a request was told and the text it got, when it ends.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference import Reference
from tiny_models import VOCAB, TinyModel

from kvshare_eval.live.scheduler import Finished, LiveScheduler
from sglang_kvshare.config import KVShareConfig

WINDOW = 8
#: Ties between tokens, and rounding that depends on the batch (see ``comparing``).
TIE, ROUNDING = 2e-3, 5e-4
#: Trust domains: the first is the common one, and no two may meet.
DOMAINS = [(None, None), ("s", None), (None, "s"), ("a", "b")]
STATES = ("waiting", "chunked", "prefilled", "decoding", "retracted")
LIVE_REQUESTS = 8
#: Decode steps that the ledger counts for a request that stands still meanwhile.
LEDGER_DRIFT = 64
#: Reasons that only a fault of KVShare gives.
FAULTS = (
    *("planning_failed", "placement_failed", "selection_failed", "narrowing_failed"),
    *("index_failed", "donor_invalid", "bad_request_options"),
)


def tiny(number: int) -> TinyModel:
    """Models that differ in their weights only."""
    shape = {"layers": 3, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64}
    return TinyModel("LlamaForCausalLM", "llama", seed=11 + number, head_dim=16, **shape)


@dataclass(frozen=True)
class LiveConfig:
    """One scheduler.

    Attributes:
        pool: KV slots; a few requests fill it.
        chunk: tokens of one prefill step.
    """

    page_size: int
    overlap: bool
    pool: int
    chunk: int
    narrow_layer: int = 0
    mixed: bool = False
    policy: str = "fcfs"

    @property
    def name(self) -> str:
        return f"page{self.page_size}-{'overlap' if self.overlap else 'normal'}"


CONFIGS = {
    config.name: config
    for config in (
        LiveConfig(1, True, pool=320, chunk=48, mixed=True),
        LiveConfig(1, False, pool=320, chunk=64, narrow_layer=1, policy="lpm"),
        LiveConfig(16, True, pool=512, chunk=64, narrow_layer=1),
        LiveConfig(16, False, pool=512, chunk=64, mixed=True),
        # A mixed chunk gives a token to each decoding row, and the rest in whole pages.
        LiveConfig(64, True, pool=1024, chunk=192, mixed=True),
        LiveConfig(64, False, pool=1024, chunk=128, narrow_layer=1, policy="lpm"),
    )
}


@dataclass
class Bench:
    """What all examples of one process share."""

    config: LiveConfig
    live: LiveScheduler
    folders: list[Path]
    references: list[Reference]
    #: What has been seen: positive controls.
    counts: Counter[str] = field(default_factory=Counter)
    #: Requests to preempt before memory is short, in the next decode step.
    preempt: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler, swapping = self.live.scheduler, self.live.cache.swapping
        # Copies are waited for after so many steps: an example must not hang on the clock.
        swapping.ranks = 2
        update = scheduler.update_running_batch

        def preempting(batch: Any) -> Any:
            from sglang_kvshare.engine.swapping import preempt

            for number, req in reversed(list(enumerate(batch.reqs))):
                if req.rid in self.preempt and not req.finished():
                    self.counts["preempted"] += 1
                    preempt(scheduler, batch, number)
            return update(batch)

        scheduler.update_running_batch = preempting

    def swaps(self) -> Counter[str]:
        """Copies of preempted requests, fallbacks and faults since the start."""
        totals = self.live.cache.metrics.totals
        return Counter(
            {
                " ".join((series.name.removeprefix("kvshare:"), *values)): int(number)
                for (series, values), number in totals.items()
                if "swap" in series.name or "swap" in values
            }
        )


def build(config: LiveConfig, folder: Path) -> Bench:
    torch.set_num_threads(1)
    # SGLang warns of each retraction and each refused flush.
    logging.disable(logging.WARNING)
    models = [tiny(0), tiny(1)]
    folders = [model.write(folder / str(number)) for number, model in enumerate(models)]
    live = LiveScheduler(
        folders[0],
        KVShareConfig(
            min_run_tokens=WINDOW,
            min_saved_tokens=1,
            seam_tokens=2,
            tail_tokens=2,
            narrow_layer=config.narrow_layer,
            # Tiny models gain nothing; what is tried here must not hang on the clock.
            gate="off",
            refresh_slowdown=1e9,
        ),
        page_size=config.page_size,
        max_total_tokens=config.pool,
        chunked_prefill_size=config.chunk,
        enable_mixed_chunk=config.mixed,
        schedule_policy=config.policy,
        disable_overlap_schedule=not config.overlap,
        max_running_requests=6,
    )
    return Bench(config, live, folders, [Reference(model) for model in models])


@dataclass
class Sent:
    """One request, and what has to be known to judge its answer.

    Attributes:
        model: number of the weights when it was sent; ``None`` once others were loaded.
        fresh: the cache has not been emptied since it was sent.
    """

    rid: str
    prompt: list[int]
    n_new: int
    kvshare: dict[str, Any]
    domain: tuple[str | None, str | None]
    logprobs: bool
    model: int | None
    fresh: bool = True
    aborted: bool = False

    @property
    def exact(self) -> bool:
        """Whether its text must be that of a full computation."""
        return (
            self.kvshare.get("reuse", "approximate") != "approximate"
            or self.kvshare.get("recompute_ratio") == 1.0
        )


#: Different tokens, but for the last one, which repeats a few.
PASSAGES = [
    random.Random(length).choices(range(VOCAB), k=length) for length in (12, 20, 33, 40, 52)
]
PASSAGES.append([7, 8, 7, 9] * 16)
MODES = st.sampled_from(
    [
        *({"recompute_ratio": 0.0}, {"recompute_ratio": 0.3}, {}) * 2,
        *({"recompute_ratio": 1.0}, {"reuse": "exact_prefix"}, {"reuse": "off"}),
        # What is chosen in the forward, what is refreshed while decoding, what stays out of the
        # cache.
        {"recompute_ratio": 0.3, "selector": "dhd"},
        {"recompute_ratio": 0.3, "selector": "query", "refresh_tokens": 3},
        {"recompute_ratio": 0.0, "refresh_tokens": 4},
        {"recompute_ratio": 0.3, "selector": "dhd", "attention": "check_layer", "publish": False},
        {"recompute_ratio": 1.0, "selector": "dhd", "refresh_tokens": 2},
    ]
)
SETTINGS = st.fixed_dictionaries(
    {
        "kvshare": MODES,
        "domain": st.sampled_from([DOMAINS[0]] * 4 + DOMAINS),
        "n_new": st.integers(1, 20),
        # Log-probabilities of nothing, of the output, of the prompt as well.
        "logprobs": st.sampled_from([None, None, "output", "prompt"]),
        # What happens before anything else does.
        "turns": st.integers(0, 3),
    }
)


class LiveMachine(RuleBasedStateMachine):
    bench: ClassVar[Bench]

    @initialize()
    def begin(self) -> None:
        bench = self.bench
        self.live, self.counts = bench.live, bench.counts
        if self.live.model != str(bench.folders[0]):
            self.live.reset()
            assert self.live.update_weights(bench.folders[0])
        self.live.reset()
        self.live.on_batch(self.note_batch)
        self.model = 0
        self.sent: dict[str, Sent] = {}
        self.said: list[tuple[Sent, tuple[int, ...]]] = []
        self.fresh_tokens = random.Random(99)
        self.number = 0

    # --- requests arrive ----------------------------------------------------------------------

    @precondition(lambda self: len(self.sent) < LIVE_REQUESTS)
    @rule(length=st.integers(1, 150), settings=SETTINGS)
    def arrive_fresh(self, length, settings):
        self.submit(self.new(length), settings)

    @precondition(lambda self: len(self.sent) < LIVE_REQUESTS)
    @rule(
        order=st.lists(st.integers(0, len(PASSAGES) - 1), min_size=1, max_size=4),
        glue=st.integers(0, 20),
        question=st.integers(0, 5),
        settings=SETTINGS,
    )
    def arrive_with_passages(self, order, glue, question, settings):
        """Passages in any order, the same one twice as well, at any offset."""
        prompt = self.new(glue)
        for number in order:
            prompt += PASSAGES[number] + self.new(glue % 3)
        self.submit(prompt + self.new(question), settings)

    @precondition(lambda self: len(self.sent) < LIVE_REQUESTS and self.prompts())
    @rule(
        pick=st.integers(0, 5),
        cut=st.integers(0, 3),
        more=st.integers(0, 30),
        times=st.integers(1, 2),
        settings=SETTINGS,
    )
    def arrive_again(self, pick, cut, more, times, settings):
        """A prompt that was sent before: the same, shorter, or longer; once, or twice at once."""
        known = self.prompts()
        prompt = known[-1 - pick % len(known)]
        prompt = prompt[: max(1, len(prompt) - cut)] + self.new(more)
        for _ in range(times):
            self.submit(prompt, settings)

    @precondition(lambda self: len(self.sent) < LIVE_REQUESTS and self.said)
    @rule(
        pick=st.integers(0, 5),
        offset=st.integers(0, 12),
        more=st.integers(0, 20),
        settings=SETTINGS,
    )
    def arrive_follow_up(self, pick, offset, more, settings):
        """The next turn of a dialogue, its beginning cut or not; in the same domain."""
        before, answer = self.said[-1 - pick % len(self.said)]
        prompt = [*before.prompt, *answer][offset:] + self.new(more)
        self.submit(prompt or [1], settings | {"domain": before.domain})

    # --- time passes --------------------------------------------------------------------------

    @rule(turns=st.integers(1, 8))
    def run(self, turns):
        for _ in range(turns):
            self.turn()

    @rule()
    def run_until_idle(self):
        if self.live.paused:
            self.live.resume()
        for _ in range(2000):
            self.turn()
            if self.live.idle and not self.sent:
                return
        raise AssertionError(f"not idle: {[req.rid for req in self.live.requests()]}")

    # --- disturbances -------------------------------------------------------------------------

    @precondition(lambda self: self.sent)
    @rule(state=st.sampled_from(STATES), pick=st.integers(0, 3))
    def abort(self, state, pick):
        candidates = [req.rid for req in self.live.requests() if self.state(req) == state]
        candidates = [rid for rid in candidates if rid in self.sent]
        if not candidates:
            return
        rid = candidates[pick % len(candidates)]
        self.count(f"abort while {state}")
        self.sent[rid].aborted = True
        self.live.abort(rid)
        self.turn()

    @rule(tokens=st.sampled_from([1, 40, 2000]))
    def evict(self, tokens):
        self.count("evicted tokens", self.live.evict(tokens))

    @precondition(lambda self: self.live.scheduler.running_batch.reqs)
    @rule()
    def retract(self):
        self.live.retract_next()
        self.turn()
        self.live.retract_no_more()

    @precondition(lambda self: self.live.scheduler.running_batch.reqs)
    @rule(pick=st.integers(0, 3), others=st.booleans())
    def preempt(self, pick, others):
        """Before memory is short: the slots go when they have been copied."""
        rids = [req.rid for req in self.live.scheduler.running_batch.reqs]
        at = pick % len(rids)
        self.bench.preempt[:] = rids[at:] if others else [rids[at]]
        self.turn()
        self.bench.preempt.clear()

    @precondition(lambda self: not self.live.paused)
    @rule(mode=st.sampled_from(["in_place", "retract"]))
    def pause(self, mode):
        self.count(f"pause {mode}")
        self.live.pause(mode)
        self.after_turn()

    @precondition(lambda self: self.live.paused)
    @rule()
    def resume(self):
        self.live.resume()
        self.after_turn()

    @rule(new_weights=st.booleans())
    def empty(self, new_weights):
        """Flush, or load other weights, which flushes.

        Granted to an idle scheduler, and to a paused one whose requests were retracted.
        """
        granted = self.live.scheduler.is_fully_idle(ignore_waiting=self.live.paused)
        if not new_weights:
            granted &= self.live.flush()
        elif granted:
            self.model = 1 - self.model
            for sent in self.sent.values():
                sent.model = None
            granted = self.live.update_weights(self.bench.folders[self.model])
            self.count("weights updated")
            if not granted:
                # A request came in with the update; the old values are left, as SGLang says.
                self.run_until_idle()
                granted = self.live.flush()
        if granted:
            self.emptied()
        self.after_turn()

    # --- helpers of the rules -----------------------------------------------------------------

    def new(self, count: int) -> list[int]:
        return [self.fresh_tokens.randrange(VOCAB) for _ in range(count)]

    def prompts(self) -> list[list[int]]:
        return [sent.prompt for sent in self.sent.values()] + [sent.prompt for sent, _ in self.said]

    def submit(self, prompt: list[int], settings: dict[str, Any]) -> None:
        # The pool holds any one request.
        prompt = (prompt or [1])[:220]
        rid = f"r{self.number:06d}"
        self.number += 1
        sent = Sent(
            rid,
            prompt,
            settings["n_new"],
            settings["kvshare"],
            settings["domain"],
            settings["logprobs"] is not None,
            self.model,
        )
        self.sent[rid] = sent
        self.live.submit(
            rid,
            prompt,
            sent.n_new,
            kvshare=sent.kvshare,
            cache_salt=sent.domain[0],
            extra_key=sent.domain[1],
            logprobs=sent.logprobs,
            logprob_start_len=0 if settings["logprobs"] == "prompt" else -1,
        )
        for _ in range(settings["turns"]):
            self.turn()

    def state(self, req: Any) -> str:
        scheduler = self.live.scheduler
        if any(req is waiting for waiting in scheduler.waiting_queue):
            return "retracted" if req.retraction_count else "waiting"
        if req is scheduler.chunked_req:
            return "chunked"
        running = any(req is other for other in scheduler.running_batch.reqs)
        return "decoding" if running else "prefilled"

    def emptied(self) -> None:
        """The cache was: what is cached from now on was sent from now on."""
        self.count("emptied")
        self.said.clear()
        for sent in self.sent.values():
            sent.fresh = False
        assert self.live.cache.index.live_tokens == 0
        # Everything in the tree is of today's weights again.
        self.live.cache.generation = 0

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] += by

    def note_batch(self, batch: Any) -> None:
        self.counts[f"batch {batch.forward_mode.name.lower()}"] += 1

    # --- what always holds --------------------------------------------------------------------

    def turn(self) -> None:
        self.live.step()
        self.after_turn()

    def after_turn(self) -> None:
        self.check()
        for rid in list(self.live.finished):
            self.judge(self.sent[rid], self.live.finished.pop(rid))
            del self.sent[rid]

    @invariant()
    def after_every_step(self) -> None:
        self.counts["steps"] += 1
        self.check()

    def check(self) -> None:
        check_slots(self.live)
        check_locks(self.live)
        check_index(self.live.cache)
        check_ledger(self.live)

    def judge(self, sent: Sent, got: Finished) -> None:
        """One answer: its length, its counts, where its tokens came from, and its text."""
        self.counts["finished"] += 1
        self.counts["retractions"] += got.retractions
        if got.reason == "abort":
            assert sent.aborted, got
            self.counts["aborted"] += 1
        else:
            assert got.reason == "length", got
            assert len(got.ids) == sent.n_new, (sent, got)
            self.check_report(sent, got)
        if got.ids and sent.exact and sent.model is not None:
            self.check_text(sent, got)
        if sent.kvshare.get("publish", True):
            # What outlived a flush was computed again after it, and is cached now.
            self.said.append((sent, got.ids))

    def check_report(self, sent: Sent, got: Finished) -> None:
        report, total = got.report, len(sent.prompt)
        assert report is not None
        names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens")
        prefix, reused, recomputed, new = (report[name] for name in names)
        assert prefix + reused + recomputed + new == total == got.prompt_tokens, got
        assert min(prefix, reused, recomputed) >= 0, got
        assert new >= 1, got
        # SGLang keeps the count of a first attempt that was sent back to the queue in the middle of
        # its prefill; the report is of the attempt that ended.
        assert prefix == got.cached_tokens or got.retractions, got
        assert (report["decision"] == "reuse") or not reused, got
        # A fault of ours is swallowed (the request is served), and so must be looked for.
        assert report["reason"] not in FAULTS, got
        if sent.kvshare.get("reuse") == "off":
            assert prefix == got.cached_tokens == 0, got
        if "reuse" in sent.kvshare or sent.kvshare.get("recompute_ratio") == 1.0:
            assert reused == 0, got
        self.counts[f"reason {report['reason']}"] += 1
        self.counts["prefix tokens"] += prefix
        self.counts["reused tokens"] += reused
        self.counts["refreshed tokens"] += report["refreshed_tokens"]
        self.counts[f"selector {report['selector']}"] += 1
        assert report["refreshed_tokens"] <= reused or got.retractions, got
        assert not report["refreshed_tokens"] or "refresh_tokens" in sent.kvshare, got
        if sent.fresh:
            self.check_sources(sent, got, prefix, reused + recomputed)

    def check_sources(self, sent: Sent, got: Finished, prefix: int, matched: int) -> None:
        """Nothing comes from another domain, nor from before the cache was emptied."""
        if got.retractions:
            # Sent back in the middle of its prefill, it finds its own first chunks.
            return
        known = [
            [*other.prompt, *ids] for other, ids in self.said if other.domain == sent.domain
        ] + [
            [*req.origin_input_ids, *req.output_ids]
            for req in self.live.requests()
            if (rid := req.rid) != sent.rid
            and rid in self.sent
            and self.sent[rid].domain == sent.domain
            and self.sent[rid].kvshare.get("publish", True)
        ]
        longest = max((common(sent.prompt, other) for other in known), default=0)
        assert prefix <= longest, (sent, prefix, longest)
        windows = {
            tuple(other[at : at + WINDOW])
            for other in known
            for at in range(len(other) - WINDOW + 1)
        }
        covered = np.zeros(len(sent.prompt), dtype=bool)
        for at in range(len(sent.prompt) - WINDOW + 1):
            if tuple(sent.prompt[at : at + WINDOW]) in windows:
                covered[at : at + WINDOW] = True
        assert matched <= int(covered[prefix:].sum()), (sent, matched)

    def check_text(self, sent: Sent, got: Finished) -> None:
        """The greedy text of a full computation, along the server's own tokens."""
        assert sent.model is not None
        tokens = [*sent.prompt, *got.ids]
        logprobs = self.bench.references[sent.model].all_logprobs(tokens[:-1])
        expected = logprobs[len(sent.prompt) - 1 :]
        chosen = expected.gather(1, torch.tensor(got.ids)[:, None])[:, 0]
        assert bool((chosen >= expected.max(dim=1).values - TIE).all()), (sent, got)
        if sent.logprobs:
            assert len(got.logprobs) == len(got.ids), got
            difference = (chosen - torch.tensor(got.logprobs)).abs().max()
            assert float(difference) < ROUNDING, (sent, got, difference)
        self.counts["texts checked"] += 1

    def teardown(self) -> None:
        if not hasattr(self, "live") or sys.exc_info()[0] is not None:
            return
        self.run_until_idle()
        self.check()
        check_idle(self.live)
        assert self.live.flush()
        check_empty(self.live)


def common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def tree_nodes(cache: Any) -> list[Any]:
    stack, found = list(cache.root_node.children.values()), []
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found


def check_slots(live: LiveScheduler) -> None:
    """Every page has one owner: the free list, a tree node, or a request beyond the tree's part.

    row of a request    |-- the tree's --|-- its own --|.. rest of the last page ..|
                        0      cache_protected_len   kv_allocated_len
    """
    page = live.scheduler.page_size
    owned = [live.allocator.get_all_free_pages().numpy()]
    for node in tree_nodes(live.cache):
        slots = node.value.numpy()
        assert len(slots) == len(node.key)
        pages = slots.reshape(-1, page)
        assert (pages == pages[:, :1] + np.arange(page)).all(), "a node with a broken page"
        assert (pages[:, 0] % page == 0).all()
        owned.append(pages[:, 0] // page)
    for req in live.requests():
        kv = req.kv
        if not kv.holds_kv:
            continue
        assert 0 <= kv.cache_protected_len <= kv.kv_committed_len <= kv.kv_allocated_len
        row = live.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].numpy()
        owned.append(np.unique(row[kv.cache_protected_len :] // page))
        # The tree's part of the row is what the tree has there.
        path = live.cache.path_device_indices(req.last_node).numpy()
        assert (row[: kv.cache_protected_len] == path[: kv.cache_protected_len]).all(), req.rid
        assert len(path) >= kv.cache_protected_len
    for kv in live.cache.swapping.left_rows().values():
        row = live.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].numpy()
        owned.append(np.unique(row[kv.cache_protected_len :] // page))
    pages = np.concatenate(owned)
    # Page 0 is padding.
    owners = np.bincount(pages, minlength=live.allocator.size // page + 1)
    assert owners[0] == 0, "the padding page has an owner"
    assert (owners[1:] == 1).all(), {
        int(at): int(owners[at]) for at in np.flatnonzero(owners != 1) if at
    }
    cache = live.cache
    sizes = cache.evictable_size(), cache.protected_size()
    assert sum(sizes) == sum(len(node.key) for node in tree_nodes(cache)), sizes


def check_locks(live: LiveScheduler) -> None:
    """A node is locked as often as live requests stand on it, or take from it or below it."""
    from sglang_kvshare.engine.state import state_of

    expected: Counter[int] = Counter()
    cache, states = live.cache, []
    locks = [copy.left.lock for copy in cache.swapping.copying if copy.left is not None]
    for req in live.requests():
        state = state_of(req)
        states.append(state)
        locks += [req.lock, *state.donor_locks]
    for lock in locks:
        node = None if lock is None else lock.node
        while node is not None and node is not cache.root_node:
            expected[node.id] += 1
            node = node.parent
    found = {node.id: node.lock_ref for node in tree_nodes(cache) if node.lock_ref}
    assert found == dict(expected), (found, expected)
    assert all(any(state is held for state in states) for held in cache.donors._holders), (
        "a lost holder"
    )


def check_ledger(live: LiveScheduler) -> None:
    """The ledger knows those that hold KV and no others, and what each holds to the page.

    A fault of scheduling is swallowed (SGLang decides), and so must be looked for.
    """
    from sglang_kvshare.engine.metrics import FAULTS as FAULT_COUNTS

    cache = live.cache
    assert cache.metrics.totals[FAULT_COUNTS, ("schedule",)] == 0
    ledger = cache.schedule.parts.ledger
    holding = {req.rid: req for req in live.requests() if req.kv.holds_kv}
    assert set(ledger._place) == set(holding)
    for rid, req in holding.items():
        held = int(ledger._base[ledger._place[rid]]) + ledger._now
        most = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        assert 0 <= held <= most + LEDGER_DRIFT, (rid, held)


def check_index(cache: Any) -> None:
    """The run index holds the tree's exact tokens, each once, and those of branches that may serve.

    (Which ones of a branch is the business of ``tree_machine``: the index does not hold what was
    moved.)
    """
    from sglang_kvshare.engine.branches import depth_of, is_approximate

    # A fault of the index is swallowed (the tree serves on), and so must be looked for.
    assert not cache.index_failed
    index, total = cache.index, 0
    nodes = tree_nodes(cache)
    known = cache.mirror._nodes
    assert {node.id for node in nodes} == set(known)
    for node in nodes:
        assert known[node.id] is node
        found = index.nodes_of(np.asarray(node.value.numpy(), dtype=np.int64))
        held = found >= 0
        assert (found[held] == node.id).all()
        assert is_approximate(node) == (depth_of(node) > 0)
        if is_approximate(node):
            assert depth_of(node) <= cache.config.max_depth + 1
        elif cache.generation == 0:
            assert held.all()
        total += int(held.sum())
    assert index.live_tokens == total


def check_idle(live: LiveScheduler) -> None:
    """Nothing in flight: nothing locked, nothing held."""
    assert live.cache.protected_size() == 0
    assert live.cache.held_donor_locks == 0
    assert live.cache.donors.holders == 0
    assert live.allocator.available_size() + live.cache.evictable_size() == live.allocator.size
    assert len(live.rows.free_slots) == live.rows.size
    parts = live.cache.schedule.parts
    assert not parts.ledger
    assert not parts.holder
    assert parts.host_pool.used_tokens == 0
    assert live.cache.swapping.used_tokens == 0


def check_empty(live: LiveScheduler) -> None:
    assert live.allocator.available_size() == live.allocator.size
    assert live.cache.index.live_tokens == live.cache.index.namespaces == 0
    assert not live.cache.mirror._nodes


def explore(
    bench: Bench, *, examples: int, steps: int, random_seed: int | None = None
) -> Counter[str]:
    """Run the machine; without a seed always the same examples.

    Returns:
        what was seen.

    Raises:
        whatever an example raises, shrunk, with the example in its notes.
    """
    machine = type("Machine", (LiveMachine,), {"bench": bench})
    if random_seed is not None:
        machine = seed(random_seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=random_seed is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return bench.counts
