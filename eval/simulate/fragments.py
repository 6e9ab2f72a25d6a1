"""Is it better to compute short fragments that were encoded alone than to repair them?

On the task ``sentences`` every span is a sentence or a few that were encoded alone. The same number
of tokens is recomputed in four ways: what the question takes up (``contribution``), the first
tokens of every span, the shortest spans as a whole (they count as new), the longest as a whole.

    python -m kvshare_eval.simulate.fragments --model DIR [--data DIR] [--cases 30]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvshare_eval.simulate.plain_model import PlainModel
from kvshare_eval.simulate.trial import (
    Donor,
    Reused,
    Trial,
    apart,
    collect,
    donor_of,
    reused,
    rounded,
    truth_of,
)
from kvshare_eval.stats.paired import geometric_mean_ratio
from sglang_kvshare.plan import Int64Array

RATIOS = (0.25, 0.5)


def measure(model: PlainModel, prompt: list[int], donors: list[Donor]) -> dict[str, float] | None:
    """KL of each way; ``None`` where fewer than four spans are reused."""
    parts = apart([(donor, reused(donor, prompt)) for donor in donors])
    if len(parts) < 4:
        return None
    trial = Trial(model, truth_of(model, prompt), parts)
    # In the order of the trial's positions, which are those of the parts, one after the other.
    scores = {
        "contribution": trial.contribution(),
        "seams": np.concatenate([1.0 - np.arange(len(p)) / len(p) for p in _positions(parts)]),
        "shortest": np.concatenate([np.full(len(p), 1.0 / len(p)) for p in _positions(parts)]),
        "longest": np.concatenate([np.full(len(p), float(len(p))) for p in _positions(parts)]),
    }
    told = {"none": trial.divergence(np.empty(0, dtype=np.int64))}
    for ratio in RATIOS:
        for name, score in scores.items():
            told[f"{name}@{ratio}"] = trial.divergence(trial.best(score, ratio))
    return told


def _positions(parts: list[tuple[Donor, Reused]]) -> list[Int64Array]:
    return [part.positions for _, part in parts]


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama- or Qwen2-like model.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    cases: Annotated[int, typer.Option(min=1)] = 30,
    task: Annotated[str, typer.Option()] = "sentences:min_words=12,shots=1",
) -> None:
    """Measure, and print geometric means of the ratios to no repair with their intervals."""
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), PlainModel(model)
    told = collect(
        lambda prompt, history: measure(plain, prompt, [donor_of(plain, ids) for ids in history]),
        tokenizer=tokenizer,
        data=data,
        task=task,
        cases=cases,
        shown=rounded,
    )
    groups = list(range(len(told)))
    for name in told[0]:
        ratio = geometric_mean_ratio([f[name] for f in told], [f["none"] for f in told], groups)
        print(f"{name}: {ratio.value:.2f} [{ratio.low}, {ratio.high}], n={len(told)}")


if __name__ == "__main__":
    typer.run(main)
