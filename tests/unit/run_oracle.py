"""Slow and clear: what the run index must answer, by dictionaries and loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def ints(values):
    return np.array(list(values), dtype=np.int64)


@dataclass
class Cached:
    """One token in its slot; ``before`` is the slot of the token before it, or -1."""

    token: int
    before: int
    namespace: bytes
    depth: int
    node: int
    position: int


class Oracle:
    """The same changes as :class:`RunIndex`, on a dictionary of slots."""

    def __init__(self):
        self.cached: dict[int, Cached] = {}

    def insert(self, node, namespace, tokens, slots, parent_slot, *, position=None, depth=0):
        if parent_slot != -1:
            position = self.cached[parent_slot].position + 1
        before = parent_slot
        for offset, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
            assert slot not in self.cached
            at = (position or 0) + offset
            self.cached[slot] = Cached(token, before, namespace, depth, node, at)
            before = slot

    def reassign(self, node, slots):
        for slot in slots:
            if slot in self.cached:
                self.cached[slot].node = node

    def remove(self, slots):
        for slot in slots:
            self.cached.pop(slot, None)
        for one in self.cached.values():
            if one.before not in self.cached:
                one.before = -1

    def runs(self, tokens, namespace, shortest, max_depth=0, position=0):
        """Every maximal run as (start, end, depth, slots), in the order that is promised.

        A run begins at a prompt position and a slot whose predecessors differ, and takes the
        longest way through the tree; of ways of one length that of the lower depth, then of the
        lower last slot.
        """
        serves = {
            slot: one
            for slot, one in self.cached.items()
            if one.namespace == namespace and one.depth <= max_depth
        }
        after: dict[int, list[int]] = {}
        for slot, one in serves.items():
            after.setdefault(one.before, []).append(slot)
        found = []
        for start, token in enumerate(tokens):
            for slot, one in serves.items():
                if one.token != token:
                    continue
                before = serves.get(one.before)
                if start and before is not None and before.token == tokens[start - 1]:
                    continue
                best = min(self._ways(serves, after, tokens, start, [slot]), key=self._rank)
                if len(best) >= shortest:
                    depth = max(serves[s].depth for s in best)
                    found.append((start, start + len(best), depth, tuple(best)))

        def key(run):
            start, end, depth, slots = run
            shift = abs(self.cached[slots[0]].position - (start + position))
            return start - end + min(shift // 32, 8), depth, start, shift, slots[-1]

        return sorted(found, key=key)

    def _rank(self, way):
        return -len(way), max(self.cached[slot].depth for slot in way), way[-1]

    def _ways(self, serves, after, tokens, start, way):
        """All ends of a run that begins with ``way``."""
        stack = [way]
        while stack:
            way = stack.pop()
            at = start + len(way)
            onward = [
                slot
                for slot in after.get(way[-1], [])
                if at < len(tokens) and serves[slot].token == tokens[at]
            ]
            if not onward:
                yield way
            stack += [[*way, slot] for slot in onward]


def covering(runs):
    """Without the runs that lie inside one that comes before them."""
    kept = []
    for run in runs:
        if not any(other[0] <= run[0] and run[1] <= other[1] for other in kept):
            kept.append(run)
    return kept


def answered(index, runs):
    """The index's runs in the oracle's form."""
    return [(run.start, run.end, run.depth, tuple(index.run_slots(run).tolist())) for run in runs]
