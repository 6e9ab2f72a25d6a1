"""Where the index keeps tokens: paths of a forest, cut into stretches of consecutive cells.

    tree      root -- [a b c d] -- [e f]        extent  0: cells 0-3   parent none
                              \\-- [x y z]              1: cells 4-5   parent 0
                                                       2: cells 6-8   parent 0
    cell      0 1 2 3 4 5 6 7 8
    token     a b c d e f x y z
    slot      7 3 4 9 2 5 8 6 1                 extent_of(slot 6) = 2

Every indexed token has one cell, and cells are as many as KV slots, so that there is always room.
A token never moves. Neighbours on a path are neighbours in the arena, except where extents meet,
and so a run is compared and read with slices. Children begin where an extent ends: an extent is
split when a child is put into its middle, or when a part of it changes hands.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sglang_kvshare.matching.extents import Extents
from sglang_kvshare.matching.holes import Holes
from sglang_kvshare.matching.stretches import ranges
from sglang_kvshare.plan import BoolArray, Int32Array, Int64Array, IntArray

NONE = -1
#: Stamps of edges are negative, those of windows are not.
EDGE = np.int32(-(2**31))
_LAST_STAMP = 2**31 - 1


class Arena:
    """Tokens, slots and extents.

    Args:
        slots: size of the KV pool.
        window: ``w``, tokens of a window.
    """

    def __init__(self, slots: int, window: int) -> None:
        self.window = window
        self.token: Int32Array = np.zeros(slots, dtype=np.int32)
        self.slot: Int32Array = np.full(slots, NONE, dtype=np.int32)
        self.extent_of: Int32Array = np.full(slots, NONE, dtype=np.int32)
        self.extents = Extents()
        self.holes = Holes(slots)
        self.live_tokens = 0
        self._stamp = 0

    @property
    def nbytes(self) -> int:
        arrays = self.token.nbytes + self.slot.nbytes + self.extent_of.nbytes
        return int(arrays) + self.extents.nbytes

    def clear(self) -> None:
        self.slot.fill(NONE)
        self.extent_of.fill(NONE)
        self.extents.clear()
        self.holes.clear()
        self.live_tokens = 0

    # --- changes ---------------------------------------------------------------------------

    def append(
        self,
        tokens: Int32Array,
        slots: Int64Array,
        *,
        parent: int,
        position: int,
        node: int,
        domain: int,
        depth: int,
    ) -> tuple[Int64Array, Int64Array]:
        """Store a path's next tokens in one extent, or in several where holes are small.

        Returns:
            ``(cells, extents)``: int64, the cell of each token, and the new extents in order.
        """
        ext = self.extents
        pieces = np.array(self.holes.take(tokens.shape[0]), dtype=np.int64)
        starts, lengths = pieces[:, 0], pieces[:, 1]
        new = ext.new(pieces.shape[0])
        offsets = np.cumsum(lengths) - lengths
        reach = 0 if parent == NONE else int(ext.reach[parent] + ext.length[parent])
        self._stamp = self._stamp % _LAST_STAMP + 1
        ext.start[new] = starts
        ext.length[new] = lengths
        ext.parent[new[0]] = parent
        ext.parent[new[1:]] = new[:-1]
        ext.children[new] = 1
        ext.children[new[-1]] = 0
        ext.position[new] = position + offsets
        ext.reach[new] = np.minimum(reach + offsets, self.window - 1)
        ext.node[new] = node
        ext.domain[new] = domain
        ext.depth[new] = depth
        ext.stamp[new] = self._stamp
        if parent != NONE:
            ext.children[parent] += 1
        cells = ranges(starts, lengths)
        self.token[cells] = tokens
        self.slot[cells] = slots
        self.extent_of[slots] = np.repeat(new, lengths)
        self.live_tokens += tokens.shape[0]
        return cells, new

    def split(self, extent: int, tokens: int) -> int:
        """Cut the first ``tokens`` off; they get the number that is returned.

        The rest keeps the number, since its children refer to it.
        """
        ext = self.extents
        upper = int(ext.new(1)[0])
        start, parent = int(ext.start[extent]), int(ext.parent[extent])
        for column in (ext.start, ext.position, ext.node, ext.domain, ext.depth, ext.stamp):
            column[upper] = column[extent]
        ext.reach[upper], ext.parent[upper] = ext.reach[extent], parent
        ext.length[upper], ext.children[upper] = tokens, 1
        ext.start[extent] += tokens
        ext.length[extent] -= tokens
        ext.position[extent] += tokens
        ext.reach[extent] = min(int(ext.reach[extent]) + tokens, self.window - 1)
        ext.parent[extent] = upper
        self.extent_of[self.slot[start : start + tokens]] = upper
        return upper

    def forget(self, gone: Int64Array) -> None:
        """Free extents. Children that stay begin paths of their own, amid a sequence."""
        ext = self.extents
        parents = ext.parent[gone]
        parents = parents[parents != NONE]
        np.subtract.at(ext.children, parents, 1)
        orphaned = bool(ext.children[gone].any())
        lengths = ext.length[gone]
        cells = ranges(ext.start[gone], lengths)
        self.extent_of[self.slot[cells]] = NONE
        self.slot[cells] = NONE
        self.live_tokens -= cells.shape[0]
        for start, length in zip(ext.start[gone].tolist(), lengths.tolist(), strict=True):
            self.holes.give(start, length)
        ext.free(gone)
        if orphaned:
            self._orphan(gone)

    def _orphan(self, gone: Int64Array) -> None:
        """Cut the ties to extents that are gone, and what descendants see across them."""
        ext = self.extents
        parent = ext.parent[: ext.rows]
        changed = np.flatnonzero(np.isin(parent, gone))
        ext.parent[changed] = NONE
        ext.reach[changed] = 0
        ext.children[gone] = 0
        while changed.shape[0]:
            below = np.flatnonzero(np.isin(parent, changed))
            above = parent[below]
            reach = np.minimum(ext.reach[above] + ext.length[above], self.window - 1)
            shorter = reach < ext.reach[below]
            changed = below[shorter]
            ext.reach[changed] = reach[shorter]

    # --- questions ---------------------------------------------------------------------------

    def upwards(self, extent: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        """The last ``tokens`` tokens of the path that ends with ``extent``.

        Yields:
            ``(extent, first cell, cell after the last)``, the last piece first; fewer tokens when
            the path is shorter.
        """
        ext = self.extents
        while tokens > 0 and extent != NONE:
            start, length = int(ext.start[extent]), int(ext.length[extent])
            yield extent, max(start, start + length - tokens), start + length
            tokens -= length
            extent = int(ext.parent[extent])

    def windows_alive(self, cells: IntArray, stamps: Int32Array) -> BoolArray:
        """Which table entries are windows of indexed tokens.

        A cell that was freed, and perhaps used again, belongs to another insertion: its stamp
        differs. (The stamp of an edge is negative.)
        """
        ext, slots, extents = self.extents, *self._owners(cells)
        alive: BoolArray = ext.stamp[extents] == stamps
        alive &= cells - ext.start[extents] + ext.reach[extents] >= self.window - 1
        alive &= slots != NONE
        return alive

    def edges_alive(self, cells: IntArray, stamps: Int32Array) -> BoolArray:
        """Which table entries are first tokens of extents that have a parent."""
        ext, slots, extents = self.extents, *self._owners(cells)
        alive: BoolArray = ext.stamp[extents] == stamps ^ EDGE
        alive &= (ext.start[extents] == cells) & (ext.parent[extents] != NONE)
        alive &= slots != NONE
        return alive

    def alive(self, cells: IntArray, stamps: Int32Array) -> BoolArray:
        """Both kinds."""
        alive = self.windows_alive(cells, stamps)
        edges = (stamps < 0).nonzero()[0]
        alive[edges] = self.edges_alive(cells[edges], stamps[edges])
        return alive

    def _owners(self, cells: IntArray) -> tuple[Int32Array, Int64Array]:
        """Slot and extent of cells; the extent is any where the slot is -1."""
        slots = self.slot[cells]
        # Indexing is fastest with the widest integers.
        return slots, self.extent_of[slots].astype(np.int64)
