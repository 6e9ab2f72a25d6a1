"""What KVShare serves and what it refuses: one table, checked where each fact becomes known.

Seams: ``sglang.srt.arg_groups.overrides.resolving_view`` (arguments), the model runner's model
and KV pool (everything that depends on the model).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unsupported(RuntimeError):
    """Something that KVShare does not serve; the message is one sentence that names it."""


@dataclass(frozen=True)
class Refusal:
    """``applies`` is asked with SGLang's resolved arguments."""

    what: str
    applies: Callable[[Any], bool]


SUPPORTED_MODELS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
#: Exact classes: a subclass may rotate in its own way.
SUPPORTED_ROPE = ("RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding")

ARGUMENT_REFUSALS = (
    Refusal("--disable-radix-cache", lambda a: bool(a.disable_radix_cache)),
    Refusal("speculative decoding", lambda a: a.speculative_algorithm is not None),
    Refusal("prefill-decode disaggregation", lambda a: a.disaggregation_mode != "null"),
    Refusal("HiCache (--enable-hierarchical-cache)", lambda a: bool(a.enable_hierarchical_cache)),
    Refusal("LMCache (--enable-lmcache)", lambda a: bool(a.enable_lmcache)),
    Refusal("LoRA (--enable-lora)", lambda a: bool(a.enable_lora) or bool(a.lora_paths)),
    Refusal("pipeline parallelism (--pp-size above 1)", lambda a: a.pp_size > 1),
    Refusal("context parallelism", lambda a: a.attn_cp_size > 1 or a.dcp_size > 1),
    Refusal("attention data parallelism", lambda a: a.attn_dp_size > 1),
    Refusal("diffusion language models", lambda a: a.dllm_algorithm is not None),
    Refusal("two-batch overlap", lambda a: bool(a.enable_two_batch_overlap)),
    Refusal("PD multiplexing", lambda a: bool(a.enable_pdmux)),
    Refusal("embedding models (--is-embedding)", lambda a: bool(a.is_embedding)),
    Refusal(
        "another tree cache (--radix-cache-backend)",
        lambda a: a.radix_cache_backend not in (None, "kvshare"),
    ),
    Refusal(
        "a KV cache in another dtype than the model's (--kv-cache-dtype)",
        lambda a: a.kv_cache_dtype != "auto",
    ),
)


def check_arguments(args: Any) -> None:
    """Refuse combinations that the command line alone decides.

    Raises:
        Unsupported: the first one found.
    """
    for refusal in ARGUMENT_REFUSALS:
        if refusal.applies(args):
            raise Unsupported(f"--kvshare does not support {refusal.what} yet")


def check_model(model: Any, pool: Any) -> None:
    """Refuse models and pools whose layout the placement and the narrowing do not know.

    Args:
        model: the loaded model, ``ModelRunner.model``.
        pool: ``ModelRunner.token_to_kv_pool``.

    Raises:
        Unsupported: names the model class, the RoPE kind or the pool.
    """
    name = type(model).__name__
    if name not in SUPPORTED_MODELS:
        raise Unsupported(
            f"--kvshare does not support {name} yet; supported are {', '.join(SUPPORTED_MODELS)}"
        )
    if type(pool).__name__ != "MHATokenToKVPool":
        raise Unsupported(f"--kvshare does not know the KV pool {type(pool).__name__}")
    keys = pool.get_key_buffer(pool.start_layer)
    if keys.dim() != 3 or not keys.is_floating_point() or keys.element_size() < 2:
        raise Unsupported(
            f"--kvshare does not know a key buffer of shape {tuple(keys.shape)}, {keys.dtype}"
        )
    for number, layer in enumerate(decoder_layers(model)):
        attention = layer.self_attn.attn
        if attention.sliding_window_size not in (-1, None):
            raise Unsupported(f"--kvshare does not support sliding windows (layer {number})")
        if attention.logit_cap:
            raise Unsupported(f"--kvshare does not support logit soft-capping (layer {number})")
        check_rope(layer.self_attn.rotary_emb)


def check_rope(rope: Any) -> None:
    """Refuse every RoPE kind that :mod:`sglang_kvshare.recompute.rope` does not move exactly.

    Raises:
        Unsupported: names the class, or the pairing.
    """
    kind = type(rope).__name__
    if kind not in SUPPORTED_ROPE:
        raise Unsupported(
            f"--kvshare does not support the RoPE kind {kind} yet; "
            f"supported are {', '.join(SUPPORTED_ROPE)}"
        )
    if not rope.is_neox_style:
        raise Unsupported(f"--kvshare does not support GPT-J style pairing ({kind}) yet")


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a supported model, in order."""
    return model.model.layers
