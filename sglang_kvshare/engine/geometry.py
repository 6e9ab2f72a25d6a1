"""What a cached key looks like: the rotation of every layer, and the layout of the pool.

Seams: ``RotaryEmbedding.cos_sin_cache`` and the attributes of its subclasses that are read below,
``Phi3LongRoPEScaledRotaryEmbedding.short_cos_sin_cache``, ``MHATokenToKVPool``.

A key can be moved when its position alone decides how it was rotated. That is a table with one row
a position, looked up for every request alike; classes are named exactly, since a subclass may
rotate in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvshare.engine.support import (
    LONGROPE,
    REFUSED_ROPE_KINDS,
    SUPPORTED_ROPE_KINDS,
    Unsupported,
    decoder_layers,
)
from sglang_kvshare.recompute.rope import Rotation

#: Positions for which SGLang computes the kind's own table. It lengthens the table for a longer
#: context, but with the frequencies of plain RoPE: what is cached there is no such model's key.
_OWN_POSITIONS: dict[str, Callable[[Any], float]] = {
    "LinearScalingRotaryEmbedding": lambda r: r.max_position_embeddings * r.scaling_factors[0],
    "DynamicNTKAlphaRotaryEmbedding": lambda r: r.max_position_embeddings,
    "DynamicNTKScalingRotaryEmbedding": lambda r: r.max_position_embeddings * r.scaling_factor,
}
#: Class of each ``rope_type``, and of the variants that further keys make of one.
_CLASSES = {
    "default": "RotaryEmbedding",
    "linear": "LinearScalingRotaryEmbedding",
    "llama3": "Llama3RotaryEmbedding",
    "yarn": "YaRNScalingRotaryEmbedding",
    "deepseek_yarn": "DeepseekScalingRotaryEmbedding",
    "dynamic": "DynamicNTKScalingRotaryEmbedding",
    "alpha": "DynamicNTKAlphaRotaryEmbedding",
    "longrope": LONGROPE,
    "proportional": "Gemma4RotaryEmbedding",
    "mrope": "MRotaryEmbedding",
    "mrope_yarn": "YaRNScalingMRotaryEmbedding",
    "mrope_video": "BailingMRotaryEmbedding",
    "fope": "FourierRotaryEmbedding",
}
#: Layouts of ``MHATokenToKVPool`` that the placement reads and writes: ``[slots, heads, dim]``.
_LAYOUT = "nhd"
_POOL = "MHATokenToKVPool"
_KV_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True)
class LayerGeometry:
    """``rotation`` is ``None`` for a layer without RoPE, whose keys fit any position."""

    layer_id: int
    rotation: Rotation | None


def layer_geometries(model: Any, context_tokens: int) -> list[LayerGeometry]:
    """The rotation of every decoder layer, in order; layers that share one share the object.

    Args:
        model: the loaded model, ``ModelRunner.model``.
        context_tokens: no position reaches it, ``ModelConfig.context_len``.

    Raises:
        Unsupported: a kind that cannot be moved; names the class and says why.
    """
    known: dict[int, Rotation] = {}
    found = []
    for number, layer in enumerate(decoder_layers(model)):
        attention = layer.self_attn
        if not hasattr(attention, "rotary_emb"):
            raise Unsupported(
                f"--kvshare does not find how layer {number} rotates its keys "
                f"({type(attention).__name__} has no rotary_emb)"
            )
        rope = attention.rotary_emb
        if rope is not None and id(rope) not in known:
            known[id(rope)] = rotation_of(rope, context_tokens)
        rotation = None if rope is None else known[id(rope)]
        found.append(LayerGeometry(attention.attn.layer_id, rotation))
    return found


def rotation_of(rope: Any, context_tokens: int) -> Rotation:
    """The rotation of one rotary object of SGLang.

    Raises:
        Unsupported: see :func:`layer_geometries`.
    """
    kind = type(rope).__name__
    if refusal := _refusal(kind):
        raise Unsupported(refusal)
    if kind == LONGROPE:
        return _short_rotation(rope, context_tokens)
    if kind == "LinearScalingRotaryEmbedding" and len(rope.scaling_factors) != 1:
        raise Unsupported(f"--kvshare does not support {kind} with several scaling factors")
    if own := _OWN_POSITIONS.get(kind):
        _check_length(kind, int(own(rope)), context_tokens)
    table = rope.cos_sin_cache
    if table.dtype != torch.float32:
        # SGLang may keep the table in the model's dtype; what it was rounded from is better.
        table = rope._compute_cos_sin_cache().to(table.device, torch.float32)
    if table.shape[0] < context_tokens:
        raise Unsupported(
            f"--kvshare does not support a context length of {context_tokens} with {kind}, "
            f"whose table has {table.shape[0]} positions"
        )
    return Rotation(
        table, "neox" if rope.is_neox_style else "gptj", float(getattr(rope, "mscale", 1.0))
    )


def _short_rotation(rope: Any, context_tokens: int) -> Rotation:
    """LongRoPE takes its long table for a whole batch as soon as one position in it exceeds the
    original length, so that the same key is cached in two ways unless none ever does."""
    original = rope.original_max_position_embeddings
    if context_tokens > original:
        raise Unsupported(_longrope_refusal(original, context_tokens))
    table = rope.short_cos_sin_cache
    if table.dtype != torch.float32:
        table = rope._compute_cos_sin_cache(original, rope.short_factor, rope.short_mscale)
        table = table.to(rope.short_cos_sin_cache.device, torch.float32)
    return Rotation(table, "neox", float(rope.short_mscale))


def rope_refusal_from_config(hf_config: Any, context_tokens: int | None = None) -> str | None:
    """What :func:`layer_geometries` would say, as far as the model's configuration tells.

    For an early word: before the weights are loaded, or without SGLang. ``None`` means that
    nothing speaks against it yet; the loaded model has the last word.

    Args:
        hf_config: of Hugging Face, a ``PretrainedConfig`` or anything with its attributes.
        context_tokens: the server's context length; by default the model's own.
    """
    config = getattr(hf_config, "text_config", None) or hf_config
    if getattr(config, "dual_chunk_attention_config", None):
        return _refusal("DualChunkRotaryEmbedding")
    positions = getattr(config, "max_position_embeddings", None)
    for scaling in _scalings(config):
        if refusal := _refusal(_kind_of(scaling)):
            return refusal
        length, context = _own_length(scaling, positions), context_tokens or positions
        if length is not None and context is not None and context > length:
            if _kind_of(scaling) == LONGROPE:
                return _longrope_refusal(length, context)
            return _length_refusal(_kind_of(scaling), length, context)
    return None


# --- wording and the reading of configurations ----------------------------------------------------


def _refusal(kind: str) -> str | None:
    for name, why in REFUSED_ROPE_KINDS:
        if name == kind:
            return f"--kvshare does not support the RoPE kind {kind}: {why}"
    supported = [name for name, _ in SUPPORTED_ROPE_KINDS]
    if kind not in supported:
        return f"--kvshare does not know the RoPE kind {kind}; supported are {', '.join(supported)}"
    return None


def _check_length(kind: str, length: int, context_tokens: int) -> None:
    if context_tokens > length:
        raise Unsupported(_length_refusal(kind, length, context_tokens))


def _length_refusal(kind: str, length: int, context_tokens: int) -> str:
    return (
        f"--kvshare does not support the RoPE kind {kind} beyond {length} positions "
        f"(the context length is {context_tokens}): SGLang goes on with other frequencies there"
    )


def _longrope_refusal(original: int, context_tokens: int) -> str:
    return (
        f"--kvshare does not support the RoPE kind {LONGROPE} beyond {original} positions "
        f"(the context length is {context_tokens}): SGLang takes another table for every key of a "
        f"batch with a longer prompt; --context-length {original} avoids that"
    )


def _scalings(config: Any) -> Iterator[dict[str, Any]]:
    """One dictionary for the model, or one for each type of layer (``rope_parameters``)."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    inner = [value for value in given.values() if isinstance(value, dict)]
    yield from inner or [given]


