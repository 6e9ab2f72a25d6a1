"""Which node is evicted first: donors behind what serves nobody else."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvshare_eval.simulate.tree_driver import Driver, share
from kvshare_eval.simulate.tree_load import Load, Shape
from sglang_kvshare.config import KVShareConfig

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

POOL = 1000


def node_at(time: float):
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

    node = TreeNode()
    node.last_access_time = node.creation_time = time
    node.key = RadixKey([1, 2, 3], None)
    # Of SGLang's other tree, for the policy that asks for them.
    node._tlru_history_len, node._tlru_cached_prefix_len = 10, 3
    return node


def eviction(weight: float, policy: str = "lru", **settings):
    from sglang.srt.mem_cache.utils import get_eviction_strategy

    from sglang_kvshare.engine.eviction import DonorsLast

    return DonorsLast(get_eviction_strategy(policy, settings or None), weight, POOL)


def used(strategy, node, times: int):
    for _ in range(times):
        strategy.used(node)
    return node


def test_a_node_that_served_more_often_leaves_later_however_old_it_is():
    strategy = eviction(1.0)
    # Of 0, 1, 3 and 7 uses: levels 0 to 3. The more uses, the older.
    nodes = [used(strategy, node_at(10 - n), 2**n - 1) for n in range(4)]
    order = [strategy.get_priority(node) for node in nodes]
    assert all(before < after for before, after in pairwise(order))
    assert [level for level, _ in order] == [0, 1, 2, 3]


def test_the_policy_decides_within_a_level():
    strategy = eviction(1.0)
    # Once and twice are one level.
    old, young = used(strategy, node_at(1), 2), used(strategy, node_at(2), 1)
    assert strategy.get_priority(old) < strategy.get_priority(young)
    other = eviction(1.0, "mru")
    old, young = used(other, node_at(1), 2), used(other, node_at(2), 1)
    assert other.get_priority(young) < other.get_priority(old)


def test_a_larger_weight_parts_what_a_smaller_one_does_not():
    for weight, parted in [(1.0, False), (2.0, True)]:
        strategy = eviction(weight)
        often, once = used(strategy, node_at(1), 2), used(strategy, node_at(2), 1)
        assert (strategy.get_priority(often) > strategy.get_priority(once)) == parted


def test_uses_count_for_half_after_a_pools_worth_of_evictions():
    strategy = eviction(1.0)
    donor, other = used(strategy, node_at(1), 3), node_at(2)
    assert strategy.uses(donor) == 3
    strategy.evicted(POOL // 2)
    strategy.evicted(POOL - POOL // 2)
    assert strategy.uses(donor) == pytest.approx(1.5)
    assert strategy.get_priority(donor) > strategy.get_priority(other)
    strategy.used(donor)
    assert strategy.uses(donor) == pytest.approx(2.5)
    strategy.evicted(2 * POOL)
    # Fewer than one: like a node that never served, and older.
    assert strategy.uses(donor) == pytest.approx(0.625)
    assert strategy.get_priority(donor) < strategy.get_priority(other)


def test_both_parts_of_a_split_node_have_its_uses():
    strategy = eviction(1.0)
    lower = used(strategy, node_at(1), 3)
    upper, fresh = node_at(1), node_at(1)
    strategy.split(upper, lower)
    assert strategy.uses(upper) == strategy.uses(lower) == 3
    # From here on each has its own.
    strategy.used(upper)
    assert (strategy.uses(upper), strategy.uses(lower)) == (4, 3)
    strategy.split(fresh, node_at(1))
    assert strategy.uses(fresh) == 0


def test_every_policy_of_sglang_keeps_its_order_and_puts_donors_last():
    from sglang.srt.mem_cache.utils import _EVICTION_POLICY_FACTORIES, get_eviction_strategy

    assert {"lru", "lfu", "tlru"} <= set(_EVICTION_POLICY_FACTORIES)
    draw = random.Random(1)
    for policy in _EVICTION_POLICY_FACTORIES:
        stock = get_eviction_strategy(policy)
        nodes = [node_at(draw.random()) for _ in range(40)]
        for node in nodes:
            node.hit_count, node.priority = draw.randrange(4), draw.randrange(3)
        expected = sorted(nodes, key=stock.get_priority)
        off, on = eviction(0.0, policy), eviction(1.0, policy)
        for node in nodes:
            used(off, node, draw.randrange(3))
        assert sorted(nodes, key=off.get_priority) == expected, policy
        donors = [node for node in expected if on.uses(node)]
        others = [node for node in expected if not on.uses(node)]
        assert donors
        assert others
        assert sorted(nodes, key=on.get_priority) == others + donors, policy


def test_what_a_policy_has_besides_its_order_is_there():
    assert eviction(1.0, "slru", protected_threshold=5).protected_threshold == 5
    assert not hasattr(eviction(1.0, "lru"), "protected_threshold")


def test_in_a_tree_under_pressure_donors_stay_and_nothing_is_lost():
    pool, taken = 24_000, {}
    for weight in (0.0, 1.0):
        driver = Driver(pool, "lru", KVShareConfig(selector="seams", donor_weight=weight))
        served = driver.serve(Load(Shape(3 * pool), seed=1).requests(200))
        for one in served:
            assert 0 <= one.exact + one.branch + one.matched < one.prompt
        assert share(served, "evicted") > 0.3
        taken[weight] = share(served, "matched")
        cache = driver.cache
        assert cache.held_donor_locks == cache.protected_size() == 0
        allocator = cache.token_to_kv_pool_allocator
        assert allocator.available_size() + cache.evictable_size() == pool
    # A donor that has left serves nobody.
    assert taken[1.0] > taken[0.0] > 0
