"""From a GGUF file of a llama model to the weights and config of a Hugging Face folder.

GGUF names the tensors differently, stores shapes reversed, quantises the matrices, and orders the
rows of the query and key projections for its own rotary embedding. All four are undone here.

Letters in shapes: H query heads, K key/value heads, D head size, E hidden size, F feed-forward
size, V vocabulary size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_kvshare.model.errors import ModelError
from sglang_kvshare.model.tokenizer import build_tokenizer, special_ids, tokenizer_config

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

Metadata = dict[str, Any]

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(
    reader: Any,
    folder: Path,
    dtype: str = "bfloat16",
    on_tensor: Callable[[int], None] | None = None,
) -> None:
    """Write weights, config and tokenizer into the existing `folder`.

    `reader` is what `open_gguf` gives; `on_tensor` is called with 1 after each of its tensors.
    """
    from safetensors.torch import save_file

    metadata = read_metadata(reader)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = llama_config(metadata, tied, dtype)
    # The tokenizer comes first: it is quick, and fails before the long part.
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids(metadata))
    weights = convert_weights(reader, config, dtype, on_tensor)
    file = folder / "model.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    # Some versions of safetensors make it readable by its owner alone, whatever the umask says.
    file.chmod((folder / "config.json").stat().st_mode)


def open_gguf(path: Path) -> Any:
    """The `gguf.GGUFReader` of the file; tensors stay on disk until they are read."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is no GGUF file that can be read: {error}.") from error


def read_metadata(reader: Any) -> Metadata:
    """The key-value pairs of the file as plain Python values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def llama_config(metadata: Metadata, tied: bool, dtype: str) -> dict[str, Any]:
    """The model's `config.json`; an error for anything that this converter would get wrong."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"The GGUF file holds a model of architecture {architecture!r}; "
            "only 'llama' can be converted."
        )
    unsupported = [key for key in metadata if key.startswith("llama.rope.scaling.")]
    if metadata.get("llama.expert_count"):
        unsupported.append("llama.expert_count")
    if unsupported:
        raise ModelError(f"The GGUF file uses {unsupported[0]}, which cannot be converted.")

    def need(key: str) -> Any:
        if f"llama.{key}" not in metadata:
            raise ModelError(f"The GGUF file says nothing about llama.{key}.")
        return metadata[f"llama.{key}"]

    hidden, heads = int(need("embedding_length")), int(need("attention.head_count"))
    head_size = int(metadata.get("llama.attention.key_length") or hidden // heads)
    if int(metadata.get("llama.rope.dimension_count") or head_size) != head_size:
        raise ModelError("The GGUF file rotates only a part of each head; it cannot be converted.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv") or heads),
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": _short_float(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short_float(metadata.get("llama.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "torch_dtype": dtype,
        **special_ids(metadata),
    }


def convert_weights(
    reader: Any,
    config: dict[str, Any],
    dtype: str,
    on_tensor: Callable[[int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors under their Hugging Face names in `dtype`, checked against the config."""
    import torch

    missing = expected_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = hf_name(str(tensor.name))
        array = dequantized(tensor)
        expected = missing.pop(name, None)
        if array.shape != expected:
            raise ModelError(
                f"The GGUF tensor {tensor.name} has shape {array.shape}, expected {expected}."
            )
        if name.endswith("q_proj.weight"):
            array = unpermute(array, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            array = unpermute(array, config["num_key_value_heads"])
        # Narrowed one by one: all of the model in fp32 would double the memory needed. The copy
        # also takes an fp32 tensor out of the file's read-only map.
        weights[name] = torch.tensor(array).to(getattr(torch, dtype))
        if on_tensor is not None:
            on_tensor(1)
    if missing:
        raise ModelError(f"The GGUF file lacks {len(missing)} tensors, one is {min(missing)}.")
    return weights


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a llama model of this config has."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    vocabulary = (config["vocab_size"], hidden)
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.{name}.weight": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = vocabulary
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor of a llama model."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    if block == "blk" and index.isdigit() and part in _LAYER_NAMES:
        return f"model.layers.{index}.{_LAYER_NAMES[part]}"
    raise ModelError(f"The GGUF file holds a tensor {name}, which cannot be converted.")


def dequantized(tensor: Any) -> Array:
    """A tensor of the reader as fp32, in the order of Hugging Face: [rows, columns] or [n].

    The reader's `shape` is GGUF's, with the columns first.
    """
    from gguf import dequantize

    array: Array = dequantize(tensor.data, tensor.tensor_type)
    return array.reshape([int(size) for size in reversed(tensor.shape)])


def unpermute(rows: Array, heads: int) -> Array:
    """Give the rows of a query or key projection back their order: [heads * D, E] to the same.

    GGUF's rotary embedding turns neighbours (2i, 2i + 1), Hugging Face's turns the halves
    (i, i + D / 2), so GGUF holds row `s * D / 2 + i` of each head at `2 * i + s`.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _short_float(value: float) -> float:
    """The shortest decimal that is the same fp32: GGUF's 9.99999974e-06 is meant as 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
