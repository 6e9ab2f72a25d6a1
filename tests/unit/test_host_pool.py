"""The accounting of host memory."""

from __future__ import annotations

import pytest

from sglang_kvshare.scheduling.host_pool import HostPool

pytestmark = pytest.mark.unit


def test_it_is_bounded_and_misuse_is_told():
    pool = HostPool(100)
    assert pool.reserve("a", 60)
    assert not pool.reserve("b", 41)
    assert (pool.used_tokens, pool.free_tokens, len(pool)) == (60, 40, 1)
    with pytest.raises(KeyError, match="'a'"):
        pool.reserve("a", 1)
    assert pool.release("a") == 60
    with pytest.raises(KeyError):
        pool.release("a")
    assert pool.reserve("b", 100)
    assert not HostPool(0).reserve("a", 1)
