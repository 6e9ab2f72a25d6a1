"""Does it help to recompute reused tokens while the answer is decoded?

Full recompute's own answer is decoded token by token over a prompt of which a part is reused, with
and without rows that refresh reused tokens, the most important first (by ``contribution``, as the
prefill saw it). The divergence of each token's distribution from full recompute is compared.

    python -m kvshare_eval.simulate.decode --model DIR [--data DIR] [--cases 24]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvshare_eval.simulate.plain_model import PlainModel
from kvshare_eval.simulate.trial import Trial, collect, donor_of, reused, rounded, truth_of
from kvshare_eval.stats.paired import geometric_mean_ratio

RATIOS = (0.0, 0.15)
ROWS_A_STEP = (0, 4, 8)


def measure(
    model: PlainModel, prompt: list[int], donor: list[int], answer_tokens: int
) -> dict[str, list[float]] | None:
    """KL at each token of the answer, by ratio and rows a step; ``None`` where nothing is
    reused."""
    source = donor_of(model, donor)
    found = reused(source, prompt)
    if not len(found.positions):
        return None
    trial = Trial(model, truth_of(model, prompt, answer_tokens), [(source, found)])
    scores = trial.contribution()
    order = trial.positions[np.argsort(-scores, kind="stable")]
    told = {}
    for ratio in RATIOS:
        count = int(np.ceil(ratio * len(order)))
        for rows in ROWS_A_STEP:
            told[f"{ratio:g}, {rows} a step"] = trial.decoded(order[:count], order[count:], rows)
    return told


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama- or Qwen2-like model.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    cases: Annotated[int, typer.Option(min=1)] = 24,
    answer_tokens: Annotated[int, typer.Option(min=2)] = 32,
    task: Annotated[str, typer.Option()] = "squad:questions=1",
) -> None:
    """Measure, and print what refreshing leaves of the divergence, with intervals."""
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), PlainModel(model)
    told = collect(
        lambda prompt, history: measure(plain, prompt, history[0], answer_tokens),
        tokenizer=tokenizer,
        data=data,
        task=task,
        cases=cases,
        shown=lambda figures: rounded({name: float(np.mean(kl)) for name, kl in figures.items()}),
    )
    groups = list(range(len(told)))
    halves = {"all": slice(None), "second half": slice(answer_tokens // 2, None)}
    for name in told[0]:
        base = f"{name.split(',')[0]}, 0 a step"
        for which, part in halves.items():
            new, old = ([float(np.mean(f[key][part])) for f in told] for key in (name, base))
            ratio = geometric_mean_ratio(new, old, groups)
            wins = float(np.mean(np.less(new, old)))
            print(
                f"{name} / {base}, {which} of the answer: {ratio.value:.2f} "
                f"[{ratio.low}, {ratio.high}], better in {wins:.0%}, n={len(told)}"
            )


if __name__ == "__main__":
    typer.run(main)
