"""The order of the waiting queue: its rules, and that nobody starves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.scheduling.jobs import Waiting
from sglang_kvshare.scheduling.order import (
    AGED_SHARE,
    PATIENCE_MS,
    cost_class,
    in_window,
    order_named,
    orders,
)

pytestmark = pytest.mark.unit
OURS = ["hit-rate", "effective-cost", "fcfs"]


def waiting(number, hit=0.0, **more):
    more = {"arrived_ms": 0.0, "prompt_tokens": 100, "prefix_tokens": int(100 * hit)} | more
    return Waiting(f"r{number}", number, **more)


def numbers(name, queue, now_ms=0.0, most_bypasses=64):
    order = order_named(name, most_bypasses)
    return [queue[i].number for i in order.order(queue, now_ms)]


# --- the rules ----------------------------------------------------------------------------------


def test_kvshare_sorts_by_hit_rate():
    """Reused over prompt tokens, whatever the lengths; a prefix and a passage count alike."""
    queue = [
        waiting(0, 0.1),
        waiting(1, 0.9),
        waiting(2, prompt_tokens=1000, prefix_tokens=100, reused_tokens=400),
        waiting(3, prompt_tokens=10, prefix_tokens=6),
    ]
    assert numbers("hit-rate", queue) == [1, 3, 2, 0]


def test_effective_cost_sorts_by_what_the_prefill_takes():
    queue = [waiting(0, 0.9, effective_ms=90), waiting(1, effective_ms=9), waiting(2)]
    assert numbers("effective-cost", queue) == [2, 1, 0]
    assert numbers("fcfs", queue[::-1]) == [0, 1, 2]


def test_a_batch_has_like_cost():
    """Those of the best one's class stand beside it, though others have better hit rates."""
    costs = {0: (0.9, 100), 1: (0.8, 1000), 2: (0.7, 90), 3: (0.6, 900), 4: (0.5, 120)}
    queue = [waiting(n, hit, effective_ms=ms) for n, (hit, ms) in costs.items()]
    assert numbers("hit-rate", queue) == [0, 2, 4, 1, 3]
    assert cost_class(0) == cost_class(1) == cost_class(0.3) < cost_class(2)
    assert cost_class(64) == cost_class(127) < cost_class(128)


def test_equal_ones_go_as_they_came():
    queue = [waiting(n, 0.5) for n in (3, 1, 2)]
    for name in OURS:
        assert numbers(name, queue) == [1, 2, 3]


def test_who_resumes_goes_before_newcomers_of_its_priority():
    queue = [
        waiting(0, 0.9),
        waiting(1, 0.1, preemptions=1),
        waiting(2, 0.5, preemptions=2),
        waiting(3, priority=1),
    ]
    assert numbers("hit-rate", queue) == [3, 1, 2, 0]


def test_ageing_counts_in_shares_of_the_slo():
    tight, loose = (waiting(n, 0.1, ttft_slo_ms=slo) for n, slo in ((5, 100), (4, 10_000)))
    fresh = waiting(6, 0.9)
    queue = [fresh, loose, tight]
    assert numbers("hit-rate", queue, 0) == [6, 4, 5]
    assert numbers("hit-rate", queue, 100 * AGED_SHARE + 1) == [5, 6, 4]


def test_one_that_is_late_already_makes_nobody_else_late():
    late, in_time = (waiting(n, 0.1, ttft_slo_ms=slo) for n, slo in ((0, 50), (1, 100)))
    fresh = waiting(2, 0.9)
    assert numbers("hit-rate", [late, in_time, fresh], 60) == [1, 2, 0]
    # Nor one that would be late if it went now.
    in_time.effective_ms = 41
    assert numbers("hit-rate", [late, in_time, fresh], 60)[0] == 2


def test_without_an_slo_patience_ends_too():
    old, fresh = waiting(0, 0.1), waiting(1, 0.9, arrived_ms=PATIENCE_MS)
    assert numbers("hit-rate", [old, fresh], PATIENCE_MS * AGED_SHARE) == [1, 0]
    assert numbers("hit-rate", [old, fresh], PATIENCE_MS * AGED_SHARE + 1) == [0, 1]


def test_hits_move_a_request_only_among_those_of_its_namespace():
    """Who is before whom tells nothing of what another namespace has cached."""
    a, b = {"namespace": b"a"}, {"namespace": b"b"}
    queue = [waiting(0, **a), waiting(1, **b), waiting(2, 0.85, **a), waiting(3, 0.9, **a)]
    queue.append(waiting(4, 0.8, **b))
    assert numbers("hit-rate", queue) == [3, 4, 2, 0, 1]
    # Positive control: in one namespace they do.
    for one in queue:
        one.namespace = b"a"
    assert numbers("hit-rate", queue) == [3, 2, 4, 0, 1]


