"""Whose tokens the index holds, and which leave it when a tenant holds too many.

    alice   |entry 3: slots 9 4 5|entry 7: slots 1 2|       at most 4: slot 9 leaves the index
    bob                   |entry 5: slots 6 8|

An entry is an insertion. Every slot remembers the entry that brought it, so that a slot that was
freed, and perhaps used again by somebody else, is nothing to an old entry.

Memory: 8 bytes for every slot of the pool, and at most 8 bytes for every token that is in here.
No call looks at more than what changes, but for an amortised constant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.plan import Int32Array, Int64Array

#: Slots of an entry that are looked at together, at least.
_BLOCK = 64
_NONE: Int64Array = np.empty(0, dtype=np.int64)


@dataclass
class _Entry:
    """``slots``: int32, in the order of their sequence, from the first that may be here still on;
    ``kept``: slots that its memory holds; ``tokens``: those that are here."""

    tenant: str
    slots: Int32Array
    kept: int
    tokens: int


class TenantLedger:
    """Indexed tokens of every tenant, oldest first.

    Args:
        slots: size of the KV pool.
        most: tenant -> cached tokens that may serve as donors; tenants that it does not name have
            no limit.
    """

    def __init__(self, slots: int, most: Mapping[str, int]) -> None:
        self._most = dict(most)
        #: Number of the entry that brought a slot's token; 0 for none.
        self._entry_of = np.zeros(slots, dtype=np.int64)
        self._entries: dict[int, _Entry] = {}
        self._of_tenant: dict[str, dict[int, None]] = {}
        self._tokens: Counter[str] = Counter()
        self._next = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self._entry_of.nbytes) + 4 * sum(one.kept for one in self._entries.values())

    def tokens(self, tenant: str) -> int:
        return self._tokens[tenant]

    def clear(self) -> None:
        self._entry_of.fill(0)
        self._entries.clear()
        self._of_tenant.clear()
        self._tokens.clear()

    def inserted(self, tenant: str, slots: Int64Array) -> Int64Array:
        """Tokens were put into the index for ``tenant``: int64 ``[m]``, in order.

        Returns:
            int64: the slots of the tenant's tokens that are too many, oldest first; they count as
            removed, and the caller takes them out of the index. A prompt's first token is its
            oldest.

        Raises:
            ValueError: a slot is here already.
        """
        if not slots.shape[0]:
            return _NONE
        if self._entry_of[slots].any():
            raise ValueError("a KV slot would be counted twice")
        number, self._next = self._next, self._next + 1
        self._entry_of[slots] = number
        count = int(slots.shape[0])
        self._entries[number] = _Entry(tenant, slots.astype(np.int32), count, count)
        self._of_tenant.setdefault(tenant, {})[number] = None
        self._tokens[tenant] += count
        most = self._most.get(tenant)
        return _NONE if most is None else self._oldest(tenant, self._tokens[tenant] - most)

    def removed(self, slots: Int64Array) -> None:
        """Tokens have left the index; slots that are not here are passed over."""
        numbers = self._entry_of[slots]
        self._entry_of[slots] = 0
        found, counts = np.unique(numbers[numbers > 0], return_counts=True)
        for number, count in zip(found.tolist(), counts.tolist(), strict=True):
            self._shrink(number, count)

    def _oldest(self, tenant: str, tokens: int) -> Int64Array:
        told: list[Int32Array] = []
        while tokens > 0:
            number = next(iter(self._of_tenant[tenant]))
            part = self._first(number, min(tokens, self._entries[number].tokens))
            self._entry_of[part] = 0
            self._shrink(number, int(part.shape[0]))
            tokens -= int(part.shape[0])
            told.append(part)
        return np.concatenate(told).astype(np.int64) if told else _NONE

    def _first(self, number: int, tokens: int) -> Int32Array:
        """The first ``tokens`` slots of an entry that are here; it begins behind them now."""
        entry, told = self._entries[number], []
        while tokens:
            block = entry.slots[: max(tokens, _BLOCK)]
            here = np.flatnonzero(self._entry_of[block] == number)[:tokens]
            tokens -= int(here.shape[0])
            told.append(block[here])
            entry.slots = entry.slots[block.shape[0] if tokens else int(here[-1]) + 1 :]
        return np.concatenate(told)

    def _shrink(self, number: int, tokens: int) -> None:
        entry = self._entries[number]
        entry.tokens -= tokens
        self._tokens[entry.tenant] -= tokens
        if not entry.tokens:
            del self._entries[number]
            own = self._of_tenant[entry.tenant]
            del own[number]
            if not own:
                del self._of_tenant[entry.tenant], self._tokens[entry.tenant]
        elif 2 * entry.tokens < entry.kept:
            entry.slots = entry.slots[self._entry_of[entry.slots] == number]
            entry.kept = entry.tokens
