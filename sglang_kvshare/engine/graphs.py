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

from sglang_kvshare.engine.seams import SeamError

_NAME = "prefill_cuda_graph_runner"
_CAPTURED = "decode_cuda_graph_capture_bs"


def check_graphs(runner: Any) -> None:
    """
    Raises:
        SeamError: ``runner`` keeps its graphs elsewhere, so that none would be bypassed.
    """
    for name in (_NAME, _CAPTURED):
        if not hasattr(runner, name):
            raise SeamError(f"ModelRunner has no {name} (needed for: captured graphs)")


@contextmanager
def without_prefill_graphs(runner: Any) -> Iterator[None]:
    """Run extends of ``runner`` (a ``ModelRunner``) eagerly inside this context."""
    graphs = getattr(runner, _NAME)
    setattr(runner, _NAME, None)
    try:
        yield
    finally:
        setattr(runner, _NAME, graphs)


def most_decode_rows(runner: Any) -> int:
    """Rows that a decode batch of ``runner`` may have in all and still be replayed, or run."""
    captured = getattr(runner, _CAPTURED)
    most = int(runner.max_running_requests)
    return min(most, max(captured)) if captured else most
