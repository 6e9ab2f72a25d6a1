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
    "Glm4ForCausalLM",
)
#: Values of --kv-cache-dtype that the placement and the narrowed attention know.
SUPPORTED_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

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
    Refusal("--kv-cache-dtype nvfp4", lambda a: a.kv_cache_dtype == "nvfp4"),
    Refusal("--kv-cache-dtype fp4_mx_block16", lambda a: a.kv_cache_dtype == "fp4_mx_block16"),
    Refusal("--kv-cache-dtype mxfp8", lambda a: a.kv_cache_dtype == "mxfp8"),
    Refusal(
        f"a --kv-cache-dtype other than {', '.join(SUPPORTED_KV_DTYPES)}",
        lambda a: a.kv_cache_dtype not in SUPPORTED_KV_DTYPES,
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


def check_model(model: Any) -> None:
    """Refuse models whose layers the narrowing does not know; for their keys and the pool see
    :mod:`sglang_kvshare.engine.geometry`.

    Args:
        model: the loaded model, ``ModelRunner.model``.

    Raises:
        Unsupported: names the model class or what is special about its attention.
    """
    name = type(model).__name__
    if name not in SUPPORTED_MODELS:
        raise Unsupported(
            f"--kvshare does not support {name} yet; supported are {', '.join(SUPPORTED_MODELS)}"
        )
    for number, layer in enumerate(decoder_layers(model)):
        attention = layer.self_attn.attn
        if attention.sliding_window_size not in (-1, None):
            raise Unsupported(f"--kvshare does not support sliding windows (layer {number})")
        if attention.logit_cap:
            raise Unsupported(f"--kvshare does not support logit soft-capping (layer {number})")


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a supported model, in order."""
    return model.model.layers
