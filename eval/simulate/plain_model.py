"""A Llama- or Qwen2-like model in plain PyTorch whose rows and cached values are at one's disposal.

For experiments only: no server, no paging, keys kept without rotation and rotated anew wherever
they are attended to. ``tests/engine/reference.py`` is its independent twin for the tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


@dataclass
class Layer:
    """Values of one layer, fp32 ``[tokens, kv_heads, head_dim]``; keys are not rotated."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Watched:
    """What some rows looked at, summed over them.

    Attributes:
        attention: fp32 ``[layers, tokens]``, mean over heads.
        contribution: the same, each key head times the L1 norm of its value.
    """

    attention: torch.Tensor
    contribution: torch.Tensor


class PlainModel:
    """Reads a folder of safetensors; computes in fp32."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: tensor.float()
            for part in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(part).items()
        }
        self.layers = int(self.config["num_hidden_layers"])
        self.heads = int(self.config["num_attention_heads"])
        self.kv_heads = int(self.config["num_key_value_heads"])
        hidden = int(self.config["hidden_size"])
        self.head_dim = int(self.config.get("head_dim") or hidden // self.heads)
        theta = float(
            self.config.get("rope_theta")
            or (self.config.get("rope_parameters") or {}).get("rope_theta", 1e4)
        )
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        self._frequencies = theta**-exponents
        self._eps = float(self.config["rms_norm_eps"])

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        rows: torch.Tensor,
        cache: list[Layer],
        watch: torch.Tensor | None = None,
        lean: list[torch.Tensor] | None = None,
        logits_from: int | None = None,
    ) -> tuple[torch.Tensor, Watched | None]:
        """Compute ``rows`` (ascending positions of ``ids``) over ``cache`` and write them there.

        Args:
            cache: of every layer, as long as ``ids``; positions that neither have a value nor are
                computed must not exist.
            watch: positions of rows whose attention is summed up.
            lean: receives of each layer the attention matrix, ``[rows, tokens]``, mean over heads.
            logits_from: first position whose logits are told; only the last by default.

        Returns:
            log-probabilities ``[scored, vocab]`` and what the watched rows saw.
        """
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor([ids[r] for r in rows])]
        positions = torch.arange(len(ids))
        hide = positions > rows[:, None]
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        picked = None if watch is None else torch.isin(rows, watch)
        group = self.heads // self.kv_heads
        for number, layer in enumerate(cache):
            name = f"model.layers.{number}."
            x = self._norm(hidden, name + "input_layernorm.weight")
            q, k, v = (self._projected(x, f"{name}self_attn.{part}_proj") for part in "qkv")
            layer.keys[rows], layer.values[rows] = k, v
            keys = self._rotated(layer.keys, positions).movedim(0, 1)
            queries = self._rotated(q, rows).movedim(0, 1).unflatten(0, (self.kv_heads, group))
            scores = queries @ keys.transpose(1, 2)[:, None] * self.head_dim**-0.5
            weights = scores.masked_fill(hide, float("-inf")).softmax(-1)
            if picked is not None:
                mass = weights[:, :, picked].sum((1, 2)) / self.heads
                size = layer.values.abs().sum(2).T
                seen.append((mass.sum(0), (mass * size).sum(0)))
            if lean is not None:
                lean.append(weights.mean((0, 1)))
            out = weights @ layer.values.movedim(0, 1)[:, None]
            out = out.flatten(0, 1).movedim(0, 1).flatten(1)
            hidden = hidden + out @ self.weights[f"{name}self_attn.o_proj.weight"].T
            x = self._norm(hidden, name + "post_attention_layernorm.weight")
            gate, up = (x @ self.weights[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = torch.nn.functional.silu(gate) * up
            hidden = hidden + x @ self.weights[f"{name}mlp.down_proj.weight"].T
        scored = rows >= (len(ids) - 1 if logits_from is None else logits_from)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        out = self._norm(hidden[scored], "model.norm.weight") @ head.T
        told = Watched(*map(torch.stack, zip(*seen, strict=True))) if seen else None
        return out.log_softmax(-1), told

    def empty(self, tokens: int) -> list[Layer]:
        """A cache without values."""
        shape = (tokens, self.kv_heads, self.head_dim)
        return [Layer(torch.zeros(shape), torch.zeros(shape)) for _ in range(self.layers)]

    def _projected(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self.weights[name + ".weight"].T
        if name + ".bias" in self.weights:
            out = out + self.weights[name + ".bias"]
        return out.unflatten(1, (-1, self.head_dim))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self.weights[name]

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions[:, None].double() * self._frequencies)[:, None]
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
