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

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.matching.arena import NONE, Arena
from sglang_kvshare.matching.stretches import begins, firsts, ranges
from sglang_kvshare.matching.window_hash import UInt32Array, fingerprints, pair_sums, window_sums
from sglang_kvshare.matching.window_table import WindowTable
from sglang_kvshare.plan import BoolArray, Int32Array, Int64Array, IntArray

#: Tokens compared in one round of following runs beyond their windows, or 4 for each prompt token.
_ROUND_TOKENS = 1 << 16

#: Children of one token that begin alike and are looked at, the newest first. (In a tree of pages
#: they differ later in the page.)
_MOST_CHILDREN = 64

#: Moving a run by so many positions counts as much as one token less of it, up to a bound.
#: A passage that is moved far was computed behind much less or much more than it stands behind now;
#: of two donors the closer one left half of the error or less (eval/README.md).
_SHIFT_TOKENS = 32
_MOST_LOST_TOKENS = 8

#: A run: start, end, depth, and its pieces (extent, first cell, cell after the last), in order.
Found = tuple[int, int, int, list[tuple[int, int, int]]]


@dataclass(frozen=True)
class Query:
    """What is looked for.

    Attributes:
        tokens: int32 ``[n]``.
        domain: number of the trust domain.
        seeds: the domain's seed for each depth that may serve.
        limit: places looked at for a window of each depth.
        max_depth: tokens of a larger depth do not match.
        min_run_tokens: shorter runs are dropped.
        covering: leave out runs that lie inside one that comes before them.
        position: of the first of ``tokens`` in the prompt.
    """

    tokens: Int32Array
    domain: int
    seeds: tuple[int, ...]
    limit: int
    max_depth: int
    min_run_tokens: int
    covering: bool
    position: int = 0


class _Collision(Exception):
    """Tokens differ where fingerprints agreed."""


def search(arena: Arena, table: WindowTable, query: Query) -> list[Found]:
    """The runs of ``query``; see :meth:`RunIndex.find_runs` for which and in what order."""
    return _Search(arena, table, query).runs()


