"""From runs to a reuse plan: which run serves which position."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.matching.run_index import Run, RunIndex
from sglang_kvshare.plan import BoolArray, Int64Array, ReusePlan, Span

#: Runs considered for one prompt, the longest first. Repetitive text yields one run for every
#: pair of repetitions; the longest few cover it.
MAX_RUNS = 4096


def plan_reuse(
    index: RunIndex,
    tokens: Int64Array,
    prefix_tokens: int,
    namespace: bytes,
    limit: int,
    *,
    max_depth: int = 0,
) -> ReusePlan:
    """Match a prompt beyond its exact prefix. Changes nothing, and answers the same every time.

    Args:
        tokens: int64 ``[n]``, the whole prompt.
        prefix_tokens: ``P``, the exact prefix that the radix tree serves.
        namespace: trust domain of the request.
        limit: see :meth:`RunIndex.find_runs`.
    """
    # A run may reach into the prefix, so that windows begin w - 1 tokens before its end; the
    # last token of the prompt is always computed and so never matched.
    origin = max(0, prefix_tokens - index.window + 1)
    body = tokens[origin : tokens.shape[0] - 1]
    runs = index.find_runs(body, namespace, limit, max_depth=max_depth)
    free = np.ones(body.shape[0], dtype=np.bool_)
    free[: prefix_tokens - origin] = False
    spans: list[Span] = []
    for run in runs[:MAX_RUNS]:
        pieces = _free_pieces(free, run, index.window)
        if not pieces:
            continue
        slots = index.run_slots(run)
        source = index.position_of(run.last_slot) - run.length + 1
        for start, end in pieces:
            free[start:end] = False
            offset = start - run.start
            spans.append(
                Span(
                    start + origin,
                    source + offset,
                    slots[offset : offset + end - start],
                    depth=int(index._depth[slots].max()),
                )
            )
    spans.sort(key=lambda span: span.start)
    return ReusePlan(int(tokens.shape[0]), prefix_tokens, tuple(spans))


def _free_pieces(free: BoolArray, run: Run, shortest: int) -> list[tuple[int, int]]:
    """The stretches of ``run`` that no longer run has taken, none below ``shortest`` tokens."""
    window = free[run.start : run.end]
    if window.all():
        return [(run.start, run.end)] if run.length >= shortest else []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], window, [False]])))
    starts, ends = edges[::2] + run.start, edges[1::2] + run.start
    return [
        (int(start), int(end))
        for start, end in zip(starts, ends, strict=True)
        if end - start >= shortest
    ]
