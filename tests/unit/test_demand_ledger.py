"""The demand ledger against a pool that is simulated step by step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.ledger import DemandLedger

pytestmark = pytest.mark.unit


@dataclass
class Job:
    """Holds tokens, gets one a step, and is gone after ``left`` more; overdue ones go on."""

    tokens: int
    left: int


def up(tokens, page=1):
    return -(-tokens // page) * page


def peak(jobs, lookahead, page=1):
    """The clear version: every step, one after the other."""
    running = [Job(j.tokens, j.left if j.left >= 0 else lookahead) for j in jobs]
    most = 0
    while running:
        most = max(most, sum(up(job.tokens, page) for job in running))
        running = [Job(job.tokens + 1, job.left - 1) for job in running if job.left > 0]
    return most


JOBS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def opened(jobs, page=1, lookahead=2):
    ledger = DemandLedger(page, lookahead)
    for number, (tokens, left) in enumerate(jobs):
        ledger.open(f"r{number}", tokens, left)
    return ledger


@given(JOBS, st.integers(0, 60), st.integers(0, 60), st.integers(-5, 400), st.integers(0, 20))
def test_it_admits_what_a_simulation_has_room_for_and_nothing_else(
    jobs, extend, left, available, reserve
):
    ledger = opened(jobs)
    held = sum(tokens for tokens, _ in jobs)
    most = peak([Job(*job) for job in [*jobs, (extend, left)]], 2)
    assert ledger.fits(extend, left, available, reserve) == (most <= available + held - reserve)


@given(JOBS, st.integers(0, 60), st.integers(0, 60), st.integers(0, 600), st.sampled_from([4, 16]))
def test_with_pages_it_never_admits_too_much_and_errs_by_less_than_a_page_each(
    jobs, extend, left, available, page
):
    ledger = opened(jobs, page)
    held = sum(up(tokens, page) for tokens, _ in jobs)
    assert ledger.held_tokens == held
    most = peak([Job(*job) for job in [*jobs, (extend, left)]], 2, page)
    fits = ledger.fits(extend, left, available)
    assert not fits or most <= available + held
    assert fits or most + (len(jobs) + 1) * (page - 1) > available + held


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
