"""Which reading of a probe pass ranks reused tokens best?

The prompt's last rows look at the placed values in every layer. What they see can be summed up in
several ways; each chooses the same number of tokens, and the divergence from full recompute that is
left is compared with that of ``contribution``.

    python -m kvshare_eval.simulate.scores --model DIR [--data DIR] [--cases 24]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from kvshare_eval.simulate.plain_model import PlainModel, Watched
from kvshare_eval.simulate.trial import Trial, collect, donor_of, reused, rounded, truth_of
from kvshare_eval.stats.paired import geometric_mean_ratio

BASE = "contribution"
#: Each from ``[layers, tokens]`` to ``[tokens]``.
SCORES: dict[str, Callable[[Watched], torch.Tensor]] = {
    BASE: lambda seen: seen.contribution.sum(0),
    "query": lambda seen: seen.attention.sum(0),
    "each layer alike": lambda seen: (
        seen.contribution / seen.contribution.sum(1, keepdim=True)
    ).sum(0),
    "roots": lambda seen: seen.contribution.sqrt().sum(0),
    "squares": lambda seen: seen.contribution.square().sum(0),
    "first half": lambda seen: seen.contribution[: len(seen.contribution) // 2].sum(0),
    "second half": lambda seen: seen.contribution[len(seen.contribution) // 2 :].sum(0),
    "most of any layer": lambda seen: (
        seen.contribution / seen.contribution.sum(1, keepdim=True)
    ).amax(0),
}


def measure(
    model: PlainModel, prompt: list[int], donor: list[int], ratio: float
) -> dict[str, float] | None:
    """KL that each score leaves; ``None`` where nothing is reused."""
    source = donor_of(model, donor)
    found = reused(source, prompt)
    if not len(found.positions):
        return None
    trial = Trial(model, truth_of(model, prompt), [(source, found)])
    told = {"none": trial.divergence(np.empty(0, dtype=np.int64))}
    seen = trial.watched()
    for name, score in SCORES.items():
        scores = score(seen).double().numpy()[trial.positions]
        told[name] = trial.divergence(trial.best(scores, ratio))
    return told


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama- or Qwen2-like model.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    cases: Annotated[int, typer.Option(min=1)] = 24,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.15,
    task: Annotated[str, typer.Option()] = "squad:questions=1",
) -> None:
    """Measure, and print geometric means of ratios with their intervals."""
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), PlainModel(model)
    told = collect(
        lambda prompt, history: measure(plain, prompt, history[0], ratio),
        tokenizer=tokenizer,
        data=data,
        task=task,
        cases=cases,
        shown=rounded,
    )
    groups = list(range(len(told)))
    for name in told[0]:
        for base in ("none", BASE):
            new, old = ([f[key] for f in told] for key in (name, base))
            of = geometric_mean_ratio(new, old, groups)
            print(f"{name} / {base}: {of.value:.2f} [{of.low}, {of.high}], n={len(told)}")


if __name__ == "__main__":
    typer.run(main)
