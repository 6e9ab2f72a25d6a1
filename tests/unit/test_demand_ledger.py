"""The demand ledger against a pool that is simulated step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_kvshare.scheduling.ledger import DemandLedger

pytestmark = pytest.mark.unit
LOOKAHEAD = 2


@dataclass
class Job:
    """Holds tokens and gets one a step, until ``left`` is 0 and it is gone."""

    tokens: int
    left: int


def up(tokens, page=1):
    return -(-tokens // page) * page


def simulated_peak(jobs, page=1):
    """The clear version: one step after the other. Overdue ones go on for the look-ahead."""
    running = [Job(job.tokens, LOOKAHEAD if job.left < 0 else job.left) for job in jobs]
    most = 0
    while running:
        most = max(most, sum(up(job.tokens, page) for job in running))
        running = [Job(job.tokens + 1, job.left - 1) for job in running if job.left > 0]
    return most


JOBS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8)
SMALL = st.integers(0, 60)


def opened(jobs, page=1):
    ledger = DemandLedger(page, LOOKAHEAD)
    for number, (tokens, left) in enumerate(jobs):
        ledger.open(f"r{number}", tokens, left)
    return ledger


# --- what is asked ------------------------------------------------------------------------------


@given(JOBS, SMALL, SMALL, st.integers(-5, 400), st.integers(0, 20))
def test_it_admits_what_a_simulation_has_room_for_and_nothing_else(
    jobs, extend, left, available, reserve
):
    held = sum(tokens for tokens, _ in jobs)
    most = simulated_peak([Job(*job) for job in [*jobs, (extend, left)]])
    fits = opened(jobs).fits(extend, left, available, reserve)
    assert fits == (most <= available + held - reserve)


@given(JOBS, SMALL, SMALL, st.integers(0, 600), st.sampled_from([4, 16]))
def test_with_pages_it_errs_to_the_safe_side_and_by_less_than_a_page_each(
    jobs, extend, left, available, page
):
    held = sum(up(tokens, page) for tokens, _ in jobs)
    most = simulated_peak([Job(*job) for job in [*jobs, (extend, left)]], page)
    if opened(jobs, page).fits(extend, left, available):
        assert most <= available + held
    else:
        assert most + (len(jobs) + 1) * (page - 1) > available + held


@given(JOBS, st.integers(0, 9), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_short_is_what_the_next_steps_lack(jobs, steps, available, page):
    grown = sum(up(tokens + steps, page) - up(tokens, page) for tokens, _ in jobs)
    assert opened(jobs, page).short_tokens(steps, available) == max(0, grown - available)


def test_a_guest_lives_in_the_unused_tail_of_its_host_and_guests_have_guests():
    """EconoServe's nesting: a half, a quarter, an eighth of the host, all in its tail."""
    ledger, pool = DemandLedger(), 64
    ledger.open("host", 0, 64)
    assert not ledger.fits(0, 33, pool)
    for guest in (32, 16, 8):
        assert ledger.fits(0, guest, pool - ledger.held_tokens)
        ledger.open(f"guest of {guest}", 0, guest)
    assert (ledger.reserved_tokens, ledger.peak_tokens, ledger.hosted_tokens) == (120, 64, 56)
    # Plain reservations have no room for any of them.
    alone = DemandLedger()
    alone.open("host", 0, 64)
    assert alone.reserved_tokens == pool


def test_the_drawing_of_the_documents_is_right():
    """docs/scheduling.md: what a host, its guest and a guest of that hold together."""
    ledger = opened([(24, 40), (12, 12), (3, 3)])
    assert (ledger.held_tokens, ledger.reserved_tokens, ledger.peak_tokens) == (39, 94, 64)
    for rid, step, together in (("r2", 3, 48), ("r1", 9, 60), ("r0", 28, 64)):
        ledger.step(step)
        assert ledger.held_tokens == together
        ledger.close(rid)


def test_cacheopts_rule_is_a_case_of_it():
    """host allocated - host used - guest's demand - buffer >= 0, if the guest ends in time."""
    host_used, host_left, buffer = 10, 50, 8
    for guest_prompt in range(0, 40):
        for guest_left in range(1, 40):
            ledger = DemandLedger()
            ledger.open("host", host_used, host_left)
            by_rule = host_left - (guest_prompt + guest_left) - buffer >= 0
            in_time = host_used + guest_left + guest_prompt + guest_left <= 60 - buffer
            if by_rule and in_time:
                assert ledger.fits(guest_prompt, guest_left, host_left)


def test_an_idle_server_admits_what_it_can_begin():
    ledger = DemandLedger()
    assert ledger.fits(100, 10**6, 100, reserve_tokens=50)
    assert not ledger.fits(101, 0, 100)
    ledger.open("a", 100, 10**6)
    assert not ledger.fits(1, 0, 10)


