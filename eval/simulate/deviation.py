"""How far are donors' values off, layer by layer, for harmless and for poisoned donors?

Of each reused span the L1 distance between the donor's values and fresh ones is told as a share of
the fresh values' size: what ``max_deviation`` is compared with, at every layer.

    python -m kvshare_eval.simulate.deviation --model DIR --task squad:questions=1 --task poison
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from kvshare_eval.loaders import DataSource
from kvshare_eval.quality.tasks import find_task
from kvshare_eval.simulate.plain_model import PlainModel
from kvshare_eval.simulate.trial import donor_of, reused, token_ids

#: Shorter spans say little.
_MIN_SPAN_TOKENS = 30


def deviations(model: PlainModel, prompt: list[int], donors: list[list[int]]) -> list[list[float]]:
    """For each span of each donor the deviation at every layer."""
    fresh = model.empty(len(prompt))
    model.run(prompt, torch.arange(len(prompt)), fresh)
    told = []
    for ids in donors:
        donor = donor_of(model, ids)
        found = reused(donor, prompt)
        for span in np.unique(found.span):
            part = found.only(found.span == span)
            if len(part.positions) < _MIN_SPAN_TOKENS:
                continue
            at, of = torch.from_numpy(part.positions), torch.from_numpy(part.sources)
            told.append(
                [
                    float(
                        (old.values[of] - new.values[at]).abs().sum() / new.values[at].abs().sum()
                    )
                    for old, new in zip(donor.cache, fresh, strict=True)
                ]
            )
    return told


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama- or Qwen2-like model.")],
    task: Annotated[list[str], typer.Option(help="As for kvshare eval quality; may be repeated.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Of each task.")] = 6,
) -> None:
    """Print smallest, median and largest deviation by task and layer."""
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), PlainModel(model)
    for name in task:
        found, options = find_task(name)
        rows: list[list[float]] = []
        for number, group in enumerate(found.groups(DataSource(data), 1, options)):
            if number == groups:
                break
            prompt = token_ids(tokenizer, group.cases[0].prompt)
            rows += deviations(plain, prompt, [token_ids(tokenizer, h) for h in group.history])
        print(f"{name}: {len(rows)} spans")
        for layer, values in enumerate(np.array(rows).T):
            least, median, most = np.quantile(values, [0, 0.5, 1])
            print(f"  layer {layer}: {least:.3f} {median:.3f} {most:.3f}")


if __name__ == "__main__":
    typer.run(main)
