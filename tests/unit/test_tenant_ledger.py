"""Quotas of indexed tokens, against a slow dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.matching.tenant_ledger import TenantLedger

pytestmark = pytest.mark.unit
SLOTS = 40
MOST = {"few": 5, "one": 1, "many": 30}
TENANTS = [*MOST, "free"]


class SlowLedger:
    """Slot -> tenant, in the order of coming."""

    def __init__(self) -> None:
        self.owner: dict[int, str] = {}

    def tokens(self, tenant: str) -> int:
        return sum(owner == tenant for owner in self.owner.values())

    def inserted(self, tenant: str, slots: list[int]) -> list[int]:
        self.owner.update(dict.fromkeys(slots, tenant))
        gone = []
        while self.tokens(tenant) > MOST.get(tenant, SLOTS):
            oldest = next(slot for slot, owner in self.owner.items() if owner == tenant)
            del self.owner[oldest]
            gone.append(oldest)
        return gone

    def removed(self, slots: list[int]) -> None:
        for slot in slots:
            self.owner.pop(slot, None)


def array(slots):
    return np.array(slots, dtype=np.int64)


step = st.tuples(
    st.sampled_from(["insert", "insert", "remove"]),
    st.sampled_from(TENANTS),
    st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=25),
)


@given(st.lists(step, max_size=60))
def test_the_ledger_is_the_slow_one(steps):
    ledger, slow = TenantLedger(SLOTS, MOST), SlowLedger()
    for what, tenant, slots in steps:
        if what == "insert":
            free = [slot for slot in slots if slot not in slow.owner]
            assert ledger.inserted(tenant, array(free)).tolist() == slow.inserted(tenant, free)
        else:
            ledger.removed(array(slots))
            slow.removed(slots)
        for name in TENANTS:
            assert ledger.tokens(name) == slow.tokens(name)
        # The bound of the docstring.
        assert ledger.nbytes <= 8 * SLOTS + 8 * len(slow.owner)
    for tenant, most in MOST.items():
        assert ledger.tokens(tenant) <= most


def test_a_slot_that_was_used_again_is_not_taken_from_its_new_owner():
    ledger = TenantLedger(SLOTS, {"a": 4})
    assert not ledger.inserted("a", array([1, 2, 3])).size
    ledger.removed(array([1, 2]))
    assert not ledger.inserted("b", array([1, 2])).size
    # Of the first entry slot 3 alone is still its own.
    assert ledger.inserted("a", array([5, 6, 7, 8])).tolist() == [3]
    assert (ledger.tokens("a"), ledger.tokens("b")) == (4, 2)
    # Positive control: without the quota nothing leaves.
    assert not ledger.inserted("b", array([10, 11, 12, 13, 14])).size


def test_a_prompt_longer_than_the_quota_keeps_its_end():
    ledger = TenantLedger(SLOTS, {"a": 3})
    assert ledger.inserted("a", array([9, 8, 7, 6, 5])).tolist() == [9, 8]
    assert ledger.tokens("a") == 3


def test_a_slot_with_two_owners_is_refused():
    ledger = TenantLedger(SLOTS, {})
    ledger.inserted("a", array([1, 2]))
    with pytest.raises(ValueError, match="twice"):
        ledger.inserted("b", array([2, 3]))


def test_a_tenant_at_its_quota_costs_what_changes(monkeypatch):
    """No entry is looked through again and again while its tokens leave one by one."""
    ledger = TenantLedger(200_000, {"a": 100_000})
    ledger.inserted("a", np.arange(100_000, dtype=np.int64))
    looked_at = 0
    stock = np.flatnonzero

    def counting(mask):
        nonlocal looked_at
        looked_at += mask.shape[0]
        return stock(mask)

    monkeypatch.setattr("sglang_kvshare.matching.tenant_ledger.np.flatnonzero", counting)
    for first in range(100_000, 110_000, 100):
        ledger.inserted("a", np.arange(first, first + 100, dtype=np.int64))
    assert looked_at <= 2 * 10_000
