"""The index of similar donors, made as the configuration wants it.

FAISS is imported here when similar donors are wanted, and nowhere before: where it is missing or
broken they are given up, and runs serve on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.embedder import load_embedder
from sglang_kvshare.engine.embeddings import input_embeddings
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.sketch import Sketcher, WindowSketcher

if TYPE_CHECKING:
    from sglang_kvshare.matching.semantic_index import SemanticIndex

logger = logging.getLogger(__name__)


def wanted_sketcher(config: KVShareConfig, worker: Any) -> WindowSketcher | None:
    """What windows are sketched with; ``None`` where similar donors are not wanted.

    A collective operation of the tensor-parallel ranks.

    Args:
        worker: ``TpModelWorker`` with the loaded model and its tokenizer.

    Raises:
        Unsupported: the embedder cannot be used.
    """
    if not config.similar_donors:
        return None
    if config.embedder:
        return load_embedder(config.embedder, worker.tokenizer, config.sketch_tokens)
    try:
        embeddings = input_embeddings(worker.model_runner.model, config.sketch_dims)
    except Exception:
        # The same on every rank: it depends on the model's class.
        logger.exception("KVShare finds no similar donors: the model's embeddings cannot be read")
        return None
    return Sketcher(embeddings, size_tokens=config.sketch_tokens, dims=config.sketch_dims)


def similar_donors(
    runs: RunIndex,
    config: KVShareConfig,
    sketcher: WindowSketcher,
    on_fault: Callable[[str], None],
) -> SemanticIndex | None:
    """The index of similar donors; ``None``, a warning and a fault ``similar`` without FAISS."""
    try:
        from sglang_kvshare.matching.semantic_index import SemanticIndex, SimilaritySettings
    except Exception as error:
        # A broken shared library may raise anything.
        logger.warning(
            "KVShare finds no similar donors (similar_donors): FAISS or rapidfuzz cannot be "
            "imported (%s: %s); pip install faiss-cpu rapidfuzz",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        on_fault("similar")
        return None
    return SemanticIndex(runs, sketcher, SimilaritySettings.of(config, sketcher))
