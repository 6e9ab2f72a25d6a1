"""Llama-class models by their dimensions, and the work of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What a decoder of the Llama family is made of; nothing has a bias.

    Attributes:
        rope_theta: base of the rotary frequencies, paired neox, without scaling.
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.query_heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor on the logits of attention."""
        return float(self.head_dim**-0.5)

    @property
    def qkv_parameters(self) -> int:
        """Of one layer: what keys, values and queries are computed with."""
        return self.hidden * (self.query_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def other_parameters(self) -> int:
        """Of one layer: what follows its attention."""
        return self.hidden * (self.query_heads * self.head_dim + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """Of all layers and of the output; embeddings are looked up, not multiplied."""
        layer = self.qkv_parameters + self.other_parameters
        return self.layers * layer + self.hidden * self.vocabulary

    @property
    def pair_operations(self) -> int:
        """Of attention in one layer, for each row and each key that it sees: two products."""
        return 4 * self.query_heads * self.head_dim

    def token_bytes(self, itemsize: int) -> int:
        """Keys and values of a token in one layer, of ``itemsize`` bytes a number."""
        return 2 * self.kv_heads * self.head_dim * itemsize


#: Llama-3.2-1B and Llama-3-8B, by their published configurations.
LLAMA_1B = ModelShape("1B", 16, 2048, 32, 8, 64, 8192, 128_256)
LLAMA_8B = ModelShape("8B", 32, 4096, 32, 8, 128, 14_336, 128_256)
#: For a CPU, and for checks.
TINY = ModelShape("tiny", 4, 64, 4, 2, 16, 96, 128, rope_theta=10_000.0)
#: Wide enough for the kernels' and FlashInfer's sizes of heads.
SMALL = ModelShape("small", 4, 512, 8, 2, 128, 1024, 1024)
