"""Tiny random-weight models in Hugging Face folders: nothing is downloaded, every run is the same.

Weights are scaled so that attention is far from uniform (an approximation shows) and logits are
peaked (greedy decoding does not hang on the last bit).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCAB = 1000
CONTEXT = 2048

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that all three bands of the scaling are met within the context.
    "original_max_position_embeddings": 256,
}
LINEAR_SCALING = {"rope_type": "linear", "factor": 3.0}
YARN_SCALING = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
#: SGLang makes one table of it, for `CONTEXT * factor` positions.
DYNAMIC_SCALING = {"rope_type": "dynamic", "factor": 2.0}
#: Three positions a token: refused.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    # Shorter than the context: one key, two tables.
    "original_max_position_embeddings": 512,
}


@dataclass(frozen=True)
class TinyModel:
    """One architecture, as small as it gets.

    Attributes:
        bias: on q, k and v (Qwen2, GLM-4).
        qk_norm: RMSNorm of each head's q and k (Qwen3).
        partial_rotary_factor: part of a head that is rotated.
        gptj: even dimensions are paired with odd ones, instead of halves.
        sandwich_norm: RMSNorm also behind attention and MLP (GLM-4).
        vocab: as large as the tokenizer that goes with it, where one does.
        words: a tokenizer goes with it whose words are ``t0 t1 ...``, and a chat template.
    """

    architecture: str
    model_type: str
    seed: int
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None
    partial_rotary_factor: float = 1.0
    gptj: bool = False
    sandwich_norm: bool = False
    vocab: int = VOCAB
    words: bool = False

    def config(self) -> dict:
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": CONTEXT,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "attention_bias": self.bias and self.model_type == "glm4",
            "bos_token_id": None,
            # No token ends a sequence: every request gives as many tokens as it asked for.
            "eos_token_id": None,
            "torch_dtype": "float32",
        }
        if self.rope_scaling is not None:
            config["rope_scaling"] = self.rope_scaling
        if self.partial_rotary_factor != 1:
            config["partial_rotary_factor"] = self.partial_rotary_factor
        if self.model_type == "glm4":
            config["pad_token_id"] = None
        if self.model_type == "mistral":
            config["sliding_window"] = None
        if self.model_type.startswith("qwen"):
            config["use_sliding_window"] = False
        return config

    def weights(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(std: float, *shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * std

        width = self.heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        tensors = {
            "model.embed_tokens.weight": normal(1.0, self.vocab, self.hidden),
            "model.norm.weight": 1 + normal(0.1, self.hidden),
            "lm_head.weight": normal(0.4, self.vocab, self.hidden),
        }
        for number in range(self.layers):
            layer = {
                "input_layernorm.weight": 1 + normal(0.1, self.hidden),
                "post_attention_layernorm.weight": 1 + normal(0.1, self.hidden),
                "self_attn.q_proj.weight": normal(0.18, width, self.hidden),
                "self_attn.k_proj.weight": normal(0.18, kv_width, self.hidden),
                "self_attn.v_proj.weight": normal(0.15, kv_width, self.hidden),
                "self_attn.o_proj.weight": normal(0.15, self.hidden, width),
                "mlp.gate_proj.weight": normal(0.13, self.intermediate, self.hidden),
                "mlp.up_proj.weight": normal(0.13, self.intermediate, self.hidden),
                "mlp.down_proj.weight": normal(0.08, self.hidden, self.intermediate),
            }
            if self.bias:
                layer["self_attn.q_proj.bias"] = normal(0.5, width)
                layer["self_attn.k_proj.bias"] = normal(0.5, kv_width)
                layer["self_attn.v_proj.bias"] = normal(0.5, kv_width)
            if self.sandwich_norm:
                layer["post_self_attn_layernorm.weight"] = 1 + normal(0.1, self.hidden)
                layer["post_mlp_layernorm.weight"] = 1 + normal(0.1, self.hidden)
            if self.qk_norm:
                layer["self_attn.q_norm.weight"] = 1.5 + normal(0.2, self.head_dim)
                layer["self_attn.k_norm.weight"] = 1.5 + normal(0.2, self.head_dim)
            tensors |= {f"model.layers.{number}.{key}": value for key, value in layer.items()}
        return tensors

    def _stored(self) -> dict[str, torch.Tensor]:
        """The weights under the names of the checkpoint: GLM-4 has gate and up in one."""
        tensors = self.weights()
        if self.model_type == "glm4":
            for number in range(self.layers):
                prefix = f"model.layers.{number}.mlp."
                parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]
                tensors[prefix + "gate_up_proj.weight"] = torch.cat(parts)
        return tensors

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2))
        save_file(self._stored(), folder / "model.safetensors", metadata={"format": "pt"})
        if self.words:
            self._write_words(folder)
        return folder

    def _write_words(self, folder: Path) -> None:
        vocab = {f"t{number}": number for number in range(self.vocab)}
        words = Tokenizer(WordLevel(vocab, unk_token="t0"))
        words.pre_tokenizer = WhitespaceSplit()
        words.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "t0",
            "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


MODELS = {
    "llama": TinyModel("LlamaForCausalLM", "llama", seed=1),
    "llama_words": TinyModel("LlamaForCausalLM", "llama", seed=1, words=True),
    "llama3_rope": TinyModel("LlamaForCausalLM", "llama", seed=2, rope_scaling=LLAMA3_SCALING),
    "linear_rope": TinyModel("LlamaForCausalLM", "llama", seed=3, rope_scaling=LINEAR_SCALING),
    "mistral": TinyModel("MistralForCausalLM", "mistral", seed=4),
    "qwen2": TinyModel(
        "Qwen2ForCausalLM",
        "qwen2",
        seed=5,
        bias=True,
        rope_theta=1e6,
        rope_scaling=DYNAMIC_SCALING,
    ),
    "qwen3": TinyModel(
        "Qwen3ForCausalLM", "qwen3", seed=6, qk_norm=True, rope_theta=1e6, rope_scaling=YARN_SCALING
    ),
    "glm4": TinyModel(
        "Glm4ForCausalLM",
        "glm4",
        seed=9,
        # A probe pass of these ends before the last.
        layers=6,
        bias=True,
        partial_rotary_factor=0.5,
        gptj=True,
        sandwich_norm=True,
    ),
    # To be refused at start-up.
    "longrope": TinyModel("LlamaForCausalLM", "llama", seed=7, rope_scaling=LONGROPE),
    "gemma": TinyModel("GemmaForCausalLM", "gemma", seed=8),
}