def test_priority_comes_before_everything_else():
    queue = [waiting(0, 0.9, preemptions=1), waiting(1, priority=2), waiting(2, priority=7)]
    for name in [*OURS, "stock-fcfs"]:
        assert numbers(name, queue) == [2, 1, 0]


def test_only_the_window_is_sorted():
    queue = [waiting(n, n / 100) for n in range(0, 40, 2)]
    assert numbers("hit-rate", queue, most_bypasses=8) == [6, 4, 2, 0, *range(8, 40, 2)]
    assert numbers("hit-rate", queue, most_bypasses=1) == list(range(0, 40, 2))
    assert in_window(queue, 8) == [n < 8 for n in range(0, 40, 2)]
    with pytest.raises(ValueError, match="the least is 1"):
        order_named("hit-rate", 0)


def test_stock_sorts_by_prefix_until_many_wait():
    queue = [waiting(n, hit) for n, hit in enumerate((0.1, 0.9, 0.5, 0.9))]
    assert numbers("lpm", queue) == [1, 3, 2, 0]
    # In absolute tokens, unlike KVShare.
    queue.append(waiting(4, prompt_tokens=10_000, prefix_tokens=1000))
    assert numbers("lpm", queue)[0] == 4
    many = [waiting(n, prefix_tokens=n) for n in range(129)]
    assert numbers("lpm", many) == list(range(129))
    assert numbers("lpm", many[1:]) == list(range(128, 0, -1))


def test_stock_puts_those_that_resume_last():
    """Where they stand in SGLang's queue."""
    queue = [waiting(5), waiting(6), waiting(1, preemptions=1)]
    assert numbers("stock-fcfs", queue) == [5, 6, 1]
    assert numbers("fcfs", queue) == [1, 5, 6]


def test_a_wrong_name_is_told_with_those_that_are_right():
    with pytest.raises(ValueError, match=r"'shortest'.*hit-rate, effective-cost, fcfs"):
        order_named("shortest")
    assert {order_named(name).name for name in orders()} == set(orders())


# --- against a clear version --------------------------------------------------------------------

QUEUES = st.lists(
    st.builds(
        waiting,
        st.integers(0, 60),
        st.sampled_from([0.0, 0.3, 0.6, 0.9]),
        arrived_ms=st.sampled_from([0.0, 900.0, 9000.0]),
        effective_ms=st.sampled_from([0.0, 1.0, 3.0, 100.0, 120.0, 200.0]),
        ttft_slo_ms=st.sampled_from([None, 500.0, 1500.0, 20_000.0]),
        priority=st.sampled_from([0, 0, 1]),
        preemptions=st.sampled_from([0, 0, 1]),
        namespace=st.sampled_from([b"a", b"a", b"b", b"c"]),
    ),
    unique_by=lambda one: one.number,
    max_size=25,
)


def clear_order(queue, now_ms, score, most_bypasses):
    """One after the other, each chosen from all that are left."""

    def tier(one):
        waited = now_ms - one.arrived_ms
        slo = one.ttft_slo_ms
        aged = waited > AGED_SHARE * (PATIENCE_MS if slo is None else slo)
        late = slo is not None and waited + one.effective_ms > slo
        missed = slo is not None and waited > slo
        return 0 if one.preemptions else 4 if missed else 3 if late else 1 if aged else 2

    def part(one):
        return {0: 0, 4: 2}.get(tier(one), 1)

    def class_of(one):
        return math.floor(math.log2(max(one.effective_ms, 1)))

    oldest = {
        p: min(one.number for one in queue if one.priority == p)
        for p in {one.priority for one in queue}
    }
    left, chosen = list(queue), []
    while left:
        top = max(one.priority for one in left)
        those = [one for one in left if one.priority == top]
        inside = [one for one in those if one.number < oldest[top] + most_bypasses]
        first = min(map(part, inside), default=None)
        if first in (None, 0):
            resuming = [one for one in inside if part(one) == 0]
            one = min(resuming or those, key=lambda one: one.number)
        else:
            # The k-th place of a part belongs to the namespace of its k-th arrival.
            here = [one for one in queue if one.priority == top and part(one) == first]
            here = sorted(
                (one for one in here if one.number < oldest[top] + most_bypasses),
                key=lambda one: one.number,
            )
            taken = [one for one in chosen if one in here]
            namespace = here[len(taken)].namespace
            those = [one for one in here if one in left and one.namespace == namespace]
            those = [one for one in those if tier(one) == min(map(tier, those))]
            last = next((one for one in taken[::-1] if one.namespace == namespace), None)
            if last is not None and tier(last) == tier(those[0]):
                those = [one for one in those if class_of(one) == class_of(last)] or those
            one = min(those, key=lambda one: (score(one), one.number))
        chosen.append(one)
        left.remove(one)
    return [one.number for one in chosen]


SCORES = {
    "hit-rate": lambda one: -one.hit_share,
    "effective-cost": lambda one: one.effective_ms,
    "fcfs": lambda one: 0,
}


