"""A multimap from window hashes to KV slots that grows and shrinks with the cache.

Log-structured: every insertion appends one sorted level, and levels of like size are merged, so
that a lookup is one binary search in each of at most ``log2(entries)`` levels and an insertion
costs an amortised logarithm. Entries are never searched for to be deleted: a slot's current hash
(``hash_of``) says which of its entries is alive, and merges drop the dead ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_kvshare.matching.window_hash import UInt64Array
from sglang_kvshare.plan import Int64Array


@dataclass(frozen=True)
class _Level:
    """Entries sorted by hash; among equal hashes the older comes first."""

    hashes: UInt64Array
    slots: Int64Array


class WindowTable:
    """Hash -> slots, the most recently added first, at most ``limit`` a lookup.

    Args:
        hash_of: uint64 ``[slots]``, shared with the owner: the hash of the window that ends in a
            slot. An entry ``(h, s)`` counts only while ``hash_of[s] == h``.
    """

    def __init__(self, hash_of: UInt64Array) -> None:
        self._hash_of = hash_of
        self._levels: list[_Level] = []

    def __len__(self) -> int:
        """Stored entries, dead ones included."""
        return sum(level.slots.shape[0] for level in self._levels)

    @property
    def nbytes(self) -> int:
        """Bytes of the entries, ``hash_of`` not counted."""
        return sum(level.hashes.nbytes + level.slots.nbytes for level in self._levels)

    def clear(self) -> None:
        self._levels.clear()

    def add(self, hashes: UInt64Array, slots: Int64Array) -> None:
        """Add entries whose ``hash_of`` the owner has set already."""
        if slots.shape[0] == 0:
            return
        order = np.argsort(hashes, kind="stable")
        self._levels.append(_Level(hashes[order], slots[order]))
        while len(self._levels) > 1 and (
            self._levels[-2].slots.shape[0] < 2 * self._levels[-1].slots.shape[0]
        ):
            newer, older = self._levels.pop(), self._levels.pop()
            self._levels.append(self._merged([older, newer]))

    def compact(self, live: int) -> None:
        """Rebuild when more than half of the entries are dead; ``live`` is the owner's count."""
        if len(self) > 2 * live + 1024:
            self._levels = [self._merged(self._levels)] if live else []

    def lookup(self, hashes: UInt64Array, limit: int) -> tuple[Int64Array, Int64Array]:
        """Live slots of each query.

        Args:
            hashes: uint64 ``[n]``.
            limit: entries looked at for a query, in every level, the newest first.

        Returns:
            ``(query, slot)``, int64 arrays of equal length, in no particular order; a pair may
            occur twice.
        """
        queries: list[Int64Array] = []
        slots: list[Int64Array] = []
        for level in self._levels:
            low = np.searchsorted(level.hashes, hashes, side="left")
            hit = np.flatnonzero(level.hashes[np.minimum(low, level.hashes.shape[0] - 1)] == hashes)
            if hit.shape[0] == 0:
                continue
            high = np.searchsorted(level.hashes, hashes[hit], side="right")
            # Newest entries are the last of an equal range.
            for back in range(limit):
                at = high - 1 - back
                inside = at >= low[hit]
                if not inside.any():
                    break
                queries.append(hit[inside].astype(np.int64))
                slots.append(level.slots[at[inside]])
        if not queries:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        query, slot = np.concatenate(queries), np.concatenate(slots)
        live = self._hash_of[slot] == hashes[query]
        return query[live], slot[live]

    def _merged(self, levels: list[_Level]) -> _Level:
        """One level of the live entries of ``levels`` (oldest level first)."""
        hashes = np.concatenate([level.hashes for level in levels])
        slots = np.concatenate([level.slots for level in levels])
        live = self._hash_of[slots] == hashes
        # A slot that left and came back with the same content has two living entries: the newer
        # one stays. (The sort is stable, so that among equals the older comes first.)
        pairs = np.lexsort((slots, hashes))
        again = (hashes[pairs[:-1]] == hashes[pairs[1:]]) & (slots[pairs[:-1]] == slots[pairs[1:]])
        live[pairs[:-1][again]] = False
        hashes, slots = hashes[live], slots[live]
        order = np.argsort(hashes, kind="stable")
        return _Level(hashes[order], slots[order])
