"""What KVShare serves and what it refuses: the facts, and the checks where each becomes known.

The arguments and the model's configuration are checked before anything is loaded or spawned, the
loaded model and its KV pool in the scheduler process. `support_table.py` prints the same facts.

Seams: ``sglang.srt.arg_groups.overrides.resolving_view`` (arguments), ``ModelConfig`` and
``sglang.srt.configs.hybrid_arch.mambaish_config`` (what SGLang makes of the model's
configuration), the model runner's model and KV pool. Nothing here needs SGLang to be imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unsupported(RuntimeError):
    """Something that KVShare does not serve; the message is one sentence that names it."""


@dataclass(frozen=True)
class ModelFacts:
    """What the configuration of a model decides, in the words of this table.

    Attributes:
        architectures: class names in the order in which SGLang looks for them.
        attention: ``mha``, ``mla`` or ``ssm``, as SGLang classes it.
        recurrent: some layers keep a state instead of keys and values (Mamba, linear attention).
        windowed: some layers attend to a window or to a chunk of the prompt.
    """

    architectures: tuple[str, ...]
    attention: str = "mha"
    recurrent: bool = False
    windowed: bool = False
    dual_chunk: bool = False
    multimodal: bool = False
    m_rope: bool = False
    encoder_decoder: bool = False
    generates: bool = True

    @property
    def supported_class(self) -> bool:
        """Which of several classes SGLang takes is seen when the model is loaded."""
        return any(name in SUPPORTED_MODELS for name in self.architectures)


@dataclass(frozen=True)
class Refusal:
    """One thing that is refused.

    Attributes:
        what: names it, with its flag where it has one.
        why: the reason, in one phrase.
        applies: asked with SGLang's resolved arguments, or with :class:`ModelFacts`.
    """

    what: str
    why: str
    applies: Callable[[Any], bool]

    def check(self, subject: Any) -> None:
        """
        Raises:
            Unsupported: it applies.
        """
        if self.applies(subject):
            raise Unsupported(f"--kvshare does not support {self.what}: {self.why}")


#: (class of SGLang, what is said of it). Exact classes: a subclass may attend in its own way.
MODEL_CLASSES = (
    ("LlamaForCausalLM", "Llama 2 and 3, SmolLM2 and others of this class"),
    ("MistralForCausalLM", "a configured window is ignored, as by SGLang"),
    ("Qwen2ForCausalLM", "a configured window is ignored, as by SGLang"),
    ("Qwen3ForCausalLM", "dense models"),
    ("Glm4ForCausalLM", "dense models"),
)
SUPPORTED_MODELS = tuple(name for name, _ in MODEL_CLASSES)

LONGROPE = "Phi3LongRoPEScaledRotaryEmbedding"

#: (class of SGLang, one phrase). Exact classes: a subclass may rotate in its own way.
SUPPORTED_ROPE_KINDS = (
    ("RotaryEmbedding", "plain RoPE, partial or whole, NeoX or GPT-J pairing"),
    ("LinearScalingRotaryEmbedding", "linear scaling, within its table"),
    ("Llama3RotaryEmbedding", "Llama 3 scaling"),
    ("YaRNScalingRotaryEmbedding", "YaRN, its attention scale kept"),
    ("DynamicNTKAlphaRotaryEmbedding", "NTK with a fixed alpha, within its table"),
    (
        "DynamicNTKScalingRotaryEmbedding",
        "dynamic NTK up to max_position_embeddings * factor, for which SGLang has one table",
    ),
    ("Gemma4RotaryEmbedding", "proportional RoPE"),
    (LONGROPE, "LongRoPE while the context fits into its short table"),
)
REFUSED_ROPE_KINDS = (
    ("MRotaryEmbedding", "M-RoPE gives a token three positions, and images no order of their own"),
    ("YaRNScalingMRotaryEmbedding", "M-RoPE gives a token three positions"),
    ("Ernie4_5_VLRotaryEmbedding", "M-RoPE gives a token three positions"),
    ("BailingMRotaryEmbedding", "M-RoPE gives a token three positions"),
    ("DualChunkRotaryEmbedding", "a key's angle starts again with every chunk of the prompt"),
    ("FourierRotaryEmbedding", "its learnt coefficients are no rotation, so none can be undone"),
    ("DeepseekScalingRotaryEmbedding", "it belongs to MLA models, which keep no keys to move"),
    ("Llama4VisionRotaryEmbedding", "it rotates image patches by row and column"),
)

#: Values of --kv-cache-dtype that the placement and the narrowed attention know.
SUPPORTED_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
BLOCK_SCALED_KV_DTYPES = ("nvfp4", "fp4_mx_block16", "mxfp8")

#: (value of --attention-backend, how rows attend that are left of an extend).
ATTENTION_BACKENDS = (
    ("torch_native", "by a mask, in blocks of rows, in PyTorch"),
    ("flashinfer", "runs of rows, or a packed mask, whichever costs less; not tried on a GPU yet"),
    ("triton", "each run of rows as a request of its own; not tried on a GPU yet"),
    ("fa3", "each run of rows as a request of its own; not tried on a GPU yet"),
)
_SUPPORTED_ATTENTION = tuple(name for name, _ in ATTENTION_BACKENDS)
_ATTENTION_WHY = "how rows attend that are left of an extend is not known there"
OTHER_ATTENTION = (
    "another --attention-backend, --prefill-attention-backend or --decode-attention-backend "
    f"than {', '.join(_SUPPORTED_ATTENTION)}"
)


def attention_refusal(name: str | None) -> str:
    """The sentence that refuses the attention backend ``name``; empty for one that is served, and
    while SGLang has not chosen one."""
    if name is None or name in _SUPPORTED_ATTENTION:
        return ""
    return (
        f"--kvshare does not support --attention-backend {name}: {_ATTENTION_WHY}; supported are "
        f"{', '.join(_SUPPORTED_ATTENTION)}"
    )


_OWN_TREE = "SGLang has it for its own tree cache only"
_ANOTHER_OWNER = "two owners of cached slots are not kept in step"
_LAYOUT = "slots of that layout cannot be copied one by one"

ARGUMENT_REFUSALS = (
    Refusal(
        "--disable-radix-cache",
        "there is no cache to reuse from",
        lambda a: bool(a.disable_radix_cache),
    ),
    Refusal(
        "another tree cache (--radix-cache-backend)",
        "the run index follows KVShare's own tree cache",
        lambda a: a.radix_cache_backend not in (None, "kvshare"),
    ),
    Refusal(
        "speculative decoding (--speculative-algorithm)",
        "drafts are verified in extends that are not narrowed",
        lambda a: a.speculative_algorithm is not None,
    ),
    Refusal(
        "diffusion language models (--dllm-algorithm)",
        "a block is computed several times, and not from left to right",
        lambda a: a.dllm_algorithm is not None,
    ),
    Refusal(
        "prefill-decode disaggregation (--disaggregation-mode)",
        "the decode server has none of the prefill server's tree",
        lambda a: a.disaggregation_mode != "null",
    ),
    Refusal(
        "encoder disaggregation (--encoder-only, --language-only)",
        "multimodal prompts are not matched",
        lambda a: bool(a.encoder_only or a.language_only),
    ),
    Refusal("PD multiplexing (--enable-pdmux)", "not tried", lambda a: bool(a.enable_pdmux)),
    Refusal(
        "two-batch overlap (--enable-two-batch-overlap)",
        "a batch that SGLang splits is not narrowed",
        lambda a: bool(a.enable_two_batch_overlap),
    ),
    Refusal(
        "HiCache (--enable-hierarchical-cache)",
        _OWN_TREE,
        lambda a: bool(a.enable_hierarchical_cache),
    ),
    Refusal("LMCache (--enable-lmcache)", _ANOTHER_OWNER, lambda a: bool(a.enable_lmcache)),
    Refusal("FlexKV (--enable-flexkv)", _ANOTHER_OWNER, lambda a: bool(a.enable_flexkv)),
    Refusal(
        "--enable-unified-cache-external-linker",
        _OWN_TREE,
        lambda a: bool(a.enable_unified_cache_external_linker),
    ),
    Refusal(
        "--enable-session-radix-cache", _OWN_TREE, lambda a: bool(a.enable_session_radix_cache)
    ),
    Refusal(
        "streaming sessions (--enable-streaming-session)",
        _OWN_TREE,
        lambda a: bool(a.enable_streaming_session),
    ),
    Refusal("--radix-eviction-policy tlru", _OWN_TREE, lambda a: a.radix_eviction_policy == "tlru"),
    Refusal("HiSparse (--enable-hisparse)", _ANOTHER_OWNER, lambda a: bool(a.enable_hisparse)),
    Refusal(
        "--enable-unified-memory, --enable-page-major-kv-layout",
        _LAYOUT,
        lambda a: bool(a.enable_unified_memory or a.enable_page_major_kv_layout),
    ),
    Refusal("--enable-kv-cache-sharding", _LAYOUT, lambda a: bool(a.enable_kv_cache_sharding)),
    Refusal(
        "--prefill-only-disable-kv-cache",
        "there is no cache to reuse from",
        lambda a: bool(a.prefill_only_disable_kv_cache),
    ),
    Refusal(
        "--kv-cache-dtype nvfp4, fp4_mx_block16, mxfp8",
        "values share a scale with others, so that one cannot be moved alone",
        lambda a: a.kv_cache_dtype in BLOCK_SCALED_KV_DTYPES,
    ),
    Refusal(
        f"a --kv-cache-dtype other than {', '.join(SUPPORTED_KV_DTYPES)}",
        "how its values are stored is not known",
        lambda a: a.kv_cache_dtype not in SUPPORTED_KV_DTYPES,
    ),
    Refusal(
        "multi-item scoring (--enable-mis)",
        "items of one prompt do not see each other, and narrowed rows attend to all of it",
        lambda a: bool(a.enable_mis),
    ),
    Refusal(
        "LoRA (--enable-lora, --lora-paths)",
        "donors of an adapter that is loaded again under its name are not dropped",
        lambda a: bool(a.enable_lora) or bool(a.lora_paths),
    ),
    Refusal(
        "pipeline parallelism (--pp-size above 1)",
        "each stage would have to drop the same rows",
        lambda a: a.pp_size > 1,
    ),
    Refusal(
        "context parallelism (--attn-cp-size, --dcp-size above 1)",
        "no rank has the whole KV row that a narrowed row attends to",
        lambda a: a.attn_cp_size > 1 or a.dcp_size > 1,
    ),
    Refusal(
        "attention data parallelism (--attn-dp-size above 1)",
        "ranks that gather rows would have to drop the same ones",
        lambda a: a.attn_dp_size > 1,
    ),
    Refusal(
        "embedding models (--is-embedding)",
        "they answer with what an approximation would change",
        lambda a: bool(a.is_embedding),
    ),
    Refusal(
        "--model-impl transformers or mindspore",
        "narrowing needs the layers of SGLang's own model classes",
        lambda a: (
            str(getattr(a.model_impl, "value", a.model_impl)) in ("transformers", "mindspore")
        ),
    ),
    Refusal(
        "Ray (--use-ray)",
        "its actors do not inherit the environment in which the settings travel",
        lambda a: bool(a.use_ray),
    ),
    Refusal(
        "SGLANG_RUST_SERVER",
        "requests and responses pass by the hooks of the Python server",
        lambda a: os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"),
    ),
)

#: In the order in which a reason is given: the special one before the general one.
MODEL_REFUSALS = (
    Refusal(
        "embedding and reward models",
        "they answer with what an approximation would change",
        lambda m: not m.generates,
    ),
    Refusal("encoder-decoder models", "their KV has two sources", lambda m: m.encoder_decoder),
    Refusal(
        "multimodal models",
        "images and sound are not part of the token sequence that is matched",
        lambda m: m.multimodal,
    ),
    Refusal("M-RoPE", "a token has three positions, and its key no single one", lambda m: m.m_rope),
    Refusal(
        "multi-head latent attention (MLA)",
        "its pool keeps latents instead of rotated keys",
        lambda m: m.attention == "mla",
    ),
    Refusal(
        "Mamba and linear attention, hybrids included",
        "a state holds the whole past and cannot be moved",
        lambda m: m.attention == "ssm" or m.recurrent,
    ),
    Refusal(
        "dual chunk attention",
        "a key's angle starts again with every chunk of the prompt",
        lambda m: m.dual_chunk,
    ),
    Refusal(
        "sliding windows and chunked attention",
        "a layer that forgets has no KV to reuse, and narrowed rows attend to all of it",
        lambda m: m.windowed and not m.supported_class,
    ),
)


#: Arguments that SGLang chooses by the model, so that the model is what is told of first.
CHOSEN_REFUSALS = (
    Refusal(
        OTHER_ATTENTION,
        _ATTENTION_WHY,
        lambda a: any(
            attention_refusal(name)
            for name in (
                a.prefill_attention_backend or a.attention_backend,
                a.decode_attention_backend or a.attention_backend,
            )
        ),
    ),
)


def check_arguments(args: Any) -> None:
    """Refuse combinations that the command line alone decides.

    Raises:
        Unsupported: the first one found.
    """
    for refusal in ARGUMENT_REFUSALS:
        refusal.check(args)


def check_chosen(args: Any) -> None:
    """Refuse what SGLang has chosen, or was told to; call it when the model was found served.

    Raises:
        Unsupported: the first one found.
    """
    for refusal in CHOSEN_REFUSALS:
        refusal.check(args)


def check_model_facts(facts: ModelFacts) -> None:
    """Refuse what the model's configuration alone decides.

    Raises:
        Unsupported: names the model class, and what is special about it.
    """
    for refusal in MODEL_REFUSALS:
        if refusal.applies(facts):
            classes = " or ".join(facts.architectures)
            raise Unsupported(
                f"--kvshare does not support {classes} ({refusal.what}): {refusal.why}"
            )
    if not facts.supported_class:
        raise _unknown_class(" or ".join(facts.architectures))


def model_facts(config: Any) -> ModelFacts:
    """Read SGLang's ``ModelConfig``; needs SGLang."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    text = config.hf_text_config
    return ModelFacts(
        architectures=tuple(config.hf_config.architectures or ("a model of unknown class",)),
        attention=config.attention_arch.name.lower(),
        recurrent=mambaish_config(config) is not None,
        windowed=bool(
            config.is_hybrid_swa
            or config.attention_chunk_size
            or "sliding_attention" in (getattr(text, "layer_types", None) or ())
        ),
        dual_chunk=bool(getattr(config.hf_config, "dual_chunk_attention_config", None)),
        multimodal=bool(config.is_multimodal or config.is_audio_model),
        m_rope=bool(config.model_is_mrope),
        encoder_decoder=bool(config.is_encoder_decoder),
        generates=bool(config.is_generation),
    )


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
        raise _unknown_class(name)
    for number, layer in enumerate(decoder_layers(model)):
        attention = layer.self_attn.attn
        if attention.sliding_window_size not in (-1, None):
            raise Unsupported(f"--kvshare does not support sliding windows (layer {number})")
        if attention.logit_cap:
            raise Unsupported(f"--kvshare does not support logit soft-capping (layer {number})")


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a supported model, in order."""
    return model.model.layers


def _unknown_class(name: str) -> Unsupported:
    return Unsupported(
        f"--kvshare does not support {name} yet; supported are {', '.join(SUPPORTED_MODELS)}"
    )