def _kind_of(scaling: dict[str, Any]) -> str:
    """The class that ``sglang.srt.layers.rotary_embedding.get_rope`` makes of a configuration."""
    variant = scaling.get("rope_type", scaling.get("type", "default"))
    if variant in ("default", "mrope", "yarn") and "mrope_section" in scaling:
        variant = "mrope_yarn" if variant == "yarn" else "mrope"
        if scaling.get("video_rope"):
            variant = "mrope_video"
    elif variant == "default" and scaling.get("use_fope"):
        variant = "fope"
    elif variant == "dynamic" and "alpha" in scaling:
        variant = "alpha"
    return _CLASSES.get(variant, str(variant))


def _own_length(scaling: dict[str, Any], positions: int | None) -> int | None:
    """Positions that the kind's own table covers; ``None`` where a longer one is as good."""
    kind = _kind_of(scaling)
    if kind == LONGROPE:
        return scaling.get("original_max_position_embeddings", positions)
    if kind not in _OWN_POSITIONS or positions is None:
        return None
    factor = 1 if kind == "DynamicNTKAlphaRotaryEmbedding" else scaling.get("factor", 1)
    return int(positions * factor)


# --- the pool -------------------------------------------------------------------------------------


def check_pool(pool: Any) -> None:
    """Refuse every KV pool whose slots the placement does not know how to read and write.

    Raises:
        Unsupported: names the pool, its layout or its dtype.
    """
    name = type(pool).__name__
    if name != _POOL:
        raise Unsupported(f"--kvshare does not know the KV pool {name}")
    if pool.is_quantized_kv_cache:
        method = type(pool.quant_method).__name__
        raise Unsupported(f"--kvshare does not know the quantised KV pool of {method}")
    if pool.kv_cache_layout != _LAYOUT:
        raise Unsupported(f"--kvshare does not know the KV pool layout {pool.kv_cache_layout}")
    for buffer in (pool.get_key_buffer(pool.start_layer), pool.get_value_buffer(pool.start_layer)):
        if buffer.dim() != 3 or buffer.dtype not in _KV_DTYPES:
            raise Unsupported(
                f"--kvshare does not know a KV buffer of shape {tuple(buffer.shape)}, "
                f"{buffer.dtype}"
            )