def worth(length: Int64Array, shift: Int64Array) -> Int64Array:
    """How good runs of ``length`` are whose donors stood ``shift`` positions (at least 0) away."""
    gain: Int64Array = length - np.minimum(shift // _SHIFT_TOKENS, _MOST_LOST_TOKENS)
    return gain


def edge_prints(last_cells: IntArray, tokens: IntArray) -> UInt32Array:
    """Fingerprint under which a child's first cell is found: its parent's last cell, its token."""
    return fingerprints(pair_sums(last_cells, tokens), 0)


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
        # A hit's number is (cell - end + n) << shift | end. Hits that follow each other on a
        # diagonal differ by w, and no others do.
        self.shift = (self.n + self.w).bit_length()

    def runs(self) -> list[Found]:
        hits = self._hits()
        if hits.shape[0] == 0:
            return []
        places = self._places(hits)
        mine = (self.ext.domain[places[2]] == self.query.domain) & self._serves(places[2])
        if not mine.all():
            hits, places = hits[mine], tuple(column[mine] for column in places)
        try:
            return self._from_hits(hits, *places)
        except _Collision:
            heads = self._back(*places, known=np.zeros_like(hits), most=self.w)
            true = heads.count == self.w
            return self._from_hits(hits[true], *(column[true] for column in places))

    # --- 1: hits -------------------------------------------------------------------------------

    def _hits(self) -> Int64Array:
        """int64: numbers of hits, ascending and distinct."""
        sums = window_sums(self.tokens, self.w)
        number = np.arange(sums.shape[0], dtype=np.uint64)
        found: list[Int64Array] = []
        for seed in self.query.seeds:
            # Sorted by fingerprint, which makes the searches fast; equal ones are one group.
            order = fingerprints(sums, seed).astype(np.uint64) << np.uint64(32)
            order |= number
            order.sort()
            prints = (order >> np.uint64(32)).astype(np.uint32)
            group = begins(prints[1:] != prints[:-1]).nonzero()[0]
            which, cell = self.table.lookup(
                prints[group], self.query.limit, self.arena.windows_alive
            )
            if which.shape[0] == 0:
                continue
            # A window that occurs several times in the prompt hits each of its places every time.
            if group.shape[0] < sums.shape[0]:
                times = np.diff(group, append=sums.shape[0])[which]
                at = ranges(group[which], times)
                cell = np.repeat(cell, times)
            else:
                at = which
            end = (order[at] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            end += self.w - 1
            found.append(self._numbers(cell, end))
        if not found:
            return np.empty(0, dtype=np.int64)
        hits = np.concatenate(found)
        hits.sort()
        return hits[begins(hits[1:] != hits[:-1])]

    def _numbers(self, cell: Int64Array, end: Int64Array) -> Int64Array:
        return (cell - end + self.n) << self.shift | end

    def _places(self, hits: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """End in the prompt, cell and extent of hits."""
        q = hits & ((1 << self.shift) - 1)
        cell = (hits >> self.shift) + q - self.n
        return q, cell, self.arena.extent_of[self.arena.slot[cell]].astype(np.int64)

    def _serves(self, extent: Int64Array) -> BoolArray:
        return self.ext.depth[extent] <= self.query.max_depth

    # --- 2: segments ---------------------------------------------------------------------------

    def _segments(
        self, hits: Int64Array, q: Int64Array, cell: Int64Array, extent: Int64Array
    ) -> _Segments:
        follows = hits[1:] - hits[:-1] == self.w
        follows &= extent[1:] == extent[:-1]
        first = begins(~follows).nonzero()[0]
        last = np.append(first[1:], hits.shape[0]) - 1
        at = extent[first]
        depth = self.ext.depth[at].astype(np.int64)
        before = np.full(first.shape[0], NONE, dtype=np.int64)
        # The window before the first one ends in an ancestor when it does not end in this extent.
        need = self.w - (cell[first] - self.ext.start[at])
        deepest = depth.copy()
        walk = ((need > 0) & (q[first] >= 2 * self.w - 1)).nonzero()[0]
        while walk.shape[0]:
            at[walk] = self.ext.parent[at[walk]]
            walk = walk[at[walk] != NONE]
            above, missing = at[walk], need[walk]
            deepest[walk] = np.maximum(deepest[walk], self.ext.depth[above])
            end = q[first[walk]] - self.w
            number = self._numbers(self.ext.start[above] + self.ext.length[above] - missing, end)
            hit = np.minimum(hits.searchsorted(number), hits.shape[0] - 1)
            inside = missing <= self.ext.length[above]
            same = inside & (hits[hit] == number)
            linked = walk[same]
            before[linked] = first.searchsorted(hit[same], side="right") - 1
            depth[linked] = deepest[linked]
            need[walk] -= self.ext.length[above]
            walk = walk[~inside]
        return _Segments(first, last, before, depth)

    # --- 3: ends -------------------------------------------------------------------------------

    def _from_hits(
        self, hits: Int64Array, q: Int64Array, cell: Int64Array, extent: Int64Array
    ) -> list[Found]:
        if hits.shape[0] == 0:
            return []
        segments = self._segments(hits, q, cell, extent)
        root, depth = _chained(segments)
        is_root = segments.before == NONE
        is_end = np.ones(root.shape[0], dtype=np.bool_)
        is_end[segments.before[~is_root]] = False

        # Every chain has one root and at least one end.
        roots = is_root.nonzero()[0]
        ahead = np.zeros(root.shape[0], dtype=np.int64)
        np.maximum.at(ahead, root, q[segments.last] - q[segments.first[root]])
        at = segments.first[roots]
        heads = self._back(q[at], cell[at], extent[at], ahead[roots])
        lied = roots[heads.count < self.w]
        if lied.shape[0]:
            # A hit of its own goes; one that others rest on calls for a closer look.
            if not (is_end & (segments.first == segments.last))[lied].all():
                raise _Collision
            is_end[lied] = False
        ends = is_end.nonzero()[0]
        head_of = roots.searchsorted(root[ends])
        start = q[segments.first[root[ends]]] + 1 - heads.count[head_of]
        at = segments.last[ends]
        tails = self._forward(q[at], cell[at], extent[at], q[at] - start)
        start, head_of, ends = start[tails.place], head_of[tails.place], ends[tails.place]
        end = q[segments.last[ends]] + 1 + tails.count
        deepest = np.maximum(np.maximum(heads.depth[head_of], depth[ends]), tails.depth)
        enough = (end - start >= self.query.min_run_tokens).nonzero()[0]
        runs = (start, end, deepest, heads.cell[head_of], tails.cell, tails.extent)
        start, end, deepest, head_cell, tail_cell, tail_extent = (a[enough] for a in runs)
        return [
            self._proven(*(int(a[i]) for a in (start, end, tail_extent, tail_cell)))
            for i in self._in_order(
                start, end, deepest, head_cell, tail_cell, self._shift(end, tail_cell, tail_extent)
            )
        ]

    def _shift(self, end: Int64Array, cell: Int64Array, extent: Int64Array) -> Int64Array:
        """By how many positions each run is moved."""
        ext = self.ext
        source = ext.position[extent].astype(np.int64) + cell - ext.start[extent]
        return np.abs(end - 1 + self.query.position - source)

    def _in_order(
        self,
        start: Int64Array,
        end: Int64Array,
        depth: Int64Array,
        head: Int64Array,
        tail: Int64Array,
        shift: Int64Array,
    ) -> list[int]:
        """Numbers of the runs that are returned, in order."""
        gain = worth(end - start, shift)
        order = np.lexsort((self.arena.slot[tail], shift, start, depth, -gain))
        # One run for each beginning, the first in order: other branches that stop earlier are not
        # maximal, and following a run from both of its parts finds it twice.
        beginning = (start * self.arena.slot.shape[0] + head)[order]
        order = order[np.sort(firsts(beginning))]
        if not self.query.covering:
            return list(map(int, order))
        # Most copies of a passage match equally far: the first in order serves.
        place = (start * (self.n + 1) + end)[order]
        order = order[np.sort(firsts(place))]
        return _outermost(order.tolist(), start[order].tolist(), end[order].tolist())

    def _proven(self, start: int, end: int, extent: int, cell: int) -> Found:
        """Lay a run's pieces out, and compare all of its tokens."""
        behind = int(self.ext.start[extent] + self.ext.length[extent]) - 1 - cell
        pieces = list(self.arena.upwards(extent, end - start + behind))
        pieces[0] = (extent, pieces[0][1], cell + 1)
        pieces.reverse()
        depth, at = 0, start
        for extent, low, high in pieces:
            depth = max(depth, int(self.ext.depth[extent]))
            if (self.arena.token[low:high] != self.tokens[at : at + high - low]).any():
                raise _Collision
            at += high - low
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
        count = np.zeros(q.shape[0], dtype=np.int64)
        depth = np.zeros(q.shape[0], dtype=np.int64)
        first = cell.copy()
        # Of the places that still match: number, prompt tokens left, cell after the next, extent.
        live, left, edge = np.arange(q.shape[0]), q + 1, cell + 1
        # The window, and less than another one: the next would be a hit, unless `limit` cut it off.
        sure = most or 2 * self.w
        width = sure
        while live.shape[0]:
            have = count[live]
            inside = edge - self.ext.start[extent]
            room = np.minimum(np.minimum(left, inside), np.where(have < sure, sure - have, width))
            got = self._equal(left - 1, edge - 1, -1, room)
            some = live[got > 0]
            first[some] = (edge - got)[got > 0]
            if self.query.max_depth:
                depth[some] = np.maximum(depth[some], self.ext.depth[extent[got > 0]])
            count[live] = have + got
            on = (got == room) & (left > got)
            if most:
                on &= have + got < most
            live, left, edge, extent = live[on], (left - got)[on], (edge - got)[on], extent[on]
            # Over the beginning of an extent into its parent.
            over = edge == self.ext.start[extent]
            if over.any():
                extent = np.where(over, self.ext.parent[extent], extent)
                end = self.ext.start[extent] + self.ext.length[extent]
                edge = np.where(over, end, edge)
                on = (extent != NONE) & self._serves(extent)
                live, left, edge, extent = live[on], left[on], edge[on], extent[on]
            done = count[live] >= sure
            if done.any():
                if done.all():
                    width *= 4
                behind = self.ext.position[extent] + edge - self.ext.start[extent]
                hope = known[live] + count[live] + np.minimum(left, behind)
                on = self._affordable(done, width, hope, left)
                live, left, edge, extent = live[on], left[on], edge[on], extent[on]
        return _Heads(count, first, depth)

    def _forward(
        self, q: Int64Array, cell: Int64Array, extent: Int64Array, known: Int64Array
    ) -> _Tails:
        """Compare the tokens behind each place, into every branch of the tree.

        ``known`` is the length of what comes before each place.

        prompt   ... q|. . . . .|...         q and cell are not compared again
        arena    ... cell|. . . .|...
        """
        none = np.zeros(q.shape[0], dtype=np.int64)
        live = _Tails(np.arange(q.shape[0]), none, cell, extent, none)
        finished: list[_Tails] = []
        sure = width = self.w
        while live.place.shape[0]:
            at = q[live.place] + live.count
            left = self.n - 1 - at
            inside = self.ext.start[live.extent] + self.ext.length[live.extent] - 1 - live.cell
            allowed = np.where(live.count < sure, sure - live.count, width)
            room = np.minimum(np.minimum(left, inside), allowed)
            got = self._equal(at + 1, live.cell + 1, 1, room)
            live = _Tails(live.place, live.count + got, live.cell + got, live.extent, live.depth)
            on = (got == room) & (left > got)
            # Behind the end of an extent its children go on.
            asking = (on & (got == inside)).nonzero()[0]
            origin, children = self._children(_picked(live, asking), q)
            on[asking] = False
            ends = ~on
            ends[asking[origin]] = False
            finished.append(_picked(live, ends))
            live = _joined([_picked(live, on), children])
            done = live.count >= sure
            if done.any():
                if done.all():
                    width *= 4
                hope = known[live.place] + self.n - q[live.place]
                on = self._affordable(done, width, hope, q[live.place])
                finished.append(_picked(live, ~on))
                live = _picked(live, on)
        return _joined(finished) if finished else live

    def _children(self, tails: _Tails, q: Int64Array) -> tuple[Int64Array, _Tails]:
        """The children of extents that are at their end which have the prompt's next token.

        Returns:
            which of ``tails`` each belongs to, and the child with that token.
        """
        origin = (self.ext.children[tails.extent] > 0).nonzero()[0]
        if origin.shape[0] == 0:
            return origin, _picked(tails, origin)
        token = self.tokens[(q[tails.place] + tails.count + 1)[origin]]
        which, cell = self.table.lookup(
            edge_prints(tails.cell[origin], token), _MOST_CHILDREN, self.arena.edges_alive
        )
        origin = origin[which]
        child = self.arena.extent_of[self.arena.slot[cell]].astype(np.int64)
        true = (self.ext.parent[child] == tails.extent[origin]) & self._serves(child)
        true &= self.arena.token[cell] == token[which]
        origin, cell, child = origin[true], cell[true], child[true]
        depth = np.maximum(tails.depth[origin], self.ext.depth[child])
        return origin, _Tails(tails.place[origin], tails.count[origin] + 1, cell, child, depth)

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

    def _affordable(self, on: BoolArray, width: int, hope: Int64Array, at: Int64Array) -> BoolArray:
        """Which places may go on: of those in ``on``, as many as a round of ``width`` can pay.

        Only where ``limit`` cut hits off do many places go on beyond what their windows promise:
        one token repeated makes a run of any two places. Half of those that go on are the ones of
        most hope, half are spread over the prompt, so that all of it is covered.
        """
        most = max(2, max(_ROUND_TOKENS, 4 * self.n) // width)
        allowed = np.ones(on.shape[0], dtype=np.bool_)
        candidates = on.nonzero()[0]
        if candidates.shape[0] > most:
            allowed[candidates] = False
            ranked = candidates[np.argsort(-hope[candidates], kind="stable")]
            allowed[ranked[: most // 2]] = True
            rest = ranked[most // 2 :]
            rest = rest[np.argsort(at[rest], kind="stable")]
            allowed[rest[np.linspace(0, rest.shape[0] - 1, most - most // 2).astype(np.int64)]] = (
                True
            )
        return allowed


def _columns(tails: _Tails) -> tuple[Int64Array, ...]:
    return tails.place, tails.count, tails.cell, tails.extent, tails.depth


def _joined(tails: list[_Tails]) -> _Tails:
    return _Tails(*map(np.concatenate, zip(*map(_columns, tails), strict=True)))


def _picked(tails: _Tails, which: BoolArray | IntArray) -> _Tails:
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


def _outermost(numbers: list[int], starts: list[int], ends: list[int]) -> list[int]:
    """Those of ``numbers`` whose stretch does not lie inside that of one before it."""
    # Stretches so far of which none lies inside another: both lists ascend.
    low: list[int] = []
    high: list[int] = []
    kept = []
    for number, start, end in zip(numbers, starts, ends, strict=True):
        at = bisect_right(low, start)
        if at and high[at - 1] >= end:
            continue
        kept.append(number)
        begin = at - 1 if at and low[at - 1] == start else at
        stop = bisect_right(high, end)
        low[begin : max(begin, stop)] = [start]
        high[begin : max(begin, stop)] = [end]
    return kept
