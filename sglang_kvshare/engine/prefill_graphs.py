"""A captured prefill graph has a fixed number of rows in every layer, and no hooks.

SGLang replays one where a batch fits it. A batch whose rows are narrowed runs eagerly instead; all
others keep their graphs.

Seam: ``ModelRunner._forward_raw`` asks ``prefill_cuda_graph_runner`` whether it can run a batch,
and takes ``eager_runner`` where there is none.
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
