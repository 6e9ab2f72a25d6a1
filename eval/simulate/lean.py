"""Does it help to know how much a cached token leaned on what stood before its passage?

Cache-Craft (arXiv 2502.15734) keeps with each chunk how much it attended to its old prefix. Here
the lean of a reused token is the share of its attention, in its donor, that went to tokens before
the span (the first token left out: it is a sink), as a mean over heads and over all layers: the
best that could be stored. Two uses are tried on the task ``squad``: as a score for the selection,
and to prefer one of two donors for the same passage.

    python -m kvshare_eval.simulate.lean --model DIR [--data DIR] [--cases 60]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from kvshare_eval.loaders import DataSource
from kvshare_eval.quality.cases import Prompt
from kvshare_eval.quality.tasks import find_task
from kvshare_eval.simulate.plain_model import Layer, PlainModel
from kvshare_eval.stats.paired import geometric_mean_ratio
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.plan import Int64Array, ReusePlan

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
    cache, lean = model.empty(len(ids)), []
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
    spans = np.concatenate([[i] * s.length for i, s in enumerate(plan.spans)]).astype(np.int64)
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


@dataclass(frozen=True)
class Truth:
    """Full recompute of a prompt and its own first tokens behind it."""

    prompt: list[int]
    answer: list[int]
    logprobs: torch.Tensor
    cache: list[Layer]


def truth_of(model: PlainModel, prompt: list[int]) -> Truth:
    longest = len(prompt) + ANSWER_TOKENS
    cache = model.empty(longest)

    def part(tokens: int) -> list[Layer]:
        return [Layer(layer.keys[:tokens], layer.values[:tokens]) for layer in cache]

    ids, told = list(prompt), []
    rows = torch.arange(len(prompt))
    for _ in range(ANSWER_TOKENS):
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

    @property
    def _first(self) -> int:
        return int(self.positions.min())

    def contribution(self) -> np.ndarray:
        """What the rows behind the last span take up of each reused token."""
        prompt = len(self.truth.prompt)
        rows = np.arange(int(self.positions.max()) + 1, prompt)
        cache = [Layer(x.keys[:prompt].clone(), x.values[:prompt].clone()) for x in self._cache]
        at = torch.from_numpy(rows)
        _, watched = self.model.run(self.ids[:prompt], at, cache, watch=at)
        assert watched is not None
        return watched.contribution.sum(0).double().numpy()[self.positions]

    def best(self, scores: np.ndarray) -> Int64Array:
        count = int(np.ceil(RATIO * len(self.positions)))
        return self.positions[np.argsort(-scores, kind="stable")[:count]]


def preferring(
    options: Sequence[tuple[Donor, Reused]], key: Callable[[Reused], float]
) -> list[tuple[Donor, Reused]]:
    """For each span of the first donor, of those that hold all of it the one of the lower ``key``;
    spans that only the first holds are left out."""
    (first, a), (second, b) = options
    chosen: list[tuple[Donor, Reused]] = []
    for span in np.unique(a.span):
        mine = a.span == span
        its = np.isin(b.positions, a.positions[mine])
        if its.sum() < mine.sum():
            continue
        parts = [(first, a.only(mine)), (second, b.only(its))]
        chosen.append(min(parts, key=lambda part: key(part[1])))
    return chosen


#: Which of two donors is preferred.
PREFERENCES: dict[str, Callable[[Reused], float]] = {
    "less lean": lambda part: float(part.leans[ALL].sum()),
    "more lean": lambda part: -float(part.leans[ALL].sum()),
    "earlier source": lambda part: float(part.sources[0]),
    "later source": lambda part: -float(part.sources[0]),
    "closest position": lambda part: abs(float(part.sources[0] - part.positions[0])),
}


def measure(model: PlainModel, truth: Truth, donors: Sequence[Donor]) -> dict[str, float] | None:
    """KL of each method; ``None`` where nothing is reused."""
    found = [(donor, reused(donor, truth.prompt)) for donor in donors]
    if not len(found[0][1].positions):
        return None
    trial = Trial(model, truth, found[:1])
    contribution = trial.contribution()
    nothing = np.empty(0, dtype=np.int64)
    told = {
        "none": trial.divergence(nothing),
        "contribution": trial.divergence(trial.best(contribution)),
        "lean": trial.divergence(trial.best(trial.leans[ALL])),
    }
    for name, lean in trial.leans.items():
        told[f"contribution x {name}"] = trial.divergence(trial.best(contribution * lean))
    for name, key in PREFERENCES.items():
        choice = preferring(found, key)
        if choice:
            trial = Trial(model, truth, choice)
            told[f"none, {name}"] = trial.divergence(nothing)
            best = trial.best(trial.contribution())
            told[f"contribution, {name}"] = trial.divergence(best)
    return told


def cases_of(tokenizer: Any, source: DataSource, cases: int) -> Iterator[list[list[int]]]:
    """Prompt and two donors, as token ids: the same passages in three orders."""
    task, options = find_task("squad:questions=1")
    for group in task.groups(source, 1, options):
        if len(group.cases) < 2:
            continue
        prompts = [group.cases[0].prompt, group.history[0], group.cases[1].prompt]
        yield [_ids(tokenizer, prompt) for prompt in prompts]
        cases -= 1
        if not cases:
            return


def _ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama- or Qwen2-like model.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    cases: Annotated[int, typer.Option(min=1)] = 60,
    out: Annotated[Path | None, typer.Option(help="Write every case's figures here.")] = None,
) -> None:
    """Measure, and print geometric means of the ratios with their intervals."""
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), PlainModel(model)
    told: list[dict[str, float]] = []
    for prompt, *others in cases_of(tokenizer, DataSource(data), cases):
        donors = [donor_of(plain, ids) for ids in others]
        figures = measure(plain, truth_of(plain, prompt), donors)
        if figures is not None:
            told.append(figures)
            print(len(told), {k: round(v, 4) for k, v in figures.items()}, flush=True)
    if out is not None:
        out.write_text("".join(json.dumps(figures) + "\n" for figures in told))
    alone = "contribution"
    compared = [(alone, "none"), ("lean", "none")]
    compared += [(name, alone) for name in told[0] if name.startswith("contribution x ")]
    for what in ("none", alone):
        base = f"{what}, more lean"
        compared += [(f"{what}, {name}", base) for name in PREFERENCES if name != "more lean"]
    for name, base in compared:
        pairs = [(f[name], f[base]) for f in told if name in f and base in f]
        new, old = zip(*pairs, strict=True)
        ratio = geometric_mean_ratio(new, old, list(range(len(pairs))))
        print(f"{name} / {base}: {ratio.value:.2f} [{ratio.low}, {ratio.high}], n={len(pairs)}")


if __name__ == "__main__":
    typer.run(main)
