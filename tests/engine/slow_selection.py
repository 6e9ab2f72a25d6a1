"""What the selectors look at and choose, worked out token by token with the plain reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from reference import Match, Reference, continues

#: The default: the last rows before the output that are looked at.
MOST_LOOKERS = 32


@dataclass(frozen=True)
class Case:
    """One prompt without a prefix, and the donors that were placed for it."""

    reference: Reference
    prompt: Sequence[int]
    matches: Sequence[Match]
    ratio: float
    seam_tokens: int
    tail_tokens: int
    most_lookers: int = MOST_LOOKERS

    @property
    def placed(self) -> dict[int, tuple[tuple[int, ...], int]]:
        return {
            match.start + offset: (match.donor, match.source + offset)
            for match in self.matches
            for offset in range(match.length)
        }

    @property
    def forced(self) -> set[int]:
        if self.ratio == 0:
            return set()
        seams, first = set(), 0
        for number, match in enumerate(self.matches):
            first = first if continues(self.matches, number) else match.start
            seams |= {
                position
                for position in range(match.start, match.start + match.length)
                if position < first + self.seam_tokens
            }
        tail = range(len(self.prompt) - self.tail_tokens, len(self.prompt))
        return seams | (set(tail) & set(self.placed))

    @property
    def lookers(self) -> list[int]:
        """Rows that are not reused, or are computed in any case."""
        spare = set(self.placed) - self.forced
        return [p for p in range(len(self.prompt)) if p not in spare][-self.most_lookers :]

    @property
    def probe_rows(self) -> list[int]:
        """Behind the last span, or the tail where that reaches into it."""
        end = len(self.prompt)
        last = self.matches[-1]
        start = min(last.start + last.length, end - max(1, self.tail_tokens))
        return list(range(max(start, end - self.most_lookers), end))

    @property
    def probe_layers(self) -> range:
        layers = self.reference.model.layers
        return range(layers // 2, math.ceil(layers * 5 / 6))

    def moved(self, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key (not rotated) and value of the donor."""
        donor, source = self.placed[position]
        row = self.reference.full(donor)
        return row.keys[layer][source], row.values[layer][source]

    def fresh(self, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.reference.full(self.prompt)
        return row.keys[layer][position], row.values[layer][position]

    # --- signals -------------------------------------------------------------------------------

    def value_l1(self, layer: int) -> dict[int, float]:
        return {
            p: float((self.moved(layer, p)[1] - self.fresh(layer, p)[1]).abs().sum())
            for p in self.placed
        }

    def relative(self, layer: int) -> dict[int, float]:
        """Of the fresh value's size."""
        off = self.value_l1(layer)
        return {p: off[p] / float(self.fresh(layer, p)[1].abs().sum()) for p in self.placed}

    def value_l2(self, layer: int) -> dict[int, float]:
        return {
            p: float((self.moved(layer, p)[1] - self.fresh(layer, p)[1]).square().sum())
            for p in self.placed
        }

    def value_l2_of_heads(self, layer: int) -> list[dict[int, float]]:
        """Of each key head alone."""
        off = {p: self.moved(layer, p)[1] - self.fresh(layer, p)[1] for p in self.placed}
        heads = self.reference.model.kv_heads
        return [
            {p: float(values[head].square().sum()) for p, values in off.items()}
            for head in range(heads)
        ]

    def key_l2(self, layer: int) -> dict[int, float]:
        return {
            p: float((self.moved(layer, p)[0] - self.fresh(layer, p)[0]).square().sum())
            for p in self.placed
        }

    def check_attention(self, layer: int) -> dict[int, float]:
        weights = self._weights(layer, self.lookers)
        return {p: float(weights[:, :, p].sum() / weights.shape[1]) for p in self.placed}

    def influence(self, layer: int) -> dict[int, float]:
        """By definition, with the output of every row and head in hand."""
        reference, model = self.reference, self.reference.model
        full = reference.full(self.prompt)
        weights = self._weights(layer, self.lookers)
        group = model.heads // model.kv_heads
        queries = self._queries(layer, self.lookers)
        told = {}
        for p in self.placed:
            old_k, old_v = self.moved(layer, p)
            new_k, new_v = self.fresh(layer, p)
            at = torch.tensor([p])
            change_k = reference._rotate((old_k - new_k).unsqueeze(0), at)[0]
            change_v = old_v - new_v
            total = 0.0
            for row in range(len(self.lookers)):
                for head in range(model.heads):
                    kv = head // group
                    weight = weights[row, head, p]
                    out = weights[row, head] @ full.values[layer][:, kv]
                    turned = float((queries[row, head] @ change_k[kv]).abs())
                    moved = float((new_v[kv] - out).norm()) * turned / math.sqrt(model.head_dim)
                    total += float(weight) * (float(change_v[kv].norm()) + moved)
            told[p] = total
        return told

    def probe_attention(self) -> dict[int, float]:
        return self._probed()[0]

    def contribution(self) -> dict[int, float]:
        return self._probed()[1]

    def _probed(self) -> tuple[dict[int, float], dict[int, float]]:
        """A pass of the rows behind the last span over what has keys by then: the attention of each
        reused token, and that times the size of its value, layer by layer and head by head, over
        the layers from the half to five sixths."""
        reference, model = self.reference, self.reference.model
        rows = self.probe_rows
        start = rows[0]
        seen = sorted(p for p in self.placed if p < start) + rows
        hidden = reference.weights["model.embed_tokens.weight"][
            torch.tensor([self.prompt[p] for p in rows])
        ]
        mass, taken_up = dict.fromkeys(self.placed, 0.0), dict.fromkeys(self.placed, 0.0)
        group = model.heads // model.kv_heads
        counted = self.probe_layers
        for layer in range(counted.stop):
            normed = reference._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
            query, key, value = reference._qkv(layer, normed)
            keys, values = [], []
            for p in seen:
                k, v = (
                    (key[rows.index(p)], value[rows.index(p)])
                    if p >= start
                    else self.moved(layer, p)
                )
                keys.append(reference._rotate(k.unsqueeze(0), torch.tensor([p]))[0])
                values.append(v)
            turned = reference._rotate(query, torch.tensor(rows))
            stacked_k = torch.stack(keys).repeat_interleave(group, 1)
            stacked_v = torch.stack(values).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->qhk", turned, stacked_k) / math.sqrt(model.head_dim)
            hidden_ = torch.tensor([[s > p for s in seen] for p in rows])
            weights = scores.masked_fill(hidden_[:, None], float("-inf")).softmax(-1)
            for index, p in enumerate(seen):
                if p < start and layer in counted:
                    mass[p] += float(weights[:, :, index].sum()) / model.heads
                    sizes = stacked_v[index].abs().sum(1)
                    taken_up[p] += float((weights[:, :, index] * sizes).sum()) / model.heads
            out = torch.einsum("qhk,khd->qhd", weights, stacked_v).reshape(len(rows), -1)
            hidden = reference._after_attention(layer, hidden, out)
        return mass, taken_up

    # --- choice ---------------------------------------------------------------------------------

    def spared(self, scores: dict[int, float]) -> dict[int, tuple[tuple[int, ...], int]]:
        """What is left as it is when the best of ``scores`` fill the ratio up."""
        placed = self.placed
        if self.ratio in (0, 1):
            return placed if self.ratio == 0 else {}
        chosen = set(self.forced)
        count = math.ceil(self.ratio * len(placed))
        for p in sorted(placed, key=lambda p: (-scores[p], p)):
            if len(chosen) < count and p not in chosen and scores[p] > 0:
                chosen.add(p)
        return {p: donor for p, donor in placed.items() if p not in chosen}

    # --- attention at a layer of a full forward ------------------------------------------------

    def _queries(self, layer: int, rows: list[int]) -> torch.Tensor:
        """``[rows, heads, head_dim]``, rotated."""
        reference = self.reference
        full = reference.full(self.prompt)
        at = torch.arange(len(self.prompt))
        hidden = reference.weights["model.embed_tokens.weight"][torch.tensor(list(self.prompt))]
        for number in range(layer + 1):
            normed = reference._norm(hidden, f"model.layers.{number}.input_layernorm.weight")
            query, _, _ = reference._qkv(number, normed)
            if number < layer:
                out = reference._attend(query, at, full.keys[number], full.values[number])
                hidden = reference._after_attention(number, hidden, out)
        return reference._rotate(query, at)[torch.tensor(rows)]

    def _weights(self, layer: int, rows: list[int]) -> torch.Tensor:
        """``[rows, heads, tokens]``."""
        reference, model = self.reference, self.reference.model
        keys = reference.full(self.prompt).keys[layer]
        at = torch.arange(len(self.prompt))
        turned = reference._rotate(keys, at).repeat_interleave(model.heads // model.kv_heads, 1)
        queries = self._queries(layer, rows)
        scores = torch.einsum("qhd,khd->qhk", queries, turned) / math.sqrt(model.head_dim)
        later = at > torch.tensor(rows)[:, None, None]
        return scores.masked_fill(later, float("-inf")).softmax(-1)
