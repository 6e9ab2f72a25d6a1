"""From runs to a reuse plan: which run serves which position.

first, reuse edges    |-- edge --|
prompt body           |..........|...=== exact run ===....=== exact run ===.........|
then, of the same donors            ~                 ~~~~
then, of similar donors                                                       ~~~~~
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sglang_kvshare.matching.gaps import GapSettings, fill_gaps
from sglang_kvshare.matching.reuse_edges import ReuseEdges
from sglang_kvshare.matching.run_index import Run, RunIndex
from sglang_kvshare.plan import BoolArray, Int64Array, ReusePlan, Span

if TYPE_CHECKING:
    # FAISS is imported where similar donors are wanted, and nowhere else.
    from sglang_kvshare.matching.semantic_index import SemanticIndex

#: An edit of more tokens, in the prompt or in the donor, parts two spans.
MOST_EDITED_TOKENS = 8

#: Lookups of one prompt; each has a cost of its own, besides that of its tokens.
_MOST_LOOKUPS = 2


@dataclass(frozen=True)
class Behind:
    """The reuse edges that a prompt may ask.

    Attributes:
        anchor: number of the node where its exact prefix ends.
    """

    edges: ReuseEdges
    anchor: int


def plan_reuse(
    index: RunIndex,
    tokens: Int64Array,
    prefix_tokens: int,
    namespace: bytes,
    limit: int,
    max_depth: int = 0,
    scored_tokens: int = 1,
    similar: SemanticIndex | None = None,
    behind: Behind | None = None,
    gaps: GapSettings | None = None,
    shared: tuple[bytes, ...] = (),
) -> ReusePlan:
    """Match a prompt beyond its exact prefix. Changes nothing, and answers the same every time.

    Args:
        tokens: int64 ``[n]``, the whole prompt.
        prefix_tokens: ``P``, the exact prefix that the radix tree serves.
        namespace: trust domain of the request, whose prefix it takes.
        limit, max_depth: see :meth:`RunIndex.find_runs`.
        scored_tokens: see :class:`ReusePlan`; never matched.
        similar: asked for what runs leave free.
        behind: asked before the index is.
        gaps: how runs are carried on over edits; ``None``: not at all.
        shared: other namespaces to find donors in. Of equally good ones those of ``namespace``
            serve, then those of the first of these.
    """
    namespaces = (namespace, *shared)
    body = tokens[prefix_tokens : max(prefix_tokens, tokens.shape[0] - scored_tokens)]
    covered = np.zeros(body.shape[0], dtype=np.bool_)
    spans: list[Span] = []
    if behind is not None:
        spans = behind.edges.find(behind.anchor, namespace, body, prefix_tokens, max_depth)
    edge_tokens = sum(span.length for span in spans)
    for span in spans:
        covered[span.start - prefix_tokens : span.end - prefix_tokens] = True
    free = _Free(covered, index.min_run_tokens)
    for low, high in free.parts():
        stretch = body[low:high]
        position = prefix_tokens + low
        for run in _best_first(index, stretch, position, namespaces, limit, max_depth):
            for start, end in free.take(low + run.start, low + run.end):
                offset = start - low - run.start
                spans.append(
                    Span(
                        start=start + prefix_tokens,
                        source=run.source + offset,
                        slots=index.run_slots(run, offset, offset + end - start),
                        depth=run.depth,
                    )
                )
                covered[start:end] = True
            if not free:
                break
    matchable = tokens[: prefix_tokens + body.shape[0]]
    spans.sort(key=_start)
    if gaps is not None:
        short = fill_gaps(index, matchable, prefix_tokens, spans, gaps)
        for span in short:
            covered[span.start - prefix_tokens : span.end - prefix_tokens] = True
        spans = sorted([*spans, *short], key=_start)
    if similar is not None and not covered.all():
        alike = _similar_spans(similar, body, prefix_tokens, namespaces, covered, max_depth)
        spans = sorted([*spans, *alike], key=_start)
        if gaps is not None and alike:
            beside = {span.start for span in alike}
            short = fill_gaps(index, matchable, prefix_tokens, spans, gaps, beside)
            spans = sorted([*spans, *short], key=_start)
    told = _with_continuations(index, spans)
    return ReusePlan(int(tokens.shape[0]), prefix_tokens, told, scored_tokens, edge_tokens)


def _best_first(
    index: RunIndex,
    tokens: Int64Array,
    position: int,
    namespaces: tuple[bytes, ...],
    limit: int,
    max_depth: int,
) -> Iterator[Run]:
    """The runs of all namespaces in the order of :meth:`RunIndex.find_runs`."""
    return heapq.merge(
        *(
            index.find_runs(
                tokens, namespace, limit, max_depth=max_depth, position=position, covering=True
            )
            for namespace in namespaces
        ),
        # Stable: of equal ones the earlier namespace's comes first.
        key=lambda run: run.rank(position),
    )


def _similar_spans(
    similar: SemanticIndex,
    body: Int64Array,
    prefix_tokens: int,
    namespaces: tuple[bytes, ...],
    covered: BoolArray,
    max_depth: int,
) -> list[Span]:
    free = _Free(covered, similar.settings.min_run_tokens)
    spans: list[Span] = []
    found = (similar.find(body, each, covered, max_depth=max_depth) for each in namespaces)
    for run in heapq.merge(*found, key=lambda run: (-run.length, -run.similarity)):
        for start, end in free.take(run.start, run.end):
            spans.append(run.part(start - run.start, end - run.start, start + prefix_tokens))
    return spans


def _with_continuations(index: RunIndex, spans: list[Span]) -> tuple[Span, ...]:
    """Mark spans that follow the one before them in the donor as well, but for a short edit.

    prompt   == span ==|edit|== span ==
    donor    == span ==|..|== span ==
    """
    if len(spans) < 2:
        return tuple(spans)
    same_stretch = index.same_stretch(
        np.array([span.slots[-1] for span in spans[:-1]]),
        np.array([span.slots[0] for span in spans[1:]]),
    )
    told = spans[:1]
    for (before, span), same in zip(pairwise(spans), same_stretch.tolist(), strict=True):
        dropped = span.source - before.source - before.length
        if (
            0 <= dropped <= MOST_EDITED_TOKENS
            and span.start - before.end <= MOST_EDITED_TOKENS
            and (same or index.follows(int(before.slots[-1]), int(span.slots[0]), dropped))
        ):
            span = span.continuing()
        told.append(span)
    return tuple(told)


def _start(span: Span) -> int:
    return span.start


class _Free:
    """Stretches of the prompt that no run has taken yet; what is too short for a span is gone."""

    def __init__(self, covered: BoolArray, shortest: int) -> None:
        self._shortest = shortest
        edges = np.flatnonzero(np.diff(np.concatenate([[True], covered, [True]])))
        starts, ends = edges[::2], edges[1::2]
        long = ends - starts >= shortest
        self._starts: list[int] = starts[long].tolist()
        self._ends: list[int] = ends[long].tolist()

    def __bool__(self) -> bool:
        return bool(self._starts)

    def parts(self) -> list[tuple[int, int]]:
        """What is to be looked up: each stretch, or where they are many all that they span."""
        found = list(zip(self._starts, self._ends, strict=True))
        if len(found) > _MOST_LOOKUPS:
            return [(found[0][0], found[-1][1])]
        return found

    def take(self, start: int, end: int) -> list[tuple[int, int]]:
        """Take what is free of ``[start, end)``, in stretches that are long enough for a span."""
        low = bisect_right(self._ends, start)
        high = low
        taken: list[tuple[int, int]] = []
        rest: list[tuple[int, int]] = []
        while high < len(self._starts) and self._starts[high] < end:
            free_start, free_end = self._starts[high], self._ends[high]
            part = max(start, free_start), min(end, free_end)
            if part[1] - part[0] >= self._shortest:
                taken.append(part)
                rest += (free_start, part[0]), (part[1], free_end)
            else:
                rest.append((free_start, free_end))
            high += 1
        rest = [(a, b) for a, b in rest if b - a >= self._shortest]
        self._starts[low:high] = [a for a, _ in rest]
        self._ends[low:high] = [b for _, b in rest]
        return taken
