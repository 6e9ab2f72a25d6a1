"""All parts together over a simulated pool: what can happen, in any order, and nothing is lost.

Requests arrive, are held, admitted, decode, are preempted both ways, resume, are aborted and end.
Estimates are right, too short or too long as the test pleases.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_kvshare.scheduling.jobs import Running, Waiting
from sglang_kvshare.scheduling.parts import ScheduleSettings, build_parts
from sglang_kvshare.scheduling.preemption import victims

pytestmark = pytest.mark.unit
POOL, HOST, BYPASSES, PREEMPTIONS = 150, 60, 4, 1


@dataclass
class Request:
    """One request, waiting or running: ``held`` tokens of the pool, none while it waits."""

    waiting: Waiting
    prompt: int
    answer: int
    bound: int
    document: int
    output: int = 0
    held: int = 0

    @property
    def rid(self):
        return self.waiting.rid


class Scheduler(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        chosen = ScheduleSettings(
            most_bypasses=BYPASSES,
            hold_ms=5,
            host_pool_tokens=HOST,
            most_preemptions=PREEMPTIONS,
        )
        self.parts = build_parts(chosen, pool_tokens=POOL, bytes_per_token=10)
        for count in (10, 1000):
            self.parts.preemption_cost.observe_out(count, count / 100)
            self.parts.preemption_cost.observe_in(count, count / 100)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.came = self.ended = 0
        self.now_ms = 0.0
        self.overtaken: dict[int, set[int]] = {}
        self.seen: Counter[str] = Counter()

    @property
    def free(self):
        return POOL - sum(one.held for one in self.running.values())

    # --- what can happen ----------------------------------------------------------------------

    @rule(
        prompt=st.integers(1, 60),
        answer=st.integers(1, 80),
        off=st.sampled_from([-30, 0, 0, 40]),
        hit=st.integers(0, 3),
        document=st.integers(0, 2),
        slo=st.sampled_from([None, 2.0, 50.0]),
    )
    def arrive(self, prompt, answer, off, hit, document, slo):
        number, self.came = self.came, self.came + 1
        job = Waiting(f"r{number}", number, self.now_ms, prompt, prompt * hit // 4)
        job.effective_ms, job.ttft_slo_ms = float(prompt - job.prefix_tokens), slo
        bound = max(1, answer + off)
        self.waiting[job.rid] = Request(job, prompt, answer, bound, document)
        self.overtaken[number] = set()

    @rule()
    def admit(self):
        """A pass over the queue; the prefills are done at its end."""
        self.now_ms += 1
        queue = list(self.waiting.values())
        begun = []
        for index in self.parts.order.order([one.waiting for one in queue], self.now_ms):
            one = queue[index]
            if self.parts.holder.held(one.waiting, [one.document], 9.0, self.now_ms):
                self.seen["held"] += 1
                continue
            if not self.parts.ledger.fits(
                one.waiting.prompt_tokens,
                max(1, one.bound - one.output),
                self.free,
                self.parts.reserve.tokens(len(self.running)),
            ):
                self.seen["no room"] += 1
                break
            self.parts.holder.begins(one.rid, [one.document], self.now_ms + 3)
            begun.append(one)
            self._admit(one)
        for one in begun:
            self.parts.holder.ended(one.rid)

    def _admit(self, one):
        del self.waiting[one.rid]
        for other in self.waiting.values():
            if other.waiting.number < one.waiting.number:
                self.overtaken[other.waiting.number].add(one.waiting.number)
        if one.rid in self.parts.host_pool:
            self.parts.host_pool.release(one.rid)
            self.seen["swapped in"] += 1
        one.held = one.waiting.prompt_tokens
        self.running[one.rid] = one
        self.parts.ledger.open(one.rid, one.held, max(1, one.bound - one.output))

    @precondition(lambda self: self.running)
    @rule()
    def decode(self):
        self._make_room()
        self.parts.ledger.step()
        for one in list(self.running.values()):
            one.held, one.output = one.held + 1, one.output + 1
            if one.output == one.answer:
                self.parts.reserve.observe(one.answer - one.bound)
                self._end(one)
        for rid in self.parts.ledger.due():
            one = self.running[rid]
            self.parts.ledger.renew(rid, max(1, one.bound - one.output))

    def _make_room(self):
        short = self.parts.ledger.short_tokens(1, self.free)
        jobs = list(self.running.values())
        told = [
            Running(
                one.rid,
                one.waiting.number,
                one.prompt,
                one.output,
                80,
                one.held,
                max(1, one.bound - one.output),
                preemptions=one.waiting.preemptions,
            )
            for one in jobs
        ]
        chosen = victims(told, short, self.parts.victim_order, PREEMPTIONS)
        spared = [one for i, one in enumerate(jobs) if i not in chosen]
        for i in chosen:
            # The protected go only if nobody else is left to go.
            if jobs[i].waiting.preemptions >= PREEMPTIONS:
                self.seen["protected"] += 1
                assert all(one.waiting.preemptions >= PREEMPTIONS for one in spared[:-1])
            self._preempt(jobs[i])
        assert self.parts.ledger.short_tokens(1, self.free) == 0

    def _preempt(self, one):
        way = self.parts.preemption_cost.choose(one.held, lambda rows, context: 2 + rows * 0.15)
        if way.way == "swap":
            # Full, it is recomputed.
            fits = self.parts.host_pool.reserve(one.rid, one.held)
            self.seen["swapped out" if fits else "host full"] += 1
        else:
            self.seen["recomputed"] += 1
        self.parts.ledger.close(one.rid)
        del self.running[one.rid]
        one.waiting.prompt_tokens, one.held = one.prompt + one.output, 0
        one.waiting.preemptions += 1
        self.waiting[one.rid] = one

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        everyone = {**self.waiting, **self.running}
        one = everyone[data.draw(st.sampled_from(sorted(everyone)))]
        if one.rid in self.running:
            self._end(one)
            return
        del self.waiting[one.rid]
        if one.rid in self.parts.host_pool:
            self.parts.host_pool.release(one.rid)
        self.parts.holder.ended(one.rid)
        self.ended += 1

    def _end(self, one):
        self.parts.ledger.close(one.rid)
        del self.running[one.rid]
        self.ended += 1

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def the_pool_is_shared_out_and_no_more(self):
        assert self.free >= 0
        held = {one.rid: one.held for one in self.running.values()}
        assert self.parts.ledger.held_tokens == sum(held.values())
        assert len(self.parts.ledger) == len(held)
        pool = self.parts.host_pool
        swapped = [one for one in self.waiting.values() if one.rid in pool]
        assert len(pool) == len(swapped)
        assert pool.used_tokens == sum(one.waiting.prompt_tokens for one in swapped) <= HOST

    @invariant()
    def nobody_is_lost_or_there_twice(self):
        assert self.waiting.keys().isdisjoint(self.running)
        assert len(self.waiting) + len(self.running) + self.ended == self.came

    @invariant()
    def nobody_is_overtaken_without_end(self):
        """By the order fewer than the bound; while it was held so many more."""
        assert max(map(len, self.overtaken.values()), default=0) < 2 * BYPASSES

    def teardown(self):
        """Whatever happened, all come to an end."""
        for _ in range(200 * (self.came + 1)):
            if not self.waiting and not self.running:
                break
            self.admit()
            self.the_pool_is_shared_out_and_no_more()
            if self.running:
                self.decode()
        assert not self.waiting
        assert not self.running
        assert self.ended == self.came
        assert self.parts.ledger.held_tokens == self.parts.host_pool.used_tokens == 0


def test_all_of_it_happens():
    """Or the machine below would prove nothing."""
    seen, draw = Counter(), random.Random(0)
    for _ in range(30):
        machine = Scheduler()
        for _ in range(60):
            what = draw.random()
            if what < 0.3:
                machine.arrive(
                    draw.randint(1, 60),
                    draw.randint(1, 80),
                    draw.choice([-30, 0, 40]),
                    draw.randint(0, 3),
                    draw.randint(0, 2),
                    draw.choice([None, 2.0, 50.0]),
                )
            elif what < 0.5:
                machine.admit()
            elif machine.running:
                machine.decode()
        machine.teardown()
        seen += machine.seen
        seen["overtaken"] += max(map(len, machine.overtaken.values()), default=0)
    for what in ("held", "no room", "swapped out", "swapped in", "recomputed", "protected"):
        assert seen[what] > 0, (what, seen)
    assert seen["overtaken"] > 60


TestScheduler = Scheduler.TestCase
TestScheduler.settings = settings(deadline=None, stateful_step_count=40)