@pytest.mark.parametrize("name", OURS)
@given(QUEUES, st.sampled_from([1, 2, 8, 64]))
def test_it_is_what_choosing_one_by_one_gives(name, queue, most_bypasses):
    expected = clear_order(queue, 9500.0, SCORES[name], 1 if name == "fcfs" else most_bypasses)
    assert numbers(name, queue, 9500.0, most_bypasses) == expected
    # Whatever way the queue is handed over.
    assert numbers(name, queue[::-1], 9500.0, most_bypasses) == expected


# --- nobody starves -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
@given(QUEUES, st.sampled_from([1, 8, 64]), st.sampled_from([0.0, 0.5, 1.0]), st.randoms())
def test_nothing_in_one_namespace_moves_a_request_of_another(name, queue, bypasses, hit, dice):
    """Whatever is cached of the texts of others, it goes in the same place."""

    def places(namespace):
        order = numbers(name, queue, 9500.0, bypasses)
        mine = {one.number for one in queue if one.namespace == namespace}
        return [(place, number) for place, number in enumerate(order) if number in mine]

    before = places(b"a")
    for one in queue:
        if one.namespace != b"a":
            one.reused_tokens = int(hit * 10)
            one.effective_ms = dice.choice([0.0, 1.0, 100.0, 30_000.0])
    assert places(b"a") == before


class Server:
    """Admits by an order; knows of everybody which younger ones went ahead of it."""

    def __init__(self, order):
        self.order, self.queue, self.overtaken = order, [], {}
        self.now_ms = 0.0

    def arrives(self, **features):
        number = len(self.overtaken)
        self.queue.append(waiting(number, arrived_ms=self.now_ms, **features))
        self.overtaken[number] = set()

    def returns(self, one):
        """Preempted, it keeps its number and resumes."""
        one.preemptions += 1
        self.queue.append(one)

    def ordered(self):
        self.now_ms += 1.0
        return [self.queue[i] for i in self.order.order(self.queue, self.now_ms)]

    def admits(self, chosen):
        for one in chosen:
            self.queue.remove(one)
            for other in self.queue:
                if other.number < one.number:
                    self.overtaken[other.number].add(one.number)
        return chosen

    @property
    def worst(self):
        return max(map(len, self.overtaken.values()), default=0)


BAD = {"hit": 0.0, "effective_ms": 5000.0, "ttft_slo_ms": 1e-9}
GOOD = {"hit": 1.0, "effective_ms": 0.0, "ttft_slo_ms": 1e9}


@pytest.mark.parametrize("most_bypasses", [1, 5, 64])
@pytest.mark.parametrize("name", ["hit-rate", "effective-cost"])
def test_an_adversary_cannot_starve_anyone(name, most_bypasses):
    """In each pass it adds whatever would be chosen before all others."""
    server = Server(order_named(name, most_bypasses))
    server.arrives(**BAD)
    for _ in range(500):
        server.arrives(**GOOD)
        server.admits(server.ordered()[:1])
    # It gets as far as the bound says, and no further.
    assert server.worst == len(server.overtaken[0]) == most_bypasses - 1
    # Positive control: with no window to speak of the same adversary starves it.
    unbounded = Server(order_named(name, 10**9))
    unbounded.arrives(**BAD)
    for _ in range(500):
        unbounded.arrives(**GOOD)
        unbounded.admits(unbounded.ordered()[:1])
    assert len(unbounded.overtaken[0]) == 500


FEATURES = st.fixed_dictionaries(
    {
        "hit": st.sampled_from([0.0, 0.5, 1.0]),
        "effective_ms": st.sampled_from([0.0, 10.0, 5000.0]),
        "ttft_slo_ms": st.sampled_from([None, 1.0, 4.0, 1e6]),
    }
)
PASSES = st.lists(st.tuples(st.lists(FEATURES, max_size=4), st.integers(0, 3), st.booleans()))


@given(st.sampled_from(OURS), st.integers(1, 6), PASSES)
def test_the_bound_holds_for_any_arrivals_and_preemptions(name, most_bypasses, passes):
    server = Server(order_named(name, most_bypasses))
    for arrivals, count, preempts in passes:
        for features in arrivals:
            server.arrives(**features)
        for one in server.admits(server.ordered()[:count])[-1:]:
            if preempts:
                server.returns(one)
    assert server.worst < most_bypasses


def test_the_bound_holds_past_requests_that_do_not_fit():
    """Smaller ones of the window may pass; then the pool empties for the large one."""
    server = Server(order_named("hit-rate", 8))
    server.arrives(**BAD)
    for _ in range(50):
        server.arrives(**GOOD)
        inside = {
            one.number
            for one, may in zip(server.queue, in_window(server.queue, 8), strict=True)
            if may and one.number > 0
        }
        server.admits([one for one in server.ordered() if one.number in inside][:1])
    assert len(server.overtaken[0]) == 7
