"""Requests that wait for a donor that is being computed, and that they do not wait for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.holding import Holder
from sglang_kvshare.scheduling.jobs import Waiting

pytestmark = pytest.mark.unit


def waiting(number):
    return Waiting(f"r{number}", number, 0.0, 100)


def holding(*keys, most_hold_ms=1000, most_bypasses=64, ends_ms=None):
    holder = Holder(most_hold_ms, most_bypasses)
    holder.begins("donor", keys, ends_ms)
    return holder


def test_ten_users_with_one_document_compute_it_once():
    holder = Holder(most_hold_ms=1000, most_bypasses=64)
    admitted = []
    for number in range(10):
        if not holder.held(waiting(number), ["doc"], 50, 0):
            admitted.append(number)
            holder.begins(f"r{number}", ["doc", number], ends_ms=20)
    assert admitted == [0]
    holder.ended("r0")
    assert not any(holder.held(waiting(number), ["doc"], 50, 20) for number in range(1, 10))


def test_only_for_a_key_of_its_own():
    holder = holding("doc", "question")
    assert holder.held(waiting(1), ["other", "doc"], 50, 0)
    assert not holder.held(waiting(2), ["another"], 50, 0)
    assert not holder.held(waiting(3), [], 50, 0)
    holder.ended("donor")
    assert not holder.held(waiting(1), ["doc"], 50, 0)


def test_as_long_as_one_computes_it():
    holder = holding("doc")
    holder.begins("second", ["doc"])
    holder.ended("donor")
    assert holder.held(waiting(1), ["doc"], 50, 0)
    holder.ended("second")
    assert not holder.held(waiting(1), ["doc"], 50, 0)
    holder.ended("never heard of")


def test_only_if_it_saves_more_than_the_wait():
    holder = holding("doc", ends_ms=130)
    assert not holder.held(waiting(1), ["doc"], 30, 100)
    assert holder.held(waiting(1), ["doc"], 31, 100)
    # Less of the wait is left.
    assert holder.held(waiting(2), ["doc"], 20, 120)
    # It lasts longer than predicted; from then on any gain will do, up to the bounds.
    assert holder.held(waiting(3), ["doc"], 1, 500)
    assert not holder.held(waiting(3), ["doc"], 0, 500)


def test_those_chosen_before_it_in_the_same_pass_count_as_well():
    holder = Holder(most_hold_ms=1000, most_bypasses=64)
    assert not holder.held(waiting(1), ["doc"], 30, 0)
    assert holder.held(waiting(1), ["doc"], 30, 0, ahead_ms=29)
    assert not holder.held(waiting(2), ["doc"], 30, 0, ahead_ms=30)
    # The last of them counts, in flight or not.
    holder.begins("donor", ["doc"], ends_ms=100)
    assert "doc" in holder
    assert not holder.held(waiting(3), ["doc"], 99, 0, ahead_ms=10)
    assert holder.held(waiting(3), ["doc"], 101, 0, ahead_ms=10)


def test_no_longer_than_the_bound_in_time():
    holder = holding("doc", most_hold_ms=100)
    assert holder.held(waiting(1), ["doc"], 50, 1000)
    assert holder.held(waiting(1), ["doc"], 50, 1099)
    assert not holder.held(waiting(1), ["doc"], 50, 1100)
    # Nor for the next donor.
    holder.begins("another", ["doc"])
    assert not holder.held(waiting(1), ["doc"], 50, 1100)
    assert not holding("doc", most_hold_ms=0).held(waiting(1), ["doc"], 50, 0)


def test_a_stream_of_donors_does_not_starve_it():
    """An adversary begins a prefill with its key each pass; the clock stands still."""
    holder = holding("doc", most_bypasses=8)
    passed = 0
    while holder.held(waiting(1), ["doc"], 50, 0):
        holder.begins(f"donor {passed}", ["doc"])
        passed += 1
        assert passed < 100
    assert passed == 8
    # One that came back after a preemption is another case.
    holder.begins("r1", ["doc"])
    assert holder.held(waiting(1), ["doc"], 50, 0)


def test_memory_is_bounded():
    holder = holding("doc", most_hold_ms=100)
    held = [holder.held(waiting(number), ["doc"], 50, 0) for number in range(5000)]
    # Those that cannot be remembered are not held.
    assert held.count(True) == 4096
    assert not held[-1]
    # Room comes back when the first ones have been held for as long as they may.
    assert holder.held(waiting(9999), ["doc"], 50, 100)
    for number in range(3000):
        holder.begins(f"p{number}", [number, *range(500)])
    assert len(holder) == 1024


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begins", "ended", "asks"]),
            st.integers(0, 5),
            st.frozensets(st.sampled_from("abc")),
        ),
        max_size=60,
    )
)
def test_it_holds_only_for_what_is_in_flight(events):
    holder, flying, asked = Holder(1e9, 10**9), {}, set()
    for what, number, keys in events:
        rid = f"r{number}"
        if what == "begins":
            holder.begins(rid, keys)
            flying[rid] = keys
        elif what == "ended":
            holder.ended(rid)
            flying.pop(rid, None)
        else:
            asked.add(number)
            expected = any(keys & other for other in flying.values())
            assert holder.held(waiting(number + 10), keys, 1.0, 0.0) == expected
    assert len(holder) == len(flying)
