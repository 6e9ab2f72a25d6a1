"""How should a passage that many will ask about be encoded?

The same questions over the same passages (task ``squad``), whose donors came into being in five
ways: together in another order, or each in a prompt of its own, alone, behind a few sink tokens,
behind a neutral text, behind another passage. The divergence from full recompute is compared.

    python -m kvshare_eval.simulate.encodings --model DIR [--data DIR] [--cases 20]
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvshare_eval.loaders import DataSource
from kvshare_eval.quality.tasks import find_task
from kvshare_eval.quality.tasks.squad import DONORS
from kvshare_eval.simulate.plain_model import PlainModel
from kvshare_eval.simulate.trial import (
    Trial,
    Truth,
    apart,
    donor_of,
    reused,
    token_ids,
    truth_of,
)
from kvshare_eval.stats.paired import geometric_mean_ratio

TOGETHER = DONORS[0]


def measure(
    model: PlainModel, truth: Truth, donors: list[list[int]], ratio: float
) -> tuple[float, float] | None:
    """KL without repair and with ``contribution``; ``None`` where nothing is reused."""
    sources = [donor_of(model, ids) for ids in donors]
    parts = apart([(donor, reused(donor, truth.prompt)) for donor in sources])
    if not parts:
        return None
    trial = Trial(model, truth, parts)
    chosen = trial.best(trial.contribution(), ratio)
    return trial.divergence(np.empty(0, dtype=np.int64)), trial.divergence(chosen)


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama- or Qwen2-like model.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    cases: Annotated[int, typer.Option(min=1)] = 20,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.15,
) -> None:
    """Measure, and print geometric means of the ratios to donors that were served together."""
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), PlainModel(model)
    ways = []
    for way in DONORS:
        task, options = find_task(f"squad:questions=1,donors={way}")
        ways.append(islice(task.groups(DataSource(data), 1, options), cases))
    told: list[dict[str, tuple[float, float]]] = []
    for groups in zip(*ways, strict=True):
        # The prompt is the same in every way; only the history differs.
        truth = truth_of(plain, token_ids(tokenizer, groups[0].cases[0].prompt))
        figures = {}
        for way, group in zip(DONORS, groups, strict=True):
            assert group.cases[0] == groups[0].cases[0]
            found = measure(plain, truth, [token_ids(tokenizer, h) for h in group.history], ratio)
            if found is not None:
                figures[way] = found
        if len(figures) == len(DONORS):
            told.append(figures)
            print(len(told), {way: tuple(round(kl, 4) for kl in f) for way, f in figures.items()})
    numbers = list(range(len(told)))
    for column, what in enumerate(("no repair", f"contribution at {ratio:g}")):
        base = [figures[TOGETHER][column] for figures in told]
        for way in DONORS:
            of = geometric_mean_ratio([f[way][column] for f in told], base, numbers)
            print(
                f"{what}, {way} / {TOGETHER}: {of.value:.2f} [{of.low}, {of.high}], n={len(told)}"
            )


if __name__ == "__main__":
    typer.run(main)
