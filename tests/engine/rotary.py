"""Rotary objects of SGLang, one of every kind that is served, and what they do to a key."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import LINEAR_SCALING, LLAMA3_SCALING

HEAD, MAX = 64, 4096
#: Every kind below serves this context.
CONTEXT = MAX
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX // 4}
SHORT, LONG = [1.0 + i / 10 for i in range(HEAD // 2)], [2.0 + i for i in range(HEAD // 2)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": MAX,
}
#: Arguments of ``get_rope``.
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "long_base": {"base": 1_000_000},
    "linear": {"rope_scaling": LINEAR_SCALING},
    "llama3": {"rope_scaling": LLAMA3_SCALING},
    "partial": {"partial_rotary_factor": 0.5},
    "partial_quarter": {"partial_rotary_factor": 0.25},
    "partial_llama3": {"partial_rotary_factor": 0.5, "rope_scaling": LLAMA3_SCALING},
    "yarn": {"rope_scaling": YARN},
    "yarn_mscale": {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}},
    "yarn_attention_factor": {"rope_scaling": YARN | {"attn_factor": 0.6, "truncate": False}},
    "partial_yarn": {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
    "ntk_alpha": {"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "proportional": {
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"rope_type": "proportional"},
    },
    "longrope_short": {"max_position": 4 * MAX, "rope_scaling": LONGROPE},
    "longrope_short_scaled": {
        "max_position": 4 * MAX,
        "rope_scaling": LONGROPE | {"short_mscale": 1.4, "long_mscale": 3.0},
    },
}
#: Kinds that know one pairing only.
NEOX_ONLY = ("longrope_short", "longrope_short_scaled")


def rope_of(kind: str, dtype: torch.dtype = torch.float32, is_neox_style: bool = True) -> Any:
    return made(**KINDS[kind], dtype=dtype, is_neox_style=is_neox_style or kind in NEOX_ONLY)


def made(*, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope

    settings = {"base": 10_000, "max_position": MAX, **settings}
    return get_rope(HEAD, HEAD, dtype=dtype, **settings)


def from_scratch(rope: Any, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """SGLang's forward on un-rotated ``keys`` ``[n, heads, head_dim]``."""
    count = keys.shape[0]
    flat = keys.reshape(count, -1)
    # LongRoPE has no other than `forward`.
    forward = getattr(rope, "forward_native", rope.forward)
    _, rotated = forward(positions, torch.zeros_like(flat), flat.clone())
    return rotated.view_as(keys)
