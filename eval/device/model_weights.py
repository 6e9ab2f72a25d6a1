"""Weights of a Llama-class model, drawn at random or taken from a state of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvshare_eval.device.model_shapes import ModelShape


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Each ``[out, in]``; projections of one input are one matrix, as an engine has them.

    Attributes:
        attention_norm, feed_norm: ``[hidden]``.
        qkv: ``[(query_heads + 2 * kv_heads) * head_dim, hidden]``.
        output: ``[hidden, query_heads * head_dim]``.
        gate_up: ``[2 * intermediate, hidden]``.
        down: ``[hidden, intermediate]``.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    feed_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """
    Attributes:
        embedding, head: ``[vocabulary, hidden]``.
        norm: ``[hidden]``.
    """

    shape: ModelShape
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def random_weights(
    shape: ModelShape, dtype: torch.dtype, device: str, seed: int = 0
) -> ModelWeights:
    """Drawn so that hidden states keep their size from layer to layer.

    Zeros, or all alike, would be multiplied faster than what a model has.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(out: int, into: int) -> torch.Tensor:
        made = torch.empty(out, into, dtype=dtype, device=device)
        return made.normal_(0.0, into**-0.5, generator=generator)

    def norm() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=dtype, device=device)

    heads = shape.query_heads * shape.head_dim
    layers = tuple(
        LayerWeights(
            norm(),
            drawn(heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
            drawn(shape.hidden, heads),
            norm(),
            drawn(2 * shape.intermediate, shape.hidden),
            drawn(shape.hidden, shape.intermediate),
        )
        for _ in range(shape.layers)
    )
    embedding = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype, device=device)
    embedding.normal_(0.0, 1.0, generator=generator)
    head = drawn(shape.vocabulary, shape.hidden)
    return ModelWeights(shape, embedding, layers, norm(), head)


def converted(weights: ModelWeights, dtype: torch.dtype, device: str) -> ModelWeights:
    """The same numbers in another dtype, on another device."""

    def to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype)

    layers = tuple(
        LayerWeights(**{name: to(each) for name, each in vars(layer).items()})
        for layer in weights.layers
    )
    return ModelWeights(
        weights.shape, to(weights.embedding), layers, to(weights.norm), to(weights.head)
    )


def weights_of(shape: ModelShape, state: Mapping[str, torch.Tensor]) -> ModelWeights:
    """Of ``LlamaForCausalLM.state_dict()``, whose embeddings may serve as its output."""

    def layer(number: int) -> LayerWeights:
        def named(name: str) -> torch.Tensor:
            return state[f"model.layers.{number}.{name}.weight"]

        qkv = [named(f"self_attn.{name}_proj") for name in "qkv"]
        return LayerWeights(
            named("input_layernorm"),
            torch.cat(qkv),
            named("self_attn.o_proj"),
            named("post_attention_layernorm"),
            torch.cat([named("mlp.gate_proj"), named("mlp.up_proj")]),
            named("mlp.down_proj"),
        )

    embedding = state["model.embed_tokens.weight"]
    return ModelWeights(
        shape,
        embedding,
        tuple(layer(number) for number in range(shape.layers)),
        state["model.norm.weight"],
        state.get("lm_head.weight", embedding),
    )
