"""Exact token runs at any offset: an index over the contents of a radix tree.

Tokens lie in an :class:`~sglang_kvshare.matching.arena.Arena`. What makes them searchable is one
fingerprint for every ``w`` of them, of the window that ends at a position ``w - 1``, ``2w - 1``,
``3w - 1``, ... of its sequence:

    position   0       w      2w      3w      4w
    donor      |-------|-------|-------|-------|--       windows in the table
    run            |================|                    at least 2w - 1 tokens long,
                       |-------|                         and so it holds a whole window

A prompt's windows are looked up at every offset, so that each run of ``min_run_tokens >= 2w - 1``
is found. :mod:`~sglang_kvshare.matching.run_search` makes runs of the hits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sglang_kvshare.matching import run_search
from sglang_kvshare.matching.arena import EDGE, NONE, Arena
from sglang_kvshare.matching.stretches import firsts
from sglang_kvshare.matching.surroundings import Stretch, around
from sglang_kvshare.matching.window_hash import (
    UInt32Array,
    UInt64Array,
    fingerprints,
    seed_of,
    window_sums,
)
from sglang_kvshare.matching.window_table import WindowTable
from sglang_kvshare.plan import BoolArray, Int32Array, Int64Array

_LARGEST = 2**31 - 1
#: Dead entries that the table may always hold, and the share of the living that they may reach.
_DEAD_ENTRIES, _DEAD_SHARE = 1024, 0.25


@dataclass(frozen=True)
class Run:
    """A maximal run: prompt ``[start, end)`` equals the donor tokens that end in ``last_slot``.

    Attributes:
        depth: the largest provenance depth in it.
        source: position of the first donor token in the donor's own sequence.
        cells: where the index keeps the donor tokens, as ``(first, after the last)`` pieces; good
            until the index changes.
    """

    start: int
    end: int
    last_slot: int
    depth: int = 0
    source: int = field(default=0, compare=False)
    cells: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)

    @property
    def length(self) -> int:
        return self.end - self.start

    def rank(self, position: int) -> tuple[int, int]:
        """What :meth:`RunIndex.find_runs` orders by before all else, ascending."""
        shift = abs(self.source - self.start - position)
        gain = run_search.worth(np.array(self.length), np.array(shift))
        return -int(gain), self.depth


@dataclass
class _Domain:
    """A trust domain that holds at least one token."""

    number: int
    tokens_by_depth: Counter[int] = field(default_factory=Counter)


class RunIndex:
    """The set of cached tokens of every namespace, searchable by content.

    Not thread-safe; one scheduler owns it. Nothing here changes on a lookup.

    Args:
        slots: size of the KV pool; slots are numbered ``0 .. slots - 1``.
        min_run_tokens: the shortest run that is found, in tokens.

    Raises:
        ValueError: a pool that 32-bit numbers do not reach.
    """

    def __init__(self, slots: int, min_run_tokens: int) -> None:
        if not 0 < slots <= _LARGEST:
            raise ValueError(f"a KV pool of {slots} slots; the run index takes 1 to {_LARGEST}")
        if min_run_tokens < 1:
            raise ValueError(f"min_run_tokens={min_run_tokens}: the least is 1")
        self.slots = slots
        self.min_run_tokens = min_run_tokens
        self.window = (min_run_tokens + 1) // 2
        self._arena = Arena(slots, self.window)
        self._table = WindowTable(self._arena.alive, slots // self.window)
        self._domains: dict[bytes, _Domain] = {}
        self._names: dict[int, bytes] = {}
        self._next_domain = 0

    @property
    def live_tokens(self) -> int:
        """Cached tokens that the index knows."""
        return self._arena.live_tokens

    @property
    def namespaces(self) -> int:
        return len(self._domains)

    @property
    def fragments(self) -> int:
        """Stretches in which the tokens lie: one a node or more."""
        return len(self._arena.extents)

    @property
    def entries(self) -> int:
        """Table entries, dead ones included; at most :meth:`most_entries`."""
        return len(self._table)

    @property
    def most_entries(self) -> int:
        """The bound on :attr:`entries`."""
        return int((1 + _DEAD_SHARE) * self._most_living) + _DEAD_ENTRIES

    @property
    def _most_living(self) -> int:
        return self.live_tokens // self.window + 2 * self.fragments

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._arena.nbytes + self._table.nbytes

    def holds(self, slot: int) -> bool:
        return bool(self._arena.extent_of[slot] != NONE)

    def node_of(self, slot: int) -> int:
        """Number of the tree node that owns ``slot``, or -1."""
        return int(self.nodes_of(np.array([slot]))[0])

    def nodes_of(self, slots: Int64Array) -> Int64Array:
        """int64 ``[m]``: the numbers of the nodes that own ``slots``, -1 where none does."""
        extents = self._arena.extent_of[slots]
        return np.where(extents == NONE, NONE, self._arena.extents.node[extents])

    def tokens_by_node(self) -> dict[int, int]:
        """Number of each node that owns indexed tokens -> how many; walks over the whole index."""
        ext = self._arena.extents
        used = np.flatnonzero(ext.length[: ext.rows])
        nodes, where = np.unique(ext.node[used], return_inverse=True)
        tokens = np.bincount(where, weights=ext.length[used], minlength=nodes.shape[0])
        return dict(zip(nodes.tolist(), tokens.astype(np.int64).tolist(), strict=True))

    def position_of(self, slot: int) -> int:
        """Position of a cached token in its own sequence.

        Raises:
            KeyError: the index does not hold ``slot``.
        """
        extent = int(self._arena.extent_of[slot])
        if extent == NONE:
            raise KeyError(slot)
        ext = self._arena.extents
        start = int(ext.start[extent])
        inside = self._arena.slot[start : start + int(ext.length[extent])] == slot
        return int(ext.position[extent]) + int(inside.argmax())

    # --- upkeep ------------------------------------------------------------------------------

    def insert(
        self,
        node: int,
        namespace: bytes,
        tokens: Int64Array,
        slots: Int64Array,
        parent_slot: int,
        *,
        position: int | None = None,
        depth: int = 0,
    ) -> None:
        """Add tokens of a tree node.

        Args:
            node: number of the node, 0 or above.
            namespace: trust domain; equal bytes mean the same one.
            tokens, slots: int ``[m]``; ``slots`` must be free in the index.
            parent_slot: slot of the token before the first one on the path, or -1 where there is
                none in the index.
            position: of the first token in its sequence; asked for in the middle of a sequence
                whose tokens before it are not in the index, otherwise it follows from the parent.
            depth: provenance of the values in ``slots``, 0 = exact.

        Raises:
            ValueError: a slot is in the index already (two owners of one slot), the parent is
                not or is another namespace's, or a token id does not fit.
        """
        if slots.shape[0] == 0:
            return
        arena, ext = self._arena, self._arena.extents
        ids = _token_ids(tokens)
        if ids.shape != slots.shape:
            raise ValueError(f"{ids.shape[0]} tokens for {slots.shape[0]} slots")
        if (arena.extent_of[slots] != NONE).any():
            raise ValueError("a KV slot would have two owners in the run index")
        parent = self._ending_in(parent_slot) if parent_slot != NONE else NONE
        if parent != NONE:
            follows = int(ext.position[parent] + ext.length[parent])
            if position is not None and position != follows:
                raise ValueError(f"position {position} after a parent that ends at {follows}")
            if self._names[int(ext.domain[parent])] != namespace:
                raise ValueError("a child of another namespace than its parent")
            position = follows
        elif position is None:
            if parent_slot != NONE:
                raise ValueError(
                    f"slot {parent_slot} is not in the run index: use -1 and a position"
                )
            position = 0
        # What the first windows see of the tokens before.
        above = list(arena.upwards(parent, self.window - 1))[::-1]
        domain = self._count(namespace, depth, ids.shape[0])
        cells, extents = arena.append(
            ids,
            slots,
            parent=parent,
            position=position,
            node=node,
            domain=domain.number,
            depth=depth,
        )

        # The table's new entries: windows, then the edges that lead to the new extents.
        context = [arena.token[low:high] for _, low, high in above]
        reach = sum(map(len, context))
        window = self.window
        # Offset of the first new token that ends a window, in step with the sequence.
        first = (window - 1 - position) % window
        if first + reach < window - 1:
            first += window
        begins = first + reach - (window - 1)
        sums = window_sums(np.concatenate([*context, ids]), window)[begins::window]
        prints = [fingerprints(sums, seed_of(namespace, depth))]
        # At most one window has tokens of both sides of the seam; the deepest of them counts.
        deepest = max((int(ext.depth[e]) for e in _from_offset(above, begins)), default=0)
        if deepest > depth and sums.shape[0]:
            prints[0][0] = fingerprints(sums[:1], seed_of(namespace, deepest))[0]
        ending = [cells[first::window]]
        stamp = ext.stamp[extents[0]]
        stamps = [np.full(sums.shape[0], stamp, dtype=np.int32)]
        linked = extents if parent != NONE else extents[1:]
        if linked.shape[0]:
            prints.append(self._edge_prints(linked))
            ending.append(ext.start[linked].astype(np.int64))
            stamps.append(np.full(linked.shape[0], stamp ^ EDGE, dtype=np.int32))
        self._table.add(
            np.concatenate(prints),
            np.concatenate(ending).astype(np.int32),
            np.concatenate(stamps),
        )

    def reassign(self, node: int, slots: Int64Array) -> None:
        """The tokens in ``slots`` belong to another node now: a node was split."""
        # First the extents, since splitting them may move the columns of the table.
        own = self._of_their_own(slots)
        self._arena.extents.node[own] = node

    def remove(self, slots: Int64Array) -> None:
        """Forget tokens; slots that the index does not hold are passed over.

        Descendants that stay are found as before, in runs that begin with their own tokens.
        """
        gone = self._of_their_own(slots)
        if gone.shape[0] == 0:
            return
        ext = self._arena.extents
        for extent in gone.tolist():
            self._uncount(int(ext.domain[extent]), int(ext.depth[extent]), int(ext.length[extent]))
        before = self.live_tokens
        self._arena.forget(gone)
        if self.live_tokens:
            died = (before - self.live_tokens) // self.window + 2 * gone.shape[0]
            # Begin half way, so that a sweep is over before the bound is reached.
            self._table.sweep(died, (self._most_living + self.most_entries) // 2)
            self._table.compact(self.most_entries)
        else:
            self._table.clear()
            ext.clear()

    def discard(self, slots: Int64Array) -> None:
        """Forget tokens that are no donors any more, although the tree still owns their slots."""
        self.remove(slots)

    def clear(self) -> None:
        """Forget everything."""
        self._arena.clear()
        self._table.clear()
        self._domains.clear()
        self._names.clear()

    # --- lookup ------------------------------------------------------------------------------

    def find_runs(
        self,
        tokens: Int64Array,
        namespace: bytes,
        limit: int,
        *,
        max_depth: int = 0,
        position: int = 0,
        covering: bool = False,
    ) -> list[Run]:
        """Maximal runs of at least ``min_run_tokens`` that ``tokens`` shares with the index.

        A run begins where the tokens before differ (or there are none), and goes on for as long
        as any branch of the tree agrees; of several branches the longest counts. When no window of
        the prompt is indexed at more than ``limit`` places of one depth, and no token has more
        than 64 equal successors, these are all maximal runs. Otherwise they are those that
        hold one of the newest ``limit`` places of a window; a run may then be cut short where
        following it would cost more than a small multiple of the prompt.

        Args:
            tokens: int ``[n]``.
            namespace: only tokens of this namespace match.
            limit: cached places looked at for a window, the newest first.
            max_depth: only tokens of this depth or less match.
            position: of the first of ``tokens`` in its prompt.
            covering: leave out runs that lie inside one that comes before them: a plan that takes
                the runs in order has no use for them.

        Returns:
            Longest first, where a run counts as one token shorter for every 32 positions between
            where its donor stood and where it stands now, but at most as 8 shorter; then lower
            depth, start, distance, slot, so that the order is the same everywhere.
        """
        domain = self._domains.get(namespace)
        if domain is None or tokens.shape[0] < self.min_run_tokens:
            return []
        query = run_search.Query(
            tokens=_token_ids(tokens),
            domain=domain.number,
            seeds=tuple(
                seed_of(namespace, depth)
                for depth in sorted(domain.tokens_by_depth)
                if depth <= max_depth
            ),
            limit=limit,
            max_depth=max_depth,
            min_run_tokens=self.min_run_tokens,
            covering=covering,
            position=position,
        )
        found = run_search.search(self._arena, self._table, query)
        arena, ext = self._arena, self._arena.extents
        runs = []
        for start, end, depth, pieces in found:
            extent, low, _ = pieces[0]
            source = int(ext.position[extent]) + low - int(ext.start[extent])
            last_slot = int(arena.slot[pieces[-1][2] - 1])
            cells = tuple((low, high) for _, low, high in pieces)
            runs.append(Run(start, end, last_slot, depth, source, cells))
        return runs

    def holds_windows(self, sums: UInt64Array, namespace: bytes, max_depth: int) -> BoolArray:
        """Which windows, by their ``window_sums``, are looked up with success in ``namespace``.

        By fingerprints alone: about one in four billion is mistaken for another.

        Args:
            sums: uint64 ``[k]``.

        Returns:
            bool ``[k]``.
        """
        held = np.zeros(sums.shape[0], dtype=np.bool_)
        domain = self._domains.get(namespace)
        for depth in sorted(domain.tokens_by_depth) if domain is not None else ():
            if depth <= max_depth:
                prints = fingerprints(sums, seed_of(namespace, depth))
                order = np.argsort(prints)
                found, _ = self._table.lookup(prints[order], 1, self._arena.windows_alive)
                held[order[found]] = True
        return held

    def run_slots(self, run: Run, start: int = 0, end: int | None = None) -> Int64Array:
        """int64: the donor slots of tokens ``[start, end)`` of a run, in order."""
        parts: list[Int32Array] = [self._arena.slot[:0]]
        offset = 0
        end = run.length if end is None else end
        for low, high in run.cells:
            inside = slice(low + max(0, start - offset), min(high, low + end - offset))
            if inside.start < inside.stop:
                parts.append(self._arena.slot[inside])
            offset += high - low
        slots: Int64Array = np.concatenate(parts).astype(np.int64)
        return slots

    def around(self, slot: int, before: int, after: int) -> Stretch:
        """See :func:`sglang_kvshare.matching.surroundings.around`."""
        return around(self._arena, slot, before, after)

    def follows(self, before: int, slot: int, between: int) -> bool:
        """Whether ``slot`` comes after ``before`` on a path, with ``between`` tokens in between.

        Time grows with ``between``.

        Raises:
            KeyError: the index does not hold ``slot``.
        """
        above = self.around(slot, between + 1, 0).slots
        return above.shape[0] == between + 2 and int(above[0]) == before

    def same_stretch(self, some: Int64Array, others: Int64Array) -> BoolArray:
        """bool ``[m]``: which pairs of held slots are known to be on one path without a search.

        Others may be all the same; :meth:`follows` tells.
        """
        extents = self._arena.extent_of
        told: BoolArray = extents[some] == extents[others]
        return told

    # --- details -----------------------------------------------------------------------------

    def _ending_in(self, slot: int) -> int:
        """The extent that ends in ``slot``, split off if need be; -1 if the index lacks it."""
        arena, ext = self._arena, self._arena.extents
        extent = int(arena.extent_of[slot])
        if extent == NONE:
            return NONE
        start, length = int(ext.start[extent]), int(ext.length[extent])
        if arena.slot[start + length - 1] == slot:
            return extent
        return self._split(extent, int((arena.slot[start : start + length] == slot).argmax()) + 1)

    def _of_their_own(self, slots: Int64Array) -> Int64Array:
        """The extents that hold ``slots`` and nothing else; extents are split to that end."""
        arena, ext = self._arena, self._arena.extents
        own: list[int] = []
        done = 0
        # Nearly always the slots are those of a node, or of its beginning, in order.
        while done < slots.shape[0]:
            extent = int(arena.extent_of[slots[done]])
            start = int(ext.start[extent])
            count = min(int(ext.length[extent]), slots.shape[0] - done)
            if (
                extent == NONE
                or (arena.slot[start : start + count] != slots[done : done + count]).any()
            ):
                break
            own.append(extent if count == ext.length[extent] else self._split(extent, count))
            done += count
        if done == slots.shape[0]:
            return np.array(list(dict.fromkeys(own)), dtype=np.int64)
        slots = slots[firsts(slots)]
        held = arena.extent_of[slots]
        held = held[held != NONE]
        extents = held[firsts(held)]
        counts = np.bincount(held, minlength=ext.rows)[extents]
        whole = counts == ext.length[extents]
        own = extents[whole].tolist()
        for extent in extents[~whole].tolist():
            start, length = int(ext.start[extent]), int(ext.length[extent])
            inside = np.isin(arena.slot[start : start + length], slots)
            cuts = np.flatnonzero(inside[1:] != inside[:-1]) + 1
            before = 0
            for cut in cuts.tolist():
                upper = self._split(extent, cut - before)
                if inside[before]:
                    own.append(upper)
                before = cut
            if inside[before]:
                own.append(extent)
        return np.array(own, dtype=np.int64)

    def _split(self, extent: int, tokens: int) -> int:
        upper = self._arena.split(extent, tokens)
        lower = np.array([extent])
        ext = self._arena.extents
        self._table.add(self._edge_prints(lower), ext.start[lower].copy(), ext.stamp[lower] ^ EDGE)
        return upper

    def _edge_prints(self, extents: Int64Array) -> UInt32Array:
        ext = self._arena.extents
        parents = ext.parent[extents]
        last = ext.start[parents] + ext.length[parents] - 1
        return run_search.edge_prints(last, self._arena.token[ext.start[extents]])

    def _count(self, namespace: bytes, depth: int, tokens: int) -> _Domain:
        domain = self._domains.get(namespace)
        if domain is None:
            domain = self._domains[namespace] = _Domain(self._next_domain)
            self._names[domain.number] = namespace
            self._next_domain = (self._next_domain + 1) % _LARGEST
        domain.tokens_by_depth[depth] += tokens
        return domain

    def _uncount(self, number: int, depth: int, tokens: int) -> None:
        name = self._names[number]
        tokens_by_depth = self._domains[name].tokens_by_depth
        tokens_by_depth[depth] -= tokens
        if not tokens_by_depth[depth]:
            del tokens_by_depth[depth]
        if not tokens_by_depth:
            del self._domains[name], self._names[number]


def _from_offset(pieces: list[tuple[int, int, int]], offset: int) -> list[int]:
    """The extents of a context's tokens from ``offset`` on."""
    found, at = [], 0
    for extent, low, high in pieces:
        at += high - low
        if at > offset:
            found.append(extent)
    return found


def _token_ids(tokens: Int64Array) -> Int32Array:
    """As int32.

    Raises:
        ValueError: an id that is negative or above 2**31 - 1; cut to 32 bits it would be another.
    """
    if tokens.shape[0] and not (tokens.min() >= 0 and tokens.max() <= _LARGEST):
        raise ValueError(
            f"token ids from {tokens.min()} to {tokens.max()}: allowed are 0 to {_LARGEST}"
        )
    return tokens.astype(np.int32)
