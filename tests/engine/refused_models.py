"""Configurations of model families that KVShare refuses, as small as SGLang takes them.

No weights: what is tested is that nothing of the kind is looked for.
"""

from __future__ import annotations

import json
from pathlib import Path

_COMMON = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def _config(architecture: str, model_type: str, **more: object) -> dict:
    return {"architectures": [architecture], "model_type": model_type, **_COMMON, **more}


_MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 4,
    "num_key_value_heads": 4,
}
_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}

CONFIGS = {
    "deepseek_v2": _config("DeepseekV2ForCausalLM", "deepseek_v2", **_MLA),
    "gemma2": _config("Gemma2ForCausalLM", "gemma2", sliding_window=128, query_pre_attn_scalar=16),
    "gemma3": _config(
        "Gemma3ForCausalLM", "gemma3_text", sliding_window=128, query_pre_attn_scalar=16
    ),
    "falcon_h1": _config(
        "FalconH1ForCausalLM",
        "falcon_h1",
        **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
        **{"mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
    "qwen2_vl": _config(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config=_VISION,
    ),
    "qwen2_chunks": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        dual_chunk_attention_config={"chunk_size": 1024, "local_size": 64},
    ),
    "reward": _config("LlamaForSequenceClassification", "llama"),
    "qwen2_moe": _config("Qwen2MoeForCausalLM", "qwen2_moe"),
    # Served: SGLang's classes ignore the window, and so attend to everything.
    "mistral_window": _config("MistralForCausalLM", "mistral", sliding_window=128),
    "qwen2_window": _config(
        *("Qwen2ForCausalLM", "qwen2"),
        **{"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2},
    ),
    "llama": _config("LlamaForCausalLM", "llama"),
}


#: A name of the Hugging Face hub, for a configuration that lies in a cache of it.
HUB_NAME = "example/gemma2"


def write_hub_cache(folder: Path) -> None:
    """What ``HF_HUB_CACHE=folder`` looks like after ``HUB_NAME``'s configuration was fetched."""
    repository = folder / ("models--" + HUB_NAME.replace("/", "--"))
    revision = "0" * 40
    for part, text in (
        ("refs/main", revision),
        (f"snapshots/{revision}/config.json", json.dumps(CONFIGS["gemma2"])),
    ):
        path = repository / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write(folder: Path) -> dict[str, str]:
    """A folder with a ``config.json`` for each; returns their paths by name."""
    paths = {}
    for name, config in CONFIGS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        paths[name] = str(folder / name)
    return paths