def test_reservations_are_due_before_they_end():
    ledger = DemandLedger(lookahead_steps=2)
    ledger.open("a", 5, 4)
    ledger.open("b", 5, 40)
    assert ledger.due() == []
    ledger.step(2)
    assert ledger.due() == ["a"]
    ledger.renew("a", 10)
    assert ledger.due() == []
    ledger.step(20)
    # It holds what it holds, whatever was reserved.
    assert ledger.due() == ["a"]
    assert ledger.held_tokens == 2 * 27


def test_who_outlives_its_reservation_is_not_forgotten():
    ledger = DemandLedger(lookahead_steps=3)
    ledger.open("a", 10, 5)
    ledger.step(6)
    assert (ledger.held_tokens, ledger.peak_tokens) == (16, 19)
    assert not ledger.fits(1, 0, 0)


def test_misuse_is_told():
    ledger = DemandLedger()
    ledger.open("a", 1, 1)
    for wrong in (lambda: ledger.close("b"), lambda: ledger.sync("b", 1)):
        with pytest.raises(KeyError, match="b"):
            wrong()
    with pytest.raises(KeyError):
        ledger.renew("b", 1)
    with pytest.raises(ValueError, match="open already"):
        ledger.open("a", 1, 1)
    with pytest.raises(ValueError, match="left_tokens=-1"):
        ledger.open("c", 1, -1)
    with pytest.raises(ValueError, match="page_tokens=0"):
        DemandLedger(0)
    assert "a" in ledger
    assert "c" not in ledger
    assert len(ledger) == 1


# --- what it is for -----------------------------------------------------------------------------


def serve(ledger, pool, seed, overrun=0, passes=400):
    """Admits whatever fits; answers end by their bound, or ``overrun`` after it.

    Returns the most that was ever held, and how many ran at most.
    """
    draw, running, most, together = random.Random(seed), {}, 0, 0
    for number in range(passes):
        prompt, bound = draw.randrange(1, 80), draw.randrange(0, 120)
        if ledger.fits(prompt, bound, pool - ledger.held_tokens):
            rid = f"r{number}"
            ledger.open(rid, prompt, bound)
            running[rid] = draw.randint(0, bound) + overrun
        together = max(together, len(running))
        most = max(most, ledger.held_tokens)
        for rid in [rid for rid, left in running.items() if left == 0]:
            ledger.close(rid)
        ledger.step()
        running = {rid: left - 1 for rid, left in running.items() if left > 0}
    return most, together


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("seed", range(5))
def test_what_fits_never_runs_dry(page, seed):
    """As long as answers keep their bounds. The control: they do not, and it does."""
    most, together = serve(DemandLedger(page), 500, seed)
    assert most <= 500
    assert together > 3
    assert serve(DemandLedger(page), 500, seed, overrun=100)[0] > 500


# --- conservation at every step -----------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """Everything that can happen, in any order, beside a plain model."""

    page = 1

    def __init__(self):
        super().__init__()
        self.ledger = DemandLedger(self.page, LOOKAHEAD)
        self.jobs: dict[str, Job] = {}
        self.came = 0

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.jobs)))

    @rule(tokens=SMALL, left=SMALL)
    def open(self, tokens, left):
        self.came += 1
        self.ledger.open(f"r{self.came}", tokens, left)
        self.jobs[f"r{self.came}"] = Job(tokens, left)

    @rule(count=st.integers(0, 20))
    def step(self, count):
        self.ledger.step(count)
        for job in self.jobs.values():
            job.tokens, job.left = job.tokens + count, job.left - count

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), tokens=SMALL)
    def sync(self, data, tokens):
        rid = self.one(data)
        self.ledger.sync(rid, tokens)
        self.jobs[rid].tokens = tokens

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), left=SMALL)
    def renew(self, data, left):
        rid = self.one(data)
        self.ledger.renew(rid, left)
        self.jobs[rid].left = left

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def close(self, data):
        rid = self.one(data)
        self.ledger.close(rid)
        del self.jobs[rid]
        with pytest.raises(KeyError):
            self.ledger.close(rid)

    @precondition(lambda self: self.jobs)
    @rule(extend=SMALL, left=SMALL)
    def admit(self, extend, left):
        """What is said to fit raises the peak to no more than was said."""
        peaks = [*self.jobs.values(), Job(extend, left)]
        room = simulated_peak(peaks) - self.ledger.held_tokens
        if self.page == 1:
            assert self.ledger.fits(extend, left, room)
            assert not self.ledger.fits(extend, left, room - 1)

    @invariant()
    def nothing_is_lost(self):
        jobs = list(self.jobs.values())
        assert len(self.ledger) == len(jobs)
        assert self.ledger.held_tokens == sum(up(job.tokens, self.page) for job in jobs)
        assert sorted(self.ledger.due()) == sorted(
            rid for rid, job in self.jobs.items() if job.left <= LOOKAHEAD
        )
        exact = simulated_peak(jobs, self.page)
        assert exact <= self.ledger.peak_tokens <= exact + len(jobs) * (self.page - 1)
        assert self.ledger.hosted_tokens >= 0


class PagedLedgerMachine(LedgerMachine):
    page = 16


TestLedger = LedgerMachine.TestCase
TestPagedLedger = PagedLedgerMachine.TestCase
