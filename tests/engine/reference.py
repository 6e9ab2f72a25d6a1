"""A slow, clear model in plain PyTorch that can do what a reusing server does, in the same words.

It shares no code with SGLang or KVShare. Keys are kept without rotation and rotated from scratch
at the position where they are attended to, so that a placed key is right by construction. Where
the pool is FP8, what is kept is what un-rotating the stored key would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tiny_models import TinyModel


@dataclass(frozen=True)
class Match:
    """Prompt ``[start, start + length)`` equals ``donor[source : source + length]``."""

    start: int
    source: int
    length: int
    donor: tuple[int, ...]


@dataclass
class Row:
    """The KV row of one request.

    Attributes:
        tokens: what has been fed.
        keys, values: one tensor ``[n, kv_heads, head_dim]`` a layer; keys are not rotated.
        logits: ``[vocab]`` after the last token.
    """

    tokens: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    logits: torch.Tensor = field(repr=False)

    def logprobs(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)


class Reference:
    """``kv_dtype``: of the pool; ``None`` for that of the computation."""

    def __init__(self, model: TinyModel, kv_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.kv_dtype = kv_dtype
        self.weights = model.weights()
        self.frequencies = _frequencies(model)
        self.rope_scale = _rope_scale(model)
        self._donors: dict[tuple[int, ...], Row] = {}

    def full(self, tokens: Sequence[int]) -> Row:
        """Everything computed, nothing reused."""
        key = tuple(tokens)
        if key not in self._donors:
            self._donors[key] = self.approximate(tokens, {}, 0)
        return self._donors[key]

    def approximate(
        self,
        tokens: Sequence[int],
        spared: dict[int, tuple[tuple[int, ...] | Row, int]],
        narrow_layer: int,
    ) -> Row:
        """A prefill in which the rows ``spared`` do not run from ``narrow_layer`` on.

        Args:
            spared: position -> (donor, position in the donor); its keys and values from
                ``narrow_layer`` on are the donor's: those of its row, or of a full prefill of its
                tokens.
        """
        count = len(tokens)
        active = torch.arange(count)
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        keys, values = [], []
        for layer in range(self.model.layers):
            if layer == narrow_layer:
                kept = torch.tensor([p for p in range(count) if p not in spared])
                active, hidden = kept, hidden[kept]
            normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
            query, key, value = self._qkv(layer, normed)
            row_keys = key.new_zeros(count, *key.shape[1:])
            row_values = torch.zeros_like(row_keys)
            row_keys[active], row_values[active] = self._keep(key, active), self._quantised(value)
            if layer >= narrow_layer:
                for position, (donor, source) in spared.items():
                    row = donor if isinstance(donor, Row) else self.full(donor)
                    moved = row.keys[layer][source : source + 1]
                    row_keys[position] = self._keep(moved, torch.tensor([position]))[0]
                    row_values[position] = row.values[layer][source]
            keys.append(row_keys)
            values.append(row_values)
            hidden = self._after_attention(
                layer, hidden, self._attend(query, active, row_keys, row_values)
            )
        assert int(active[-1]) == count - 1
        return Row(list(tokens), keys, values, self._logits(hidden[-1]))

    def decode(self, row: Row, token: int, refresh: Sequence[int] = ()) -> None:
        """Feed one more token; the row grows. ``refresh``: positions that are computed again beside
        it, their keys and values replaced in every layer before anything attends to them."""
        at = torch.tensor([*refresh, len(row.tokens)])
        row.tokens.append(token)
        hidden = self.weights["model.embed_tokens.weight"][
            torch.tensor([row.tokens[p] for p in at.tolist()])
        ]
        for layer in range(self.model.layers):
            normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
            query, key, value = self._qkv(layer, normed)
            one_more = row.keys[layer].new_zeros(1, *row.keys[layer].shape[1:])
            row.keys[layer] = torch.cat([row.keys[layer], one_more])
            row.values[layer] = torch.cat([row.values[layer], one_more])
            row.keys[layer][at] = self._keep(key, at)
            row.values[layer][at] = self._quantised(value)
            hidden = self._after_attention(
                layer, hidden, self._attend(query, at, row.keys[layer], row.values[layer])
            )
        row.logits = self._logits(hidden[-1])

    def extend(self, row: Row, tokens: Sequence[int]) -> Row:
        """A copy of ``row`` with ``tokens`` computed behind it."""
        grown = Row(list(row.tokens), list(row.keys), list(row.values), row.logits)
        for token in tokens:
            self.decode(grown, token)
        return grown

    def all_logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[n, vocab]``: log-probabilities after every token, from one full computation."""
        at = torch.arange(len(tokens))
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(self.model.layers):
            normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
            query, key, value = self._qkv(layer, normed)
            hidden = self._after_attention(layer, hidden, self._attend(query, at, key, value))
        return self._logits(hidden).log_softmax(-1)

    # --- parts of a decoder layer -------------------------------------------------------------

    def _qkv(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prefix = f"model.layers.{layer}.self_attn."
        parts = []
        for name, heads in (
            ("q", self.model.heads),
            ("k", self.model.kv_heads),
            ("v", self.model.kv_heads),
        ):
            part = x @ self.weights[f"{prefix}{name}_proj.weight"].T
            if self.model.bias:
                part = part + self.weights[f"{prefix}{name}_proj.bias"]
            part = part.view(-1, heads, self.model.head_dim)
            if self.model.qk_norm and name != "v":
                part = self._norm(part, f"{prefix}{name}_norm.weight")
            if name != "v":
                # YaRN's attention scale, on what is rotated.
                rotary_dim = 2 * self.frequencies.shape[0]
                part = torch.cat(
                    [part[..., :rotary_dim] * self.rope_scale, part[..., rotary_dim:]], dim=-1
                )
            parts.append(part)
        return parts[0], parts[1], parts[2]

    def _attend(
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Each row sees exactly the keys up to its own position."""
        group = self.model.heads // self.model.kv_heads
        at = torch.arange(keys.shape[0])
        turned = self._rotate(keys, at).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", self._rotate(query, positions), turned)
        scores = scores / math.sqrt(self.model.head_dim)
        scores = scores.masked_fill(at > positions[:, None], float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))
        return out.reshape(query.shape[0], -1)

    def _after_attention(self, layer: int, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        prefix = f"model.layers.{layer}."
        out = out @ self.weights[prefix + "self_attn.o_proj.weight"].T
        if self.model.sandwich_norm:
            out = self._norm(out, prefix + "post_self_attn_layernorm.weight")
        hidden = hidden + out
        x = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(x @ self.weights[prefix + "mlp.gate_proj.weight"].T)
        up = x @ self.weights[prefix + "mlp.up_proj.weight"].T
        out = (gate * up) @ self.weights[prefix + "mlp.down_proj.weight"].T
        if self.model.sandwich_norm:
            out = self._norm(out, prefix + "post_mlp_layernorm.weight")
        return hidden + out

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, "model.norm.weight") @ self.weights["lm_head.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weights[name]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor, sign: int = 1) -> torch.Tensor:
        angles = (sign * positions[:, None].double() * self.frequencies).unsqueeze(1)
        cos, sin = angles.cos().float(), angles.sin().float()
        half = self.frequencies.shape[0]
        out = x.clone()
        for pair in range(half):
            i, j = (2 * pair, 2 * pair + 1) if self.model.gptj else (pair, pair + half)
            out[..., i] = x[..., i] * cos[..., pair] - x[..., j] * sin[..., pair]
            out[..., j] = x[..., j] * cos[..., pair] + x[..., i] * sin[..., pair]
        return out

    # --- what an FP8 pool does ----------------------------------------------------------------

    def _keep(self, key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A key written to the pool at its position, brought back to position 0."""
        if self.kv_dtype is None:
            return key
        return self._rotate(self._quantised(self._rotate(key, positions)), positions, sign=-1)

    def _quantised(self, x: torch.Tensor) -> torch.Tensor:
        if self.kv_dtype is None:
            return x
        limit = torch.finfo(self.kv_dtype).max
        return x.clamp(-limit, limit).to(self.kv_dtype).float()


def _frequencies(model: TinyModel) -> torch.Tensor:
    """float64 ``[rotary_dim / 2]``: angle of each pair at position 1."""
    dim = int(model.head_dim * model.partial_rotary_factor)
    exponents = -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    plain = model.rope_theta**exponents
    scaling = model.rope_scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    if kind == "default":
        return plain
    factor = scaling["factor"]
    if kind == "linear":
        return plain / factor
    if kind == "dynamic":
        # The base for the longest length that the scaling is made for, `CONTEXT * factor`.
        stretched = factor * factor - (factor - 1)
        return (model.rope_theta * stretched ** (dim / (dim - 2))) ** exponents
    original = scaling["original_max_position_embeddings"]
    if kind == "yarn":
        # Dimensions that turn over 32 times in the original length stay, under once are divided.
        def dimension(turns: float) -> float:
            return (
                dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))
            )

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return plain / factor * ramp + plain * (1 - ramp)
    assert kind == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain


