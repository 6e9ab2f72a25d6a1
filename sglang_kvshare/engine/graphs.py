"""Captured graphs beside what KVShare does to a batch.

A captured prefill graph has a fixed number of rows in every layer, and no hooks: a batch whose rows
are narrowed runs eagerly, all others keep their graphs. Decode graphs are replayed with the rows
that refresh prompt tokens among the requests' own, padded as ever, while a captured size holds
them all.

Seams: ``ModelRunner._forward_raw`` asks ``prefill_cuda_graph_runner`` whether it can run a batch,
and takes ``eager_runner`` where there is none; ``decode_cuda_graph_capture_bs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAME = "prefill_cuda_graph_runner"


@contextmanager
def without_prefill_graphs(runner: Any) -> Iterator[None]:
    """Run extends of ``runner`` (a ``ModelRunner``) eagerly inside this context."""
    graphs = getattr(runner, _NAME, None)
    if graphs is None:
        yield
        return
    setattr(runner, _NAME, None)
    try:
        yield
    finally:
        setattr(runner, _NAME, graphs)


def most_decode_rows(runner: Any) -> int:
    """Rows that a decode batch of ``runner`` may have in all and still be replayed, or run."""
    captured = getattr(runner, "decode_cuda_graph_capture_bs", None)
    most = int(runner.max_running_requests)
    return min(most, max(captured)) if captured else most
