"""From a prompt's tokens to maximal runs: one lookup in the run index.

    prompt   ... a b|c d e f|g h i j|k l ...        windows of w = 4 tokens, hit at c-f and g-j
    donor    ... a b|c d e f|g h i j|k l|x ...

1. *Hits.* A pair ``(end, cell)`` says that the prompt's window that ends at ``end`` has the
   fingerprint of the indexed window that ends in ``cell``.
2. *Segments.* Hits that follow each other by ``w`` in the prompt and in one extent are one segment;
   segments are linked across extents, from child to parent.
3. *Ends.* What lies before the first and behind the last window of a chain of segments is compared
   token by token.
4. *Proof.* The tokens of each run that is returned are compared, all of them. A fingerprint that
   lied shows up here, and then every single hit is compared first: the result never rests on one.

All of it is vectorised over hits, segments or runs; loops run over the rounds of a doubling, over
extents that follow each other, and over the runs that are returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_kvshare.matching.arena import NONE, Arena
from sglang_kvshare.matching.ragged import ranges
from sglang_kvshare.matching.window_hash import UInt32Array, fingerprints, window_sums
from sglang_kvshare.matching.window_table import WindowTable
from sglang_kvshare.plan import BoolArray, Int32Array, Int64Array, IntArray

#: Tokens compared in one round of following runs beyond their windows, or 4 for each prompt token.
_ROUND_TOKENS = 1 << 16
#: Any constant: edges have fingerprints of their own.
_EDGE_SEED = 0x5BD1E995

#: A run: start, end, depth, and its pieces (extent, first cell, cell after the last), in order.
Found = tuple[int, int, int, list[tuple[int, int, int]]]


@dataclass(frozen=True)
class Query:
    """What is looked for.

    Attributes:
        tokens: int32 ``[n]``.
        domain: number of the trust domain.
        seeds: the domain's seed for each depth that may serve.
        limit: places looked at for a window of each depth, and for the children of a token.
        max_depth: tokens of a larger depth do not match.
        min_run_tokens: shorter runs are dropped.
        covering: leave out runs that lie inside another one.
    """

    tokens: Int32Array
    domain: int
    seeds: tuple[int, ...]
    limit: int
    max_depth: int
    min_run_tokens: int
    covering: bool


class _Collision(Exception):
    """Tokens differ where fingerprints agreed."""


def search(arena: Arena, table: WindowTable, query: Query) -> list[Found]:
    """The runs of ``query``; see :meth:`RunIndex.find_runs` for which and in what order."""
    return _Search(arena, table, query).runs()


def edge_prints(last_cells: IntArray, tokens: IntArray) -> UInt32Array:
    """Fingerprint under which a child's first cell is found: its parent's last cell, its token."""
    return fingerprints(
        (last_cells.astype(np.uint64) << np.uint64(32)) + tokens.astype(np.uint64), _EDGE_SEED
    )


@dataclass(frozen=True)
class _Heads:
    """How far places match backwards; arrays over the places.

    Attributes:
        count: equal tokens, the one at the place included.
        cell: the first of them.
        depth: the largest depth among them.
    """

    count: Int64Array
    cell: Int64Array
    depth: Int64Array


@dataclass(frozen=True)
class _Tails:
    """How far places match forwards; a place where the tree branches may have several.

    Attributes:
        place: which place.
        count: equal tokens behind it.
        cell, extent: the last of them.
        depth: the largest depth among them.
    """

    place: Int64Array
    count: Int64Array
    cell: Int64Array
    extent: Int64Array
    depth: Int64Array


@dataclass
class _Segments:
    """Hits in a row. ``first`` and ``last`` are numbers of hits; ``before`` is a segment or -1."""

    first: Int64Array
    last: Int64Array
    before: Int64Array
    depth: Int64Array


class _Search:
    def __init__(self, arena: Arena, table: WindowTable, query: Query) -> None:
        self.arena, self.ext, self.table, self.query = arena, arena.extents, table, query
        self.tokens = query.tokens
        self.n = int(query.tokens.shape[0])
        self.w = arena.window

    def runs(self) -> list[Found]:
        hits = self._hits()
        if hits.shape[0] == 0:
            return []
        try:
            return self._from_hits(hits)
        except _Collision:
            places = self._places(hits)
            heads = self._back(*places, known=np.zeros_like(hits), most=self.w)
            hits = hits[heads.count == self.w]
            return self._from_hits(hits) if hits.shape[0] else []

    # --- 1: hits -------------------------------------------------------------------------------

    def _hits(self) -> Int64Array:
        """int64, ascending and distinct: ``(cell - end + n) * (n + w) + end`` of each hit.

        Hits that follow each other differ by ``w``.
        """
        sums = window_sums(self.tokens, self.w)
        found: list[Int64Array] = []
        for seed in self.query.seeds:
            prints = fingerprints(sums, seed)
            order = np.sort(
                (prints.astype(np.uint64) << np.uint64(32))
                | np.arange(sums.shape[0], dtype=np.uint64)
            )
            prints = (order >> np.uint64(32)).astype(np.uint32)
            new = np.concatenate([[True], prints[1:] != prints[:-1]])
            group = np.flatnonzero(new)
            which, cell = self.table.lookup(
                prints[group], self.query.limit, self.arena.windows_alive
            )
            if which.shape[0] == 0:
                continue
            # A window that occurs several times in the prompt hits each of its places every time.
            times = np.diff(group, append=sums.shape[0])[which]
            at = ranges(group[which], times)
            end = (order[at] & np.uint64(0xFFFFFFFF)).astype(np.int64) + self.w - 1
            found.append(
                (np.repeat(cell.astype(np.int64), times) - end + self.n) * (self.n + self.w) + end
            )
        if not found:
            return np.empty(0, dtype=np.int64)
        hits = np.sort(np.concatenate(found))
        hits = hits[np.concatenate([[True], hits[1:] != hits[:-1]])]
        extent = self.arena.extent_of[self.arena.slot[self._unpacked(hits)[1]]]
        mine = (self.ext.domain[extent] == self.query.domain) & self._serves(extent)
        return np.compress(mine, hits)

    def _unpacked(self, hits: Int64Array) -> tuple[Int64Array, Int64Array]:
        diagonal, q = np.divmod(hits, self.n + self.w)
        return q, diagonal + q - self.n

    def _places(self, hits: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """End in the prompt, cell and extent of hits."""
        q, cell = self._unpacked(hits)
        return q, cell, self.arena.extent_of[self.arena.slot[cell]].astype(np.int64)

    def _serves(self, extent: IntArray) -> BoolArray:
        return self.ext.depth[extent] <= self.query.max_depth

    # --- 2: segments ---------------------------------------------------------------------------

    def _segments(
        self, hits: Int64Array, q: Int64Array, cell: Int64Array, extent: Int64Array
    ) -> _Segments:
        follows = (hits[1:] - hits[:-1] == self.w) & (extent[1:] == extent[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~follows]))
        last = np.append(first[1:], hits.shape[0]) - 1
        depth = self.ext.depth[extent[first]].astype(np.int64)
        before = np.full(first.shape[0], NONE, dtype=np.int64)
        # The window before the first one ends in an ancestor when it does not end in this extent.
        need = self.w - (cell[first] - self.ext.start[extent[first]])
        at = extent[first].astype(np.int64)
        seen = depth.copy()
        walk = np.flatnonzero((need > 0) & (q[first] - self.w >= self.w - 1))
        while walk.shape[0]:
            at[walk] = self.ext.parent[at[walk]]
            walk = walk[at[walk] != NONE]
            seen[walk] = np.maximum(seen[walk], self.ext.depth[at[walk]])
            inside = need[walk] <= self.ext.length[at[walk]]
            here = walk[inside]
            key_cell = (
                self.ext.start[at[here]].astype(np.int64) + self.ext.length[at[here]] - need[here]
            )
            key_q = q[first[here]] - self.w
            key = (key_cell - key_q + self.n) * (self.n + self.w) + key_q
            hit = np.minimum(np.searchsorted(hits, key), hits.shape[0] - 1)
            same = hits[hit] == key
            linked = here[same]
            before[linked] = np.searchsorted(first, hit[same], side="right") - 1
            depth[linked] = seen[linked]
            walk = walk[~inside]
            need[walk] -= self.ext.length[at[walk]]
        return _Segments(first, last, before, depth)

    # --- 3: ends -------------------------------------------------------------------------------

    def _from_hits(self, hits: Int64Array) -> list[Found]:
        q, cell, extent = self._places(hits)
        segments = self._segments(hits, q, cell, extent)
        root, depth = _chained(segments)
        is_end = np.ones(root.shape[0], dtype=np.bool_)
        is_end[segments.before[segments.before != NONE]] = False
        ends, roots = np.flatnonzero(is_end), np.flatnonzero(segments.before == NONE)

        # Every chain has one root and at least one end.
        at = segments.first[roots]
        longest = np.zeros(root.shape[0], dtype=np.int64)
        np.maximum.at(longest, root, q[segments.last] - q[segments.first[root]])
        heads = self._back(q[at], cell[at], extent[at], longest[roots])
        lied = heads.count < self.w
        if lied.any():
            # A hit of its own goes; one that others rest on calls for a closer look.
            alone = is_end[roots] & (segments.first == segments.last)[roots]
            if (lied & ~alone).any():
                raise _Collision
            ends = ends[~np.isin(ends, roots[lied])]
        head_of = np.searchsorted(roots, root)
        starts = q[segments.first[root]] + 1 - heads.count[head_of]
        at = segments.last[ends]
        tails = self._forward(q[at], cell[at], extent[at], q[at] - starts[ends])
        end_of = ends[tails.place]
        start, head_of = starts[end_of], head_of[end_of]
        end = q[segments.last[end_of]] + 1 + tails.count
        deepest = np.maximum(np.maximum(heads.depth[head_of], depth[end_of]), tails.depth)
        enough = np.flatnonzero(end - start >= self.query.min_run_tokens)
        runs = (start, end, deepest, heads.cell[head_of], tails.cell, tails.extent)
        start, end, deepest, head_cell, tail_cell, tail_extent = (a[enough] for a in runs)
        return [
            self._proven(*(int(a[i]) for a in (start, end, tail_extent, tail_cell)))
            for i in self._in_order(start, end, deepest, head_cell, tail_cell).tolist()
        ]

    def _in_order(
        self,
        start: Int64Array,
        end: Int64Array,
        depth: Int64Array,
        head: Int64Array,
        tail: Int64Array,
    ) -> Int64Array:
        """Numbers of the runs that are returned, in order."""
        slot = self.arena.slot[tail]
        order = np.lexsort((slot, start, depth, start - end))
        # One run for each beginning, the first in order: other branches that stop earlier are not
        # maximal, and following a run from both of its parts finds it twice.
        key = (start * self.arena.slot.shape[0] + head)[order]
        order = order[np.sort(np.unique(key, return_index=True)[1])]
        if self.query.covering and order.shape[0]:
            # By start, the longest first; what does not reach further than those before is inside.
            by_start = order[np.argsort(start[order], kind="stable")]
            reached = np.maximum.accumulate(end[by_start])
            further = np.concatenate([[True], end[by_start][1:] > reached[:-1]])
            keep = np.zeros(start.shape[0], dtype=np.bool_)
            keep[by_start[further]] = True
            order = order[keep[order]]
        return order

    def _proven(self, start: int, end: int, extent: int, cell: int) -> Found:
        """Lay a run's pieces out, and compare all of its tokens."""
        behind = int(self.ext.start[extent] + self.ext.length[extent]) - 1 - cell
        pieces = list(self.arena.upwards(extent, end - start + behind))
        pieces[0] = (extent, pieces[0][1], cell + 1)
        pieces.reverse()
        depth, at = 0, start
        for extent, low, high in pieces:
            depth = max(depth, int(self.ext.depth[extent]))
            part = self.tokens[at : at + high - low]
            at += high - low
            if not np.array_equal(self.arena.token[low:high], part):
                raise _Collision
        if at != end or depth > self.query.max_depth:
            raise _Collision
        return start, end, depth, pieces

    def _back(
        self,
        q: Int64Array,
        cell: Int64Array,
        extent: Int64Array,
        known: Int64Array,
        most: int | None = None,
    ) -> _Heads:
        """Compare the token at each place, and those before it, up to ``most`` of them.

        ``known`` is the length of what follows each place.

        prompt   ...|. . . . . . q]          q and cell are included
        arena    ...|. . . . . cell]
        """
        places = q.shape[0]
        count = np.zeros(places, dtype=np.int64)
        depth = np.zeros(places, dtype=np.int64)
        first = cell.copy()
        # Of the places that still match: number, prompt tokens left, cell after the next, extent.
        live, left, edge, extent = np.arange(places), q + 1, cell + 1, extent.copy()
        # The window, and less than another one: the next would be a hit, unless `limit` cut it off.
        sure = most or 2 * self.w
        width = sure
        while live.shape[0]:
            have = count[live]
            inside = edge - self.ext.start[extent]
            room = np.minimum(np.minimum(left, inside), np.where(have < sure, sure - have, width))
            got = self._equal(left - 1, edge - 1, -1, room)
            some = got > 0
            count[live] += got
            first[live[some]] = (edge - got)[some]
            reached = np.where(some, self.ext.depth[extent], 0)
            depth[live] = np.maximum(depth[live], reached)
            left, edge = left - got, edge - got
            parent = np.where(got == inside, self.ext.parent[extent], extent)
            on = (got == room) & (left > 0) & (parent != NONE) & self._serves(parent)
            if most:
                on &= count[live] < most
            over = parent != extent
            edge = np.where(over, self.ext.start[parent] + self.ext.length[parent], edge)
            done = count[live] >= sure
            if done[on].all():
                width *= 2
            behind = self.ext.position[parent] + edge - self.ext.start[parent]
            hope = known[live] + count[live] + np.minimum(left, behind)
            on &= self._affordable(on & done, width, hope)
            live, left, edge, extent = live[on], left[on], edge[on], parent[on]
        return _Heads(count, first, depth)

    def _forward(
        self, q: Int64Array, cell: Int64Array, extent: Int64Array, known: Int64Array
    ) -> _Tails:
        """Compare the tokens behind each place, into every branch of the tree.

        ``known`` is the length of what comes before each place.

        prompt   ... q|. . . . .|...         q and cell are not compared again
        arena    ... cell|. . . .|...
        """
        place = np.arange(q.shape[0])
        count = np.zeros(q.shape[0], dtype=np.int64)
        depth = np.zeros(q.shape[0], dtype=np.int64)
        live = _Tails(place, count, cell, extent, depth)
        finished: list[_Tails] = []
        sure = width = self.w
        while live.place.shape[0]:
            end = self.ext.start[live.extent] + self.ext.length[live.extent] - 1
            live, stuck = self._into_children(live, q, live.cell == end)
            finished.append(stuck)
            at = q[live.place] + live.count
            left = self.n - 1 - at
            inside = self.ext.start[live.extent] + self.ext.length[live.extent] - 1 - live.cell
            allowed = np.where(live.count < sure, sure - live.count, width)
            room = np.minimum(np.minimum(left, inside), allowed)
            got = self._equal(at + 1, live.cell + 1, 1, room)
            live = _Tails(live.place, live.count + got, live.cell + got, live.extent, live.depth)
            on = (got == room) & (left > got)
            done = live.count >= sure
            if done[on].all():
                width *= 2
            hope = known[live.place] + self.n - q[live.place]
            on &= self._affordable(on & done, width, hope)
            finished.append(_picked(live, ~on))
            live = _picked(live, on)
        if not finished:
            return live
        columns = (np.concatenate(parts) for parts in zip(*map(_columns, finished), strict=True))
        return _Tails(*columns)

    def _into_children(
        self, tails: _Tails, q: Int64Array, at_end: BoolArray
    ) -> tuple[_Tails, _Tails]:
        """Where an extent is at its end, go on with each child that has the prompt's next token.

        Returns:
            those that go on, and those that cannot.
        """
        onward = q[tails.place] + tails.count + 1
        asking = np.flatnonzero(at_end & (self.ext.children[tails.extent] > 0) & (onward < self.n))
        stays = ~at_end
        if asking.shape[0] == 0:
            return _picked(tails, stays), _picked(tails, at_end)
        token = self.tokens[onward[asking]]
        prints, which = np.unique(edge_prints(tails.cell[asking], token), return_inverse=True)
        found, child_cell = self.table.lookup(prints, self.query.limit, self.arena.edges_alive)
        # Pair every asking place with what its fingerprint found.
        by_print = np.argsort(found, kind="stable")
        low = np.searchsorted(found[by_print], which)
        times = np.searchsorted(found[by_print], which, side="right") - low
        cell = child_cell[by_print][ranges(low, times)].astype(np.int64)
        origin = np.repeat(asking, times)
        child = self.arena.extent_of[self.arena.slot[cell]].astype(np.int64)
        true = (self.ext.parent[child] == tails.extent[origin]) & self._serves(child)
        true &= self.arena.token[cell] == self.tokens[onward[origin]]
        origin, cell, child = origin[true], cell[true], child[true]
        stuck = at_end.copy()
        stuck[origin] = False
        into = _Tails(
            tails.place[origin],
            tails.count[origin] + 1,
            cell,
            child,
            np.maximum(tails.depth[origin], self.ext.depth[child]),
        )
        kept = _picked(tails, stays)
        columns = map(np.concatenate, zip(_columns(kept), _columns(into), strict=True))
        return _Tails(*columns), _picked(tails, stuck)

    def _equal(self, q: Int64Array, cell: Int64Array, step: int, room: Int64Array) -> Int64Array:
        """int64: how many tokens are equal from ``(q, cell)`` on in steps of +1 or -1."""
        width = int(room.max(initial=0))
        offset = np.arange(width)
        inside = offset < room[:, None]
        offset *= step
        mine = self.tokens.take(q[:, None] + offset, mode="clip")
        differ = mine != self.arena.token.take(cell[:, None] + offset, mode="clip")
        differ &= inside
        if not width:
            return np.zeros(q.shape[0], dtype=np.int64)
        return np.where(differ.any(axis=1), differ.argmax(axis=1), room)

    def _affordable(self, on: BoolArray, width: int, hope: Int64Array) -> BoolArray:
        """Which places may go on: of those in ``on``, the ones of most hope that a round can pay.

        Only where ``limit`` cut hits off do many places go on beyond what their windows promise.
        """
        most = max(1, max(_ROUND_TOKENS, 4 * self.n) // width)
        allowed = np.ones(on.shape[0], dtype=np.bool_)
        candidates = np.flatnonzero(on)
        if candidates.shape[0] > most:
            ranked = np.argsort(-hope[candidates], kind="stable")
            allowed[candidates[ranked[most:]]] = False
        return allowed


def _columns(tails: _Tails) -> tuple[Int64Array, ...]:
    return tails.place, tails.count, tails.cell, tails.extent, tails.depth


def _picked(tails: _Tails, which: BoolArray) -> _Tails:
    return _Tails(*(column[which] for column in _columns(tails)))


def _chained(segments: _Segments) -> tuple[Int64Array, Int64Array]:
    """For each segment: the root of its chain, and the largest depth from there to here."""
    number = np.arange(segments.before.shape[0])
    jump = np.where(segments.before == NONE, number, segments.before)
    depth = segments.depth
    # Pointer doubling: after k rounds every segment has seen 2**k of its ancestors.
    while True:
        depth = np.maximum(depth, depth[jump])
        if (jump == jump[jump]).all():
            return jump, depth
        jump = jump[jump]