def _rope_scale(model: TinyModel) -> float:
    """YaRN's factor on queries and keys alike."""
    scaling = model.rope_scaling or {"rope_type": "default"}
    return 1 + 0.1 * math.log(scaling["factor"]) if scaling["rope_type"] == "yarn" else 1.0


def spared_positions(
    matches: Sequence[Match],
    prompt_tokens: int,
    *,
    ratio: float,
    seam_tokens: int,
    tail_tokens: int,
) -> dict[int, tuple[tuple[int, ...], int]]:
    """The documented selection, token by token: which matched positions are not recomputed.

    Ratio 0 recomputes none and ratio 1 all; in between the first ``max(seam, ceil(ratio * m))``
    of each span of ``m`` tokens and the prompt's last ``tail_tokens``. Spans that continue the one
    before have what is left of its seam.
    """
    spared, first = {}, 0
    for number, match in enumerate(matches):
        first = first if continues(matches, number) else match.start
        seam = max(0, first + seam_tokens - match.start)
        width = max(seam, math.ceil(ratio * match.length))
        for offset in range(match.length):
            position = match.start + offset
            in_seam = offset < width
            in_tail = position >= prompt_tokens - tail_tokens
            if ratio >= 1 or (ratio > 0 and (in_seam or in_tail)):
                continue
            spared[position] = (match.donor, match.source + offset)
    return spared


def continues(matches: Sequence[Match], number: int) -> bool:
    """Only edits of at most eight tokens lie between a match and the one before it, in the prompt
    and in their common donor."""
    if number == 0:
        return False
    before, match = matches[number - 1], matches[number]
    edited = match.start - before.start - before.length
    dropped = match.source - before.source - before.length
    return before.donor == match.donor and 0 <= edited <= 8 and 0 <= dropped <= 8
