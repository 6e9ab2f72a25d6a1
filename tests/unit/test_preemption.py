"""Whom to preempt: CacheOPT's rule, SGLang's, and the bounds on both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.jobs import Running
from sglang_kvshare.scheduling.preemption import victim_order_named, victim_orders, victims

pytestmark = pytest.mark.unit


def running(number, **more):
    kept = {"prompt_tokens": 100, "output_tokens": 10, "max_new_tokens": 100}
    kept |= {"private_tokens": 110, "left_tokens": 50} | more
    return Running(f"r{number}", number, **kept)


def chosen(jobs, needed=10**9, order="slo", most_preemptions=3):
    order = victim_order_named(order)
    return [jobs[i].number for i in victims(jobs, needed, order, most_preemptions)]


def of_each(name, *values, **rest):
    return [running(number, **{name: value}, **rest) for number, value in enumerate(values)]


# The last of each row is the one that stays.
CACHEOPT = {
    "the loosest TBT SLO, none being the loosest": (
        of_each("tbt_slo_ms", 50, 500, 100, None),
        [3, 1, 2],
    ),
    "the longest remaining": (of_each("left_tokens", 100, 1000, 10), [1, 0]),
    "the cheapest": (of_each("preempt_ms", 3.0, 1.0, 2.0), [1, 2]),
    "the youngest, of those alike in everything": ([running(2), running(5), running(3)], [5, 3]),
    "SLOs before remaining before cost": (
        [
            running(0, tbt_slo_ms=400, left_tokens=1, preempt_ms=9),
            running(1, tbt_slo_ms=100, left_tokens=999, preempt_ms=1),
            running(2, tbt_slo_ms=100, left_tokens=99, preempt_ms=0),
            running(3, tbt_slo_ms=100, left_tokens=999, preempt_ms=0),
        ],
        [0, 3, 1],
    ),
    "like SLOs do not decide": (
        [
            running(0, tbt_slo_ms=110, left_tokens=10),
            running(1, tbt_slo_ms=100, left_tokens=100),
        ],
        [1],
    ),
    "like remainders do not decide": (
        [
            running(0, left_tokens=120, preempt_ms=9),
            running(1, left_tokens=100, preempt_ms=1),
        ],
        [1],
    ),
}


@pytest.mark.parametrize("rule", CACHEOPT)
def test_cacheopts_rule(rule):
    jobs, expected = CACHEOPT[rule]
    assert chosen(jobs) == expected


def test_stock_takes_the_fewest_outputs_then_the_longest_prompt():
    jobs = [
        running(0, output_tokens=5, prompt_tokens=10, tbt_slo_ms=1),
        running(1, output_tokens=1, prompt_tokens=10),
        running(2, output_tokens=5, prompt_tokens=900, left_tokens=1),
        running(3, output_tokens=50),
    ]
    assert chosen(jobs, order="stock") == [1, 2, 0]
    # It knows no protection.
    jobs[1].preemptions = 99
    assert chosen(jobs, order="stock") == [1, 2, 0]


@pytest.mark.parametrize("order", victim_orders())
def test_lower_priorities_go_first(order):
    jobs = [running(0, priority=1, output_tokens=0, left_tokens=999), running(1), running(2)]
    assert 0 not in chosen(jobs, order=order)


def test_no_more_than_needed():
    jobs = of_each("left_tokens", 1000, 100, 10)
    assert chosen(jobs, 0) == []
    assert chosen(jobs, 110) == [0]
    assert chosen(jobs, 111) == [0, 1]
    assert chosen([], 5) == chosen(jobs[:1], 5) == []


def test_who_shares_all_it_has_gives_nothing_back():
    assert chosen([running(0, left_tokens=999, private_tokens=0), running(1), running(2)]) == [2]


def test_the_protected_go_only_if_there_is_no_other_way():
    jobs = of_each("preemptions", 3, 2, 4, 0, left_tokens=50)
    jobs[0].left_tokens = jobs[2].left_tokens = 9999
    assert chosen(jobs, 220) == [3, 1]
    # And of those, who was preempted least.
    assert chosen(jobs, 330) == [3, 1, 0]


def test_two_do_not_push_each_other_out_for_ever():
    """Room for one and a half: whoever runs first grows until the other has to go."""
    jobs = {number: running(number, left_tokens=400) for number in (0, 1)}
    went = []
    for _ in range(20):
        (victim,) = chosen(list(jobs.values()), 1, most_preemptions=3)
        jobs[victim].preemptions += 1
        # What it waited for makes it look longer than the other.
        jobs[victim].left_tokens *= 4
        went.append(victim)
        if min(job.preemptions for job in jobs.values()) >= 3:
            break
    assert len(went) <= 2 * 3 + 1
    assert went[:3] == [1, 1, 1]


@pytest.mark.parametrize("order", victim_orders())
@given(
    jobs=st.lists(
        st.builds(
            running,
            st.integers(0, 50),
            output_tokens=st.integers(0, 50),
            private_tokens=st.integers(0, 100),
            left_tokens=st.integers(0, 500),
            tbt_slo_ms=st.sampled_from([None, 0.0, 10.0, 80.0]),
            preempt_ms=st.sampled_from([0.0, 1.0, float("inf")]),
            preemptions=st.integers(0, 5),
            priority=st.integers(0, 2),
        ),
        unique_by=lambda job: job.number,
        max_size=9,
    ),
    needed=st.integers(0, 400),
)
def test_one_stays_none_is_in_vain_and_every_rank_chooses_alike(order, jobs, needed):
    went = chosen(jobs, needed, order)
    assert went == chosen(jobs[::-1], needed, order)
    assert len(set(went)) == len(went) <= max(0, len(jobs) - 1)
    freed = {job.number: job.private_tokens for job in jobs}
    assert all(freed[number] > 0 for number in went)
    # Without the last one it was not enough; all that can go go before too little is given back.
    assert sum(freed[number] for number in went[:-1]) < needed or not went
    if sum(freed[number] for number in went) < needed:
        able = [number for number in freed if freed[number] > 0]
        assert len(went) >= len(able) - 1


def test_a_wrong_name_is_told_with_those_that_are_right():
    with pytest.raises(ValueError, match=r"'best'; there are slo, stock"):
        victim_order_named("best")
