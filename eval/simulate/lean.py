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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvshare_eval.loaders import DataSource
from kvshare_eval.quality.tasks import find_task
from kvshare_eval.simulate.plain_model import PlainModel
from kvshare_eval.simulate.trial import (
    ALL,
    Donor,
    Reused,
    Trial,
    Truth,
    donor_of,
    reused,
    token_ids,
    truth_of,
)
from kvshare_eval.stats.paired import geometric_mean_ratio


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
        yield [token_ids(tokenizer, prompt) for prompt in prompts]
        cases -= 1
        if not cases:
            return


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
