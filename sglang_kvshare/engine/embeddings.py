"""The model's input embeddings, as sketches want them.

Seams: ``get_input_embeddings`` of the model, or ``model.embed_tokens``, and
``VocabParallelEmbedding.forward``, which gives whole rows on every tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_kvshare.matching.sketch import Float32Array, projection

#: Token ids that are looked up at a time: a large vocabulary is never held twice.
_BLOCK_IDS = 8192


def input_embeddings(model: Any, dims: int) -> Float32Array:
    """fp32 ``[vocabulary, min(dims, dim)]``: the embedding of every token id, projected.

    A collective operation of the tensor-parallel ranks.
    """
    layer = _layer(model)
    device = next(layer.parameters()).device
    vocabulary = int(model.config.vocab_size)
    told = []
    directions: torch.Tensor | None = None
    with torch.inference_mode():
        for begin in range(0, vocabulary, _BLOCK_IDS):
            ids = torch.arange(begin, min(begin + _BLOCK_IDS, vocabulary), device=device)
            rows = layer(ids).float()
            if directions is None and dims < rows.shape[1]:
                directions = torch.from_numpy(projection(rows.shape[1], dims)).to(device)
            told.append((rows if directions is None else rows @ directions).cpu().numpy())
    return np.concatenate(told)


def _layer(model: Any) -> Any:
    getter = getattr(model, "get_input_embeddings", None)
    return model.model.embed_tokens if getter is None else getter()
