"""A multimap from fingerprints to cells that grows and shrinks with the cache.

Log-structured: an insertion is merged into the newest sorted level, and levels of like size are
merged, so that a lookup is one binary search in each of a few levels:

    oldest  [ 120,000 sorted entries ]  [ 9,000 ]  [ 700 ]  [ 40 ]  newest

Nothing is searched for to be deleted. The owner knows from an entry's cell and stamp whether it is
alive, lookups skip the dead, and a sweep drops them before they are too many.
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
#: Entries looked at in a sweep for one that died: a sweep ends before a sixteenth more have died.
_SWEEP = 16
_PRINTS = 1 << 32
#: Stamp of entries that a sweep found dead; the owner uses others.
_DEAD = 0


@dataclass(frozen=True)
class _Level:
    """Entries sorted by fingerprint; among equal ones the newer comes first."""

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
        entries: about as many as there will be.
    """

    def __init__(self, alive: Alive, entries: int) -> None:
        self._alive = alive
        self._levels: list[_Level] = []
        #: Fingerprints below have been looked at in the sweep under way; 0: there is none.
        self._swept = 0
        # Whether a fingerprint that begins with these bits may be in a level: most windows of most
        # prompts were never seen, and one look says so.
        bits = min(32, max(8, (2 * entries - 1).bit_length()))
        self._seen: BoolArray = np.zeros(1 << bits, dtype=np.bool_)
        self._shift = np.uint32(32 - bits)

    def __len__(self) -> int:
        """Stored entries, dead ones included."""
        return sum(map(len, self._levels))

    @property
    def nbytes(self) -> int:
        return int(self._seen.nbytes) + sum(level.nbytes for level in self._levels)

    def clear(self) -> None:
        self._levels.clear()
        self._seen.fill(False)
        self._swept = 0

    def add(self, prints: UInt32Array, cells: Int32Array, stamps: Int32Array) -> None:
        """Add entries, the oldest first."""
        entries = int(prints.shape[0])
        if not entries:
            return
        self._seen[prints >> self._shift] = True
        parts = [_Level(prints[::-1], cells[::-1], stamps[::-1])]
        while self._levels and len(self._levels[-1]) < max(_SMALL_ENTRIES, _FANOUT * entries):
            parts.append(self._levels.pop())
            entries += len(parts[-1])
        self._levels.append(_merged(parts))

    def sweep(self, dead: int, start: int) -> None:
        """Mark dead entries little by little, and drop them once all entries have been looked at.

        Args:
            dead: entries that died since the last call; some times as many are looked at.
            start: a new sweep begins when there are more entries than this.
        """
        entries = len(self)
        if entries == 0 or (self._swept == 0 and entries <= start):
            return
        # By ranges of fingerprints, which stay what they are when levels are merged meanwhile.
        low = self._swept
        high = min(_PRINTS, low + 1 + _PRINTS * _SWEEP * dead // entries)
        for level in self._levels:
            first = level.prints.searchsorted(np.uint32(low))
            last = level.prints.searchsorted(np.uint32(high - 1), side="right")
            stamps = level.stamps[first:last]
            stamps[~self._alive(level.cells[first:last], stamps)] = _DEAD
        self._swept = high % _PRINTS
        if self._swept == 0:
            self._drop([level.stamps != _DEAD for level in self._levels])

    def compact(self, most: int) -> None:
        """Drop the dead entries now if there are more than ``most`` entries, dead ones included."""
        if len(self) > most:
            self._drop([self._alive(level.cells, level.stamps) for level in self._levels])
            self._swept = 0

    def lookup(
        self, prints: UInt32Array, limit: int, alive: Alive
    ) -> tuple[Int64Array, Int64Array]:
        """The newest ``limit`` entries of each query that ``alive`` accepts.

        Args:
            prints: uint32 ``[k]``; ascending is faster.

        Returns:
            ``(query, cell)``, arrays of equal length: an index into ``prints``, and a cell.
        """
        seen = self._seen[prints >> self._shift].nonzero()[0]
        prints = prints[seen]
        wanted = np.full(prints.shape[0], limit, dtype=np.int64)
        found: list[tuple[Int64Array, Int64Array]] = []
        for level in self._levels[::-1]:
            low = level.prints.searchsorted(prints)
            equal = level.prints.take(low, mode="clip") == prints
            equal &= wanted > 0
            hit = equal.nonzero()[0]
            if hit.shape[0]:
                found += _newest(level, prints, hit, low[hit], wanted, alive)
        if not found:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        return seen[np.concatenate([q for q, _ in found])], np.concatenate([c for _, c in found])

    def _drop(self, kept: list[BoolArray]) -> None:
        levels, self._levels = self._levels, []
        self._seen.fill(False)
        for level, keep in zip(levels, kept, strict=True):
            if keep.any():
                level = _Level(level.prints[keep], level.cells[keep], level.stamps[keep])
                self._levels.append(level)
                self._seen[level.prints >> self._shift] = True


def _newest(
    level: _Level,
    prints: UInt32Array,
    hit: Int64Array,
    low: Int64Array,
    wanted: Int64Array,
    alive: Alive,
) -> list[tuple[Int64Array, Int64Array]]:
    """Entries from ``low`` on that equal ``prints[hit]``, until all have what they want.

    Dead entries are passed over in strides that double, so that many of them cost a logarithm of
    rounds. ``wanted`` is counted down.
    """
    found: list[tuple[Int64Array, Int64Array]] = []
    width = int(wanted[hit].max())
    while hit.shape[0]:
        at = low[:, None] + np.arange(width)
        equal = level.prints.take(at, mode="clip") == prints[hit][:, None]
        equal &= at < len(level)
        inside = equal.ravel().nonzero()[0]
        owner, at = inside // width, at.ravel()[inside]
        cells = level.cells[at].astype(np.int64)
        counts = alive(cells, level.stamps[at])
        want = wanted[hit]
        if want.min() < width:
            rank = counts.cumsum()
            ends = np.bincount(owner, minlength=hit.shape[0]).cumsum()
            before = np.append(0, rank)[np.append(0, ends[:-1])]
            counts &= rank - before[owner] <= want[owner]
        if not counts.all():
            owner, cells = owner[counts], cells[counts]
        found.append((hit[owner], cells))
        wanted[hit] -= np.bincount(owner, minlength=hit.shape[0])
        more = equal[:, -1] & (wanted[hit] > 0)
        hit, low = hit[more], low[more] + width
        width *= 2
    return found


def _merged(levels: list[_Level]) -> _Level:
    """One level of all entries of ``levels``, the newest first; they need not be sorted yet."""
    prints = np.concatenate([level.prints for level in levels])
    # Stable: the newer stays first among equals; and fast on parts that are sorted already.
    order = np.argsort(prints, kind="stable")
    return _Level(
        prints[order],
        np.concatenate([level.cells for level in levels])[order],
        np.concatenate([level.stamps for level in levels])[order],
    )
