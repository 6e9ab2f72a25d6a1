"""From runs to a reuse plan: which run serves which position.

prompt body   |.....=== exact run ===....=== exact run ===.........|
then               similar donors:   ~~                  ~~~~  ~~~
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sglang_kvshare.matching.run_index import Run, RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex
from sglang_kvshare.plan import BoolArray, Int64Array, ReusePlan, Span


def plan_reuse(
    index: RunIndex,
    tokens: Int64Array,
    prefix_tokens: int,
    namespace: bytes,
    limit: int,
    max_depth: int = 0,
    scored_tokens: int = 1,
    similar: SemanticIndex | None = None,
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
        shared: other namespaces to find donors in. Of equally good ones those of ``namespace``
            serve, then those of the first of these.
    """
    namespaces = (namespace, *shared)
    body = tokens[prefix_tokens : max(prefix_tokens, tokens.shape[0] - scored_tokens)]
    covered = np.zeros(body.shape[0], dtype=np.bool_)
    free = _Free(covered, index.min_run_tokens)
    spans: list[Span] = []
    for run in _best_first(index, body, prefix_tokens, namespaces, limit, max_depth):
        for start, end in free.take(run.start, run.end):
            offset = start - run.start
            spans.append(
                Span(
                    start=start + prefix_tokens,
                    source=run.source + offset,
                    slots=index.run_slots(run, offset, end - run.start),
                    depth=run.depth,
                )
            )
            covered[start:end] = True
        if not free:
            break
    if similar is not None and not covered.all():
        spans += _similar_spans(similar, body, prefix_tokens, namespaces, covered, max_depth)
    spans.sort(key=lambda span: span.start)
    return ReusePlan(int(tokens.shape[0]), prefix_tokens, tuple(spans), scored_tokens)


def _best_first(
    index: RunIndex,
    body: Int64Array,
    prefix_tokens: int,
    namespaces: tuple[bytes, ...],
    limit: int,
    max_depth: int,
) -> Iterator[Run]:
    """The runs of all namespaces in the order of :meth:`RunIndex.find_runs`."""
    return heapq.merge(
        *(
            index.find_runs(
                body, namespace, limit, max_depth=max_depth, position=prefix_tokens, covering=True
            )
            for namespace in namespaces
        ),
        # Stable: of equal ones the earlier namespace's comes first.
        key=lambda run: run.rank(prefix_tokens),
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
            offset = start - run.start
            spans.append(
                replace(
                    run,
                    start=start + prefix_tokens,
                    source=run.source + offset,
                    slots=run.slots[offset : end - run.start],
                )
            )
    return spans


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
