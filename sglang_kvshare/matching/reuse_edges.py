"""Reuse edges: what served behind a node of the tree, asked first when a prompt comes there again.

    prompt   |-- exact prefix --|......=== span ===......|
                       anchor --'         ^  start
                                          | edge
    donor               ......|-- source == length ==|......

An edge is kept for as long as both of its ends are: the node where the prefix ends, and all of the
donor's tokens. It proves nothing; its tokens are compared with each prompt's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.plan import Int64Array, Span

#: Behind how many nodes edges are kept; those that were used longest ago leave.
MOST_ANCHORS = 4096

#: A span that is taken from an edge hides longer runs that only the index knows, which it cuts by
#: less than the shortest run on either side. Edges of so many of these are not asked.
_LEAST_RUNS = 4

#: What marks an edge behind its anchor: start, slot of the donor's last token, length.
_Mark = tuple[int, int, int]
_Anchor = tuple[int, bytes]


@dataclass(frozen=True)
class ReuseEdge:
    """What served once, and may again.

    Attributes:
        anchor: number of the tree node where the exact prefix ended; 0 or above.
        namespace: of the prompt.
        start: position of the span in the prompt.
        source: position of the donor's first token in its own sequence.
        length: tokens.
        last_slot, last_token: KV slot of the donor's last token, and its id.
        kind, similarity: see :class:`sglang_kvshare.plan.Span`.
        hits: plans that it was part of.
        deviation: measured at the check layer when it served last, as a share of the values' size;
            ``None`` when it never was.
    """

    anchor: int
    namespace: bytes
    start: int
    source: int
    length: int
    last_slot: int
    last_token: int
    kind: str
    similarity: float
    hits: int = 1
    deviation: float | None = None

    @property
    def mark(self) -> _Mark:
        return self.start, self.last_slot, self.length


class ReuseEdges:
    """Owner of the edges of one tree.

    Args:
        runs: where the donors' tokens are; told of changes before this is.
        per_node: edges behind one node at most; those that were used longest ago leave. 0: none.
        most_checked: edges that are looked at when tokens leave the index from amid their paths.
    """

    def __init__(self, runs: RunIndex, per_node: int, most_checked: int = 256) -> None:
        self._runs = runs
        self._per_node = per_node
        self._most_checked = most_checked
        self._behind: OrderedDict[_Anchor, OrderedDict[_Mark, ReuseEdge]] = OrderedDict()
        #: The namespaces in which a node is an anchor.
        self._namespaces: dict[int, set[bytes]] = {}
        #: Edges whose donor ends in a slot, and which slots these are.
        self._ending: dict[int, set[tuple[_Anchor, _Mark]]] = {}
        self._ends = np.zeros(runs.slots, dtype=np.bool_)
        self._count = 0
        #: Some edges' donors may have lost tokens from their middle.
        self._torn = False

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ReuseEdge]:
        """Those whose donor is whole."""
        for edges in self._behind.values():
            for edge in edges.values():
                if not self._torn or self._stands(edge):
                    yield edge

    def latest(self, most: int) -> list[ReuseEdge]:
        """At most so many whose donor is whole, behind the nodes that were used last."""
        whole = (
            edge
            for edges in reversed(self._behind.values())
            for edge in reversed(edges.values())
            if not self._torn or self._stands(edge)
        )
        return list(islice(whole, most))

    # --- lookup ------------------------------------------------------------------------------

    def find(
        self,
        anchor: int,
        namespace: bytes,
        tokens: Int64Array,
        position: int,
        max_depth: int,
    ) -> list[Span]:
        """Spans of ``tokens`` that edges know. Changes nothing.

        A span goes on for as long as its own donor agrees, but for no more tokens than it has in
        its edge on either side.

        Args:
            anchor: where the exact prefix ends.
            tokens: int64 ``[n]``, what is to be covered.
            position: of the first of ``tokens``.
            max_depth: tokens of a larger depth do not serve.

        Returns:
            In order, without overlap.
        """
        told: list[Span] = []
        edge_of_taken = 0
        edges = self._behind.get((anchor, namespace))
        if edges is None:
            return []
        for edge in sorted(edges.values(), key=_in_order):
            start = edge.start - position
            if start < edge_of_taken or start + edge.length > tokens.shape[0]:
                continue
            if not self._is_asked(edge.length):
                continue
            # Most edges of a node end otherwise, which is found in a hundredth of the time.
            if tokens[start + edge.length - 1] != edge.last_token:
                continue
            span = self._taken(edge, tokens, start, start - edge_of_taken, max_depth)
            if span is None:
                continue
            told.append(replace(span, start=span.start + position))
            edge_of_taken = span.end
        return told

    def _taken(
        self, edge: ReuseEdge, tokens: Int64Array, start: int, room: int, max_depth: int
    ) -> Span | None:
        """``room``: free tokens before ``start``."""
        end = start + edge.length
        before = min(room, edge.length)
        after = min(tokens.shape[0] - end, edge.length)
        donor = self._runs.around(edge.last_slot, edge.length - 1 + before, after)
        # Where the edge's first token is in the donor's stretch.
        first = edge.source - donor.position
        if first < 0 or donor.depth > max_depth:
            return None
        equal = donor.tokens == tokens[start - first : start - first + donor.tokens.shape[0]]
        if not equal[first : first + edge.length].all():
            return None
        unequal = np.flatnonzero(~equal)
        low = int(unequal.searchsorted(first))
        begin = int(unequal[low - 1]) + 1 if low else 0
        stop = int(unequal[low]) if low < unequal.shape[0] else donor.tokens.shape[0]
        return Span(
            start=start - first + begin,
            source=donor.position + begin,
            slots=donor.slots[begin:stop].astype(np.int64),
            depth=donor.depth,
        )

    # --- upkeep ------------------------------------------------------------------------------

    def used(self, anchor: int, namespace: bytes, spans: Sequence[Span]) -> None:
        """A plan behind ``anchor`` was carried out; its longest spans are kept."""
        if not self._per_node or not spans:
            return
        key = (anchor, namespace)
        edges = self._behind.setdefault(key, OrderedDict())
        self._behind.move_to_end(key)
        self._namespaces.setdefault(anchor, set()).add(namespace)
        longest = sorted(spans, key=lambda span: (-span.length, span.start))
        asked = [span for span in longest if self._is_asked(span.length)]
        # Those that are only shown must not take the place of those that spare a lookup.
        shown = longest[len(asked) :][: self._per_node // 4]
        for span in (*asked[: self._per_node], *shown):
            last_slot = int(span.slots[-1])
            known = edges.pop((span.start, last_slot, span.length), None)
            edge = ReuseEdge(
                anchor,
                namespace,
                span.start,
                span.source,
                span.length,
                last_slot,
                self._token_of(last_slot) if known is None else known.last_token,
                span.kind,
                span.similarity,
            )
            if known is None:
                self._ending.setdefault(edge.last_slot, set()).add((key, edge.mark))
                self._ends[edge.last_slot] = True
                self._count += 1
            else:
                edge = replace(edge, hits=known.hits + 1, deviation=known.deviation)
            edges[edge.mark] = edge
        while len(edges) > self._per_node:
            self._drop(key, next(iter(edges)))
        while len(self._behind) > MOST_ANCHORS:
            self._drop_anchor(next(iter(self._behind)))

    def measured(
        self, anchor: int, namespace: bytes, spans: Iterable[Span], deviations: Mapping[int, float]
    ) -> None:
        """What the check layer found of a plan's spans, by their start."""
        edges = self._behind.get((anchor, namespace))
        if edges is None:
            return
        for span in spans:
            edge = edges.get((span.start, int(span.slots[-1]), span.length))
            if edge is not None and span.start in deviations:
                edges[edge.mark] = replace(edge, deviation=deviations[span.start])

    def node_gone(self, node: int) -> None:
        """A node has left the tree."""
        for namespace in list(self._namespaces.get(node, ())):
            self._drop_anchor((node, namespace))

    def slots_gone(self, slots: Int64Array) -> None:
        """Tokens have left the index: edges whose donor ends with one of them die."""
        for slot in slots[self._ends[slots]].tolist():
            for key, mark in list(self._ending[slot]):
                self._drop(key, mark)

    def recheck(self) -> None:
        """Tokens left the index from amid their paths, and :meth:`slots_gone` knows.

        Of many edges those are not dropped at once: they serve nobody, are not shown, and go when
        their donor's last token does or newer ones take their place.
        """
        self._torn = self._count > self._most_checked
        if self._torn:
            return
        every = [edge for edges in self._behind.values() for edge in edges.values()]
        for edge in every:
            if not self._stands(edge):
                self._drop((edge.anchor, edge.namespace), edge.mark)

    def clear(self) -> None:
        self._behind.clear()
        self._namespaces.clear()
        self._ending.clear()
        self._ends.fill(False)
        self._count = 0
        self._torn = False

    # --- details -----------------------------------------------------------------------------

    def _token_of(self, slot: int) -> int:
        return int(self._runs.around(slot, 0, 0).tokens[0])

    def _is_asked(self, length: int) -> bool:
        return length >= _LEAST_RUNS * self._runs.min_run_tokens

    def _stands(self, edge: ReuseEdge) -> bool:
        """All of the donor is in the index."""
        if not self._runs.holds(edge.last_slot):
            return False
        donor = self._runs.around(edge.last_slot, edge.length - 1, 0)
        return donor.slots.shape[0] == edge.length and donor.position == edge.source

    def _drop(self, key: _Anchor, mark: _Mark) -> None:
        edges = self._behind[key]
        edge = edges.pop(mark)
        self._count -= 1
        ending = self._ending[edge.last_slot]
        ending.discard((key, mark))
        if not ending:
            del self._ending[edge.last_slot]
            self._ends[edge.last_slot] = False
        if not edges:
            del self._behind[key]
            self._unname(key)

    def _drop_anchor(self, key: _Anchor) -> None:
        for mark in list(self._behind[key]):
            self._drop(key, mark)

    def _unname(self, key: _Anchor) -> None:
        node, namespace = key
        names = self._namespaces[node]
        names.discard(namespace)
        if not names:
            del self._namespaces[node]


def _in_order(edge: ReuseEdge) -> tuple[int, int, int, int]:
    """By place; of those that begin together the longest, then the most used, the smallest slot."""
    return edge.start, -edge.length, -edge.hits, edge.last_slot
