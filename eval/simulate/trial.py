"""One prompt in the plain model with the values of donors in place, and how far that is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from kvshare_eval.loaders import DataSource
from kvshare_eval.quality.cases import Prompt
from kvshare_eval.quality.tasks import find_task
from kvshare_eval.simulate.plain_model import Layer, PlainModel, Watched
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.plan import Int64Array, ReusePlan

T = TypeVar("T")

MIN_RUN_TOKENS = 16
ANSWER_TOKENS = 12
RATIO = 0.2
#: The mean over all layers.
ALL = "all"


@dataclass(frozen=True)
class Donor:
    """A prompt that was computed in full.

    Attributes:
        outside: for each name fp32 ``[tokens, tokens + 1]``: ``outside[name][p, s]`` is the share
            of the attention of token ``p`` that went to tokens ``[1, s)``, as a mean over all
            layers or in one of them.
    """

    ids: list[int]
    cache: list[Layer]
    outside: dict[str, torch.Tensor]


def donor_of(model: PlainModel, ids: list[int]) -> Donor:
    cache = model.empty(len(ids))
    lean: list[torch.Tensor] = []
    model.run(ids, torch.arange(len(ids)), cache, lean=lean)
    of = {ALL: torch.stack(lean).mean(0)}
    of |= {str(number): lean[number].clone() for number in _some(model.layers)}
    outside = {}
    for name, attention in of.items():
        attention[:, 0] = 0
        outside[name] = torch.cat([torch.zeros(len(ids), 1), attention.cumsum(1)], 1)
    return Donor(ids, cache, outside)


def _some(layers: int) -> list[int]:
    """Layers whose attention alone is tried."""
    return [layers * share // 6 for share in (1, 2, 3)]


@dataclass(frozen=True)
class Reused:
    """Where the tokens of a prompt have a donor: int64 ``[m]``; ``leans`` are fp64 ``[m]``."""

    positions: Int64Array
    sources: Int64Array
    span: Int64Array
    leans: dict[str, np.ndarray]

    def only(self, mask: Any) -> Reused:
        leans = {name: lean[mask] for name, lean in self.leans.items()}
        return Reused(self.positions[mask], self.sources[mask], self.span[mask], leans)


def reused(donor: Donor, ids: Sequence[int]) -> Reused:
    plan = _plan(donor.ids, ids)
    lengths = np.array([s.length for s in plan.spans], dtype=np.int64)
    spans = np.repeat(np.arange(len(lengths)), lengths)
    begins = [s.source for s in plan.spans]
    sources = plan.slots()
    before = np.array(begins, dtype=np.int64)[spans]
    leans = {
        name: outside[sources, before].double().numpy() for name, outside in donor.outside.items()
    }
    return Reused(plan.positions(), sources, spans, leans)


def _plan(donor: Sequence[int], ids: Sequence[int]) -> ReusePlan:
    """Slots are positions of the donor."""
    index = RunIndex(len(donor), MIN_RUN_TOKENS)
    tokens = np.array(donor, dtype=np.int64)
    index.insert(1, b"", tokens, np.arange(len(donor)), -1, position=0, depth=0)
    equal = [a == b for a, b in zip(donor, ids, strict=False)]
    prefix = equal.index(False) if False in equal else len(equal)
    return plan_reuse(index, np.array(ids, dtype=np.int64), prefix, b"", 4)


def apart(options: list[tuple[Donor, Reused]]) -> list[tuple[Donor, Reused]]:
    """One entry a span, none of which holds a position of another."""
    taken: set[int] = set()
    parts = []
    for donor, found in options:
        for span in np.unique(found.span):
            part = found.only(found.span == span)
            if taken.isdisjoint(part.positions.tolist()):
                taken.update(part.positions.tolist())
                parts.append((donor, part))
    return parts


@dataclass(frozen=True)
class Truth:
    """Full recompute of a prompt and its own first tokens behind it."""

    prompt: list[int]
    answer: list[int]
    logprobs: torch.Tensor
    cache: list[Layer]


def truth_of(model: PlainModel, prompt: list[int], answer_tokens: int = ANSWER_TOKENS) -> Truth:
    longest = len(prompt) + answer_tokens
    cache = model.empty(longest)

    def part(tokens: int) -> list[Layer]:
        return [Layer(layer.keys[:tokens], layer.values[:tokens]) for layer in cache]

    ids, told = list(prompt), []
    rows = torch.arange(len(prompt))
    for _ in range(answer_tokens):
        logprobs, _ = model.run(ids, rows, part(len(ids)))
        told.append(logprobs[-1])
        ids.append(int(told[-1].argmax()))
        rows = torch.tensor([len(ids) - 1])
    return Truth(list(prompt), ids[len(prompt) :], torch.stack(told), cache)


class Trial:
    """One prompt with the values of its donors in place."""

    def __init__(self, model: PlainModel, truth: Truth, choice: Sequence[tuple[Donor, Reused]]):
        self.model, self.truth = model, truth
        self.ids = truth.prompt + truth.answer[:-1]
        self.positions = np.concatenate([r.positions for _, r in choice])
        names = choice[0][1].leans
        self.leans = {name: np.concatenate([r.leans[name] for _, r in choice]) for name in names}
        self._cache = [
            Layer(layer.keys[: len(self.ids)].clone(), layer.values[: len(self.ids)].clone())
            for layer in truth.cache
        ]
        for donor, part in choice:
            at, of = torch.from_numpy(part.positions), torch.from_numpy(part.sources)
            for mine, its in zip(self._cache, donor.cache, strict=True):
                mine.keys[at], mine.values[at] = its.keys[of], its.values[of]

    def divergence(self, recompute: Int64Array) -> float:
        """Mean KL from full recompute over the answer, nats."""
        spared = np.setdiff1d(self.positions, recompute)
        rows = np.setdiff1d(np.arange(self._first, len(self.ids)), spared)
        start = len(self.truth.prompt) - 1
        cache = [Layer(layer.keys.clone(), layer.values.clone()) for layer in self._cache]
        told, _ = self.model.run(self.ids, torch.from_numpy(rows), cache, logits_from=start)
        true = self.truth.logprobs
        return float((true.exp() * (true - told)).sum(1).mean())

    def decoded(self, recompute: Int64Array, refresh: Int64Array, rows_a_step: int) -> list[float]:
        """KL from full recompute at each token of the answer, decoded one by one.

        Args:
            refresh: positions that are recomputed while decoding, in this order.
            rows_a_step: so many of them beside each token; 0 for none.
        """
        prompt = len(self.truth.prompt)
        spared = np.setdiff1d(self.positions, recompute)
        rows = np.setdiff1d(np.arange(self._first, prompt), spared)
        cache = [Layer(layer.keys.clone(), layer.values.clone()) for layer in self._cache]
        waiting, told = refresh.tolist(), []
        for length in range(prompt, len(self.ids) + 1):
            part = [Layer(layer.keys[:length], layer.values[:length]) for layer in cache]
            at = torch.from_numpy(rows)
            logprobs, _ = self.model.run(self.ids[:length], at, part, logits_from=length - 1)
            true = self.truth.logprobs[length - prompt]
            told.append(float((true.exp() * (true - logprobs[-1])).sum()))
            taken, waiting = waiting[:rows_a_step], waiting[rows_a_step:]
            rows = np.array([*sorted(taken), length], dtype=np.int64)
        return told

    @property
    def _first(self) -> int:
        return int(self.positions.min())

    def contribution(self) -> np.ndarray:
        """What the rows behind the last span take up of each reused token."""
        taken_up: np.ndarray = self.watched().contribution.sum(0).double().numpy()
        return taken_up[self.positions]

    def watched(self) -> Watched:
        """What the rows behind the last span see."""
        prompt = len(self.truth.prompt)
        rows = np.arange(int(self.positions.max()) + 1, prompt)
        cache = [Layer(x.keys[:prompt].clone(), x.values[:prompt].clone()) for x in self._cache]
        at = torch.from_numpy(rows)
        _, watched = self.model.run(self.ids[:prompt], at, cache, watch=at)
        assert watched is not None
        return watched

    def best(self, scores: np.ndarray, ratio: float = RATIO) -> Int64Array:
        """The positions of the best scores."""
        count = int(np.ceil(ratio * len(self.positions)))
        return self.positions[np.argsort(-scores, kind="stable")[:count]]


def token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """As a server makes them: a chat by the model's template, a text as it stands."""
    if prompt.text:
        return list(tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def collect(
    measure: Callable[[list[int], list[list[int]]], T | None],
    *,
    tokenizer: Any,
    data: Path | None,
    task: str,
    cases: int,
    shown: Callable[[T], object] = lambda figures: figures,
) -> list[T]:
    """``measure(prompt, history)`` of the first case of each group, as token ids, until so many
    gave figures; ``None`` gives none. Prints ``shown`` of each."""
    found, options = find_task(task)
    told: list[T] = []
    for group in found.groups(DataSource(data), 1, options):
        if len(told) == cases:
            break
        prompt = token_ids(tokenizer, group.cases[0].prompt)
        figures = measure(prompt, [token_ids(tokenizer, one) for one in group.history])
        if figures is not None:
            told.append(figures)
            print(len(told), shown(figures), flush=True)
    return told


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(figure, 4) for name, figure in figures.items()}
