"""A multimap from fingerprints to cells that grows and shrinks with the cache.

Log-structured: an insertion is merged into the newest sorted level, and levels of like size are
merged, so that a lookup is one binary search in each of a few levels:

    oldest  [ 120,000 sorted entries ]  [ 9,000 ]  [ 700 ]  [ 40 ]  newest

Nothing is searched for to be deleted. The owner knows from an entry's cell and stamp whether it is
alive, lookups skip the dead, merges drop them, and the owner asks for :meth:`compact` in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.matching.window_hash import UInt32Array
from sglang_kvshare.plan import BoolArray, Int32Array, Int64Array

#: ``alive(cells, stamps)``: which entries stand for something.
Alive = Callable[[Int32Array, Int32Array], BoolArray]

#: A level is merged into the one before it when that one is less than this many times as large.
_FANOUT = 8
#: A level smaller than this takes in whatever comes: sorting it costs less than searching two.
_SMALL_ENTRIES = 512


@dataclass(frozen=True)
class _Level:
    """Entries sorted by fingerprint; among equal ones the older comes first."""

    prints: UInt32Array
    cells: Int32Array
    stamps: Int32Array

    def __len__(self) -> int:
        return int(self.prints.shape[0])

    @property
    def nbytes(self) -> int:
        return int(self.prints.nbytes + self.cells.nbytes + self.stamps.nbytes)


class WindowTable:
    """Fingerprint -> cells, the most recently added first.

    Args:
        alive: whether entries count; a dead one never comes back to life.
    """

    def __init__(self, alive: Alive) -> None:
        self._alive = alive
        self._levels: list[_Level] = []

    def __len__(self) -> int:
        """Stored entries, dead ones included."""
        return sum(map(len, self._levels))

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    def clear(self) -> None:
        self._levels.clear()

    def add(self, prints: UInt32Array, cells: Int32Array, stamps: Int32Array) -> None:
        """Add entries, the oldest first, that :data:`Alive` already accepts."""
        if prints.shape[0] == 0:
            return
        self._levels.append(_sorted([_Level(prints, cells, stamps)]))
        count, entries = 1, len(self._levels[-1])
        for older in map(len, reversed(self._levels[:-1])):
            if older >= max(_SMALL_ENTRIES, _FANOUT * entries):
                break
            count, entries = count + 1, entries + older
        if count > 1:
            self._merge(count)

    def compact(self, most: int) -> None:
        """Drop every dead entry if there are more than ``most`` entries, dead ones included."""
        if len(self) > most:
            self._merge(len(self._levels))

    def lookup(
        self, prints: UInt32Array, limit: int, alive: Alive
    ) -> tuple[Int64Array, Int32Array]:
        """The newest ``limit`` entries of each query that ``alive`` accepts.

        Args:
            prints: uint32 ``[k]``, ascending and distinct.

        Returns:
            ``(query, cell)``, arrays of equal length: an index into ``prints``, and a cell.
        """
        wanted = np.full(prints.shape[0], limit, dtype=np.int64)
        found: list[tuple[Int64Array, Int32Array]] = []
        for level in reversed(self._levels):
            low = np.searchsorted(level.prints, prints)
            hit = np.flatnonzero(level.prints.take(low, mode="clip") == prints)
            hit = hit[wanted[hit] > 0]
            if hit.shape[0]:
                high = np.searchsorted(level.prints, prints[hit], side="right")
                found += _newest(level, hit, low[hit], high, wanted, alive)
        if not found:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        return np.concatenate([q for q, _ in found]), np.concatenate([c for _, c in found])

    def _merge(self, count: int) -> None:
        """Make one level of the living entries of the newest ``count`` levels."""
        parts = []
        for level in self._levels[-count:]:
            alive = self._alive(level.cells, level.stamps)
            if not alive.all():
                level = _Level(level.prints[alive], level.cells[alive], level.stamps[alive])
            parts.append(level)
        merged = _sorted(parts)
        self._levels[-count:] = [merged] if len(merged) else []


def _newest(
    level: _Level,
    hit: Int64Array,
    low: Int64Array,
    high: Int64Array,
    wanted: Int64Array,
    alive: Alive,
) -> list[tuple[Int64Array, Int32Array]]:
    """Entries of the equal ranges ``[low, high)``, from the end on, until all have what they want.

    Dead entries are passed over in strides that double, so that many of them cost a logarithm of
    rounds. ``wanted`` is counted down.
    """
    found: list[tuple[Int64Array, Int32Array]] = []
    stride = 1
    while hit.shape[0]:
        take = np.minimum(high - low, wanted[hit] * stride)
        # One block for each query, newest entry first.
        block_end = np.cumsum(take)
        at = np.repeat(high - 1 + block_end - take, take) - np.arange(block_end[-1])
        owner = np.repeat(np.arange(hit.shape[0]), take)
        counts = alive(level.cells[at], level.stamps[at])
        if not counts.all() or stride > 1:
            rank = np.cumsum(counts)
            before = np.concatenate([[0], rank])[block_end - take]
            counts &= rank - before[owner] <= wanted[hit][owner]
            at, owner = at[counts], owner[counts]
        found.append((hit[owner], level.cells[at]))
        wanted[hit] -= np.bincount(owner, minlength=hit.shape[0])
        high = high - take
        more = (wanted[hit] > 0) & (high > low)
        hit, low, high = hit[more], low[more], high[more]
        stride *= 2
    return found


def _sorted(levels: list[_Level]) -> _Level:
    """One level of all entries of ``levels`` (the oldest first)."""
    prints = np.concatenate([level.prints for level in levels])
    # Stable: the older stays first among equals; and fast on parts that are sorted already.
    order = np.argsort(prints, kind="stable")
    return _Level(
        prints[order],
        np.concatenate([level.cells for level in levels])[order],
        np.concatenate([level.stamps for level in levels])[order],
    )
