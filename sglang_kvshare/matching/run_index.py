"""Exact token runs at any offset: an index over the contents of a radix tree.

Every cached token occupies one KV slot that one tree node owns, so that the index is a set of
arrays over slots, bounded by the pool's size:

    tree     root -- [a b c d] -- [e f]            slots   7 3 4 9   2 5
                              \\-- [x y z]                  .         8 6 1
    previous(2) = 9   previous(8) = 9   previous(7) = none

The window that *ends* in a token is unique (a token has one path to the root), and so each slot
contributes one entry: the hash of the last ``w`` tokens of its path. A prompt's windows are looked
up all at once; hits that follow each other on a donor's path are chained into maximal runs. All
windows of a run are in the index, so that a chain is the greedy extension both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_kvshare.matching.window_hash import UInt64Array, mix, window_hashes
from sglang_kvshare.matching.window_table import WindowTable
from sglang_kvshare.plan import Int64Array

_NONE = -1


@dataclass(frozen=True)
class Run:
    """A maximal run: prompt ``[start, end)`` equals the donor tokens that end in ``last_slot``.

    ``chain`` holds the donor slots from the end of the run's first window on, where the run is
    the only one with that beginning; ``None`` sends :meth:`RunIndex.run_slots` along the path.
    """

    start: int
    end: int
    last_slot: int
    chain: Int64Array | None = field(default=None, compare=False, repr=False)

    @property
    def length(self) -> int:
        return self.end - self.start


class RunIndex:
    """The set of cached tokens of every namespace, searchable by content.

    Not thread-safe; one scheduler owns it. Nothing here changes on a lookup.

    Args:
        slots: size of the KV pool; slots are numbered ``0 .. slots - 1``.
        window: ``w`` = the shortest run that is found, in tokens.
    """

    def __init__(self, slots: int, window: int) -> None:
        self.window = window
        self._token = np.zeros(slots, dtype=np.int64)
        self._position = np.zeros(slots, dtype=np.int64)
        self._previous = np.full(slots, _NONE, dtype=np.int64)
        self._namespace = np.full(slots, _NONE, dtype=np.int64)
        self._node = np.full(slots, _NONE, dtype=np.int64)
        self._depth = np.zeros(slots, dtype=np.int64)
        self._hash: UInt64Array = np.zeros(slots, dtype=np.uint64)
        self._table = WindowTable(self._hash)
        self._live = 0
        # Namespaces that hold at least one token: name -> number, and number -> [name, tokens].
        self._numbers: dict[bytes, int] = {}
        self._usage: dict[int, tuple[bytes, int]] = {}
        self._next_number = 0

    @property
    def live_tokens(self) -> int:
        """Cached tokens that the index knows."""
        return self._live

    @property
    def namespaces(self) -> int:
        return len(self._numbers)

    @property
    def entries(self) -> int:
        """Table entries, dead ones included; at most twice the live ones and a constant."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, names of namespaces not counted."""
        arrays = (value for value in vars(self).values() if isinstance(value, np.ndarray))
        return sum(array.nbytes for array in arrays) + self._table.nbytes

    def holds(self, slot: int) -> bool:
        return bool(self._namespace[slot] != _NONE)

    def node_of(self, slot: int) -> int:
        """Number of the tree node that owns ``slot``, or -1."""
        return int(self._node[slot])

    def nodes_of(self, slots: Int64Array) -> Int64Array:
        """int64 ``[m]``: the numbers of the nodes that own ``slots``, -1 where none does."""
        return self._node[slots]

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
        """Add a tree node's tokens.

        Args:
            node: number of the node, 0 or above.
            namespace: trust domain; equal bytes mean the same one.
            tokens, slots: int64 ``[m]``; ``slots`` must be free in the index.
            parent_slot: slot of the token before the first one on the path, or -1 at the root.

        Raises:
            ValueError: a slot is in the index already: two owners of one slot.
        """
        if slots.shape[0] == 0:
            return
        if (self._namespace[slots] != _NONE).any():
            raise ValueError("a KV slot would have two owners in the run index")
        number = self._number_for(namespace, slots.shape[0])
        self._token[slots] = tokens
        self._previous[slots[1:]] = slots[:-1]
        self._previous[slots[0]] = parent_slot
        first = int(self._position[parent_slot]) + 1 if parent_slot != _NONE else position or 0
        self._depth[slots] = depth
        self._position[slots] = np.arange(first, first + slots.shape[0])
        self._namespace[slots] = number
        self._node[slots] = node
        self._live += slots.shape[0]

        context = self._context(parent_slot)
        hashes = window_hashes(np.concatenate([context, tokens]), self.window, _seed(namespace))
        # The first tokens of a path end no full window.
        ending = slots[slots.shape[0] - hashes.shape[0] :]
        self._hash[ending] = hashes
        self._table.add(hashes, ending)

    def reassign(self, node: int, slots: Int64Array) -> None:
        """The tokens in ``slots`` belong to another node now: a node was split."""
        self._node[slots[self._namespace[slots] != _NONE]] = node

    def discard(self, slots: Int64Array) -> None:
        """Forget tokens although the tree still owns them."""
        self.remove(slots)

    def remove(self, slots: Int64Array) -> None:
        """Forget tokens that leave the tree. Their descendants must have left before."""
        slots = slots[self._namespace[slots] != _NONE]
        if slots.shape[0] == 0:
            return
        number = int(self._namespace[slots[0]])
        self._namespace[slots] = _NONE
        self._node[slots] = _NONE
        self._previous[slots] = _NONE
        self._hash[slots] = 0
        self._live -= slots.shape[0]
        name, tokens = self._usage[number]
        if tokens == slots.shape[0]:
            del self._usage[number], self._numbers[name]
        else:
            self._usage[number] = (name, tokens - slots.shape[0])
        self._table.compact(self._live)

    def clear(self) -> None:
        """Forget everything."""
        self._namespace.fill(_NONE)
        self._node.fill(_NONE)
        self._previous.fill(_NONE)
        self._hash.fill(0)
        self._table.clear()
        self._live = 0
        self._numbers.clear()
        self._usage.clear()

    def find_runs(
        self, tokens: Int64Array, namespace: bytes, limit: int, *, max_depth: int = 0
    ) -> list[Run]:
        """All maximal runs of at least ``window`` tokens that ``tokens`` shares with the index.

        Args:
            tokens: int64 ``[n]``.
            namespace: only tokens of this namespace match.
            limit: cached places looked at for a window, in every level of the table.

        Returns:
            Longest first; ties by start, then by slot, so that the order is the same everywhere.
        """
        number = self._numbers.get(namespace)
        if number is None or tokens.shape[0] < self.window:
            return []
        hashes = window_hashes(tokens, self.window, _seed(namespace))
        query, slot = self._table.lookup(hashes, limit)
        # From here on a pair (end, slot) says: the prompt's window that ends at `end` equals the
        # `w` tokens of a donor's path that end in `slot`.
        end, slot = self._verified(tokens, query + self.window - 1, slot, number, max_depth)
        if end.shape[0] == 0:
            return []
        return self._chained(end, slot)

    def run_slots(self, run: Run) -> Int64Array:
        """int64 ``[length]``: the donor slots of a run, in order."""
        chain = np.empty(0, dtype=np.int64) if run.chain is None else run.chain
        last = run.last_slot if run.chain is None else int(self._previous[chain[0]])
        # All but the chain: w - 1 slots, or the whole run where runs branch, which they do only
        # when pages that differ begin with the same tokens.
        head: list[int] = []
        for _ in range(run.length - chain.shape[0]):
            head.append(last)
            last = int(self._previous[last])
        return np.concatenate([np.array(head[::-1], dtype=np.int64), chain])

    def position_of(self, slot: int) -> int:
        """Position of a cached token in its own sequence."""
        return int(self._position[slot])

    def _number_for(self, namespace: bytes, tokens: int) -> int:
        number = self._numbers.get(namespace)
        if number is None:
            number = self._next_number
            self._next_number += 1
            self._numbers[namespace] = number
            self._usage[number] = (namespace, 0)
        self._usage[number] = (namespace, self._usage[number][1] + tokens)
        return number

    def _context(self, slot: int) -> Int64Array:
        """The last ``w - 1`` tokens of the path that ends in ``slot``."""
        context: list[int] = []
        while slot != _NONE and len(context) < self.window - 1:
            context.append(int(self._token[slot]))
            slot = int(self._previous[slot])
        return np.array(context[::-1], dtype=np.int64)

    def _verified(
        self, tokens: Int64Array, end: Int64Array, slot: Int64Array, number: int, max_depth: int
    ) -> tuple[Int64Array, Int64Array]:
        """Keep the pairs whose ``w`` tokens are equal and in the namespace; a hash proves nothing.

        Returns them sorted by (end, slot) and without repetition.
        """
        equal = (self._namespace[slot] == number) & (self._depth[slot] <= max_depth)
        at = slot
        for back in range(self.window):
            equal &= (at != _NONE) & (self._token[at] == tokens[end - back])
            at = self._previous[at]
        key = np.unique(end[equal] * self._token.shape[0] + slot[equal])
        verified_end, verified_slot = np.divmod(key, self._token.shape[0])
        return verified_end, verified_slot

    def _chained(self, end: Int64Array, slot: Int64Array) -> list[Run]:
        """Join pairs (end - 1, previous(slot)) -> (end, slot) into maximal runs."""
        pairs = end.shape[0]
        key = end * self._token.shape[0] + slot
        before = (end - 1) * self._token.shape[0] + self._previous[slot]
        at = np.minimum(np.searchsorted(key, before), pairs - 1)
        linked = (key[at] == before) & (self._previous[slot] != _NONE)
        # Pointer doubling: after k rounds every pair knows how far its chain reaches 2**k back.
        jump = np.where(linked, at, np.arange(pairs))
        steps = linked.astype(np.int64)
        while (jump != jump[jump]).any():
            steps += steps[jump]
            jump = jump[jump]
        is_last = np.ones(pairs, dtype=np.bool_)
        is_last[at[linked]] = False
        last = np.flatnonzero(is_last)
        # Pairs with one beginning, in order: a chain, unless runs branch from it.
        by_root = np.lexsort((end, jump))
        low = np.searchsorted(jump[by_root], jump[last], side="left")
        high = np.searchsorted(jump[by_root], jump[last], side="right")
        chained = slot[by_root]
        stop, length = end[last] + 1, steps[last] + self.window
        order = np.lexsort((slot[last], stop - length, -length))
        runs: list[Run] = []
        for i in order.tolist():
            alone = high[i] - low[i] == length[i] - self.window + 1
            runs.append(
                Run(
                    start=int(stop[i] - length[i]),
                    end=int(stop[i]),
                    last_slot=int(slot[last[i]]),
                    chain=chained[low[i] : high[i]] if alone else None,
                )
            )
        return runs


def _seed(namespace: bytes) -> int:
    """A 64-bit number of the namespace. It only spreads hashes: equality is checked by number."""
    words = np.frombuffer(namespace + b"\0" * (-len(namespace) % 8), dtype=np.uint64)
    seed = np.uint64(len(namespace))
    with np.errstate(over="ignore"):
        for word in words:
            seed = mix(np.array([seed ^ word], dtype=np.uint64) + np.uint64(1))[0]
    return int(seed)
