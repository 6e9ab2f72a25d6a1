"""The accounting of host memory."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_kvshare.scheduling.host_pool import HostPool

pytestmark = pytest.mark.unit


def test_it_is_bounded_and_misuse_is_told():
    pool = HostPool(100)
    assert pool.reserve("a", 60)
    assert not pool.reserve("b", 41)
    assert (pool.used_tokens, pool.free_tokens, len(pool)) == (60, 40, 1)
    with pytest.raises(KeyError, match="'a'"):
        pool.reserve("a", 1)
    with pytest.raises(ValueError, match="tokens=0"):
        pool.reserve("b", 0)
    assert pool.release("a") == 60
    with pytest.raises(KeyError):
        pool.release("a")
    assert pool.reserve("b", 100)
    with pytest.raises(ValueError, match="capacity_tokens=-1"):
        HostPool(-1)


def test_a_pool_of_nothing_takes_nobody_and_a_pool_of_one_takes_one():
    assert not HostPool(0).reserve("a", 1)
    one = HostPool(50)
    assert one.reserve("a", 50)
    assert not one.reserve("b", 1)
    one.release("a")
    assert one.reserve("b", 50)


class HostPoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool, self.held, self.came = HostPool(100), {}, 0

    @rule(tokens=st.integers(1, 120))
    def reserve(self, tokens):
        self.came += 1
        fits = tokens <= 100 - sum(self.held.values())
        assert self.pool.reserve(f"r{self.came}", tokens) == fits
        if fits:
            self.held[f"r{self.came}"] = tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        rid = data.draw(st.sampled_from(sorted(self.held)))
        assert self.pool.release(rid) == self.held.pop(rid)

    @invariant()
    def what_is_used_and_free_is_all(self):
        assert self.pool.used_tokens == sum(self.held.values())
        assert self.pool.used_tokens + self.pool.free_tokens == 100
        assert all(rid in self.pool for rid in self.held)
        assert len(self.pool) == len(self.held)


TestHostPool = HostPoolMachine.TestCase
