"""What are short runs between edits worth, which only similar donors show?

The passages of a prompt are cached in another order, and a share of the prompt's tokens is
replaced, inserted or dropped. Runs of 16 tokens and more are reused in any case. What is left of
the edited passages is computed, or reused too where a similar window has it. Seams are recomputed
at every span, or at those alone that do not continue the one before behind a short edit.

    python -m kvshare_eval.simulate.edits --model DIR [--data DIR] [--cases 24] [--edited 0.1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvshare_eval.matching.sketches import edited
from kvshare_eval.simulate.plain_model import PlainModel
from kvshare_eval.simulate.trial import (
    MIN_RUN_TOKENS,
    Donor,
    Reused,
    Trial,
    collect,
    donor_of,
    rounded,
    truth_of,
)
from kvshare_eval.stats.paired import geometric_mean_ratio
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex, SimilaritySettings
from sglang_kvshare.matching.sketch import Sketcher
from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.recompute.selectors import SelectionSettings, choose, selector_named

#: The question and what stands around it stay as they are.
_TAIL_TOKENS = 48
_SEED = 1
_SELECTOR = selector_named("contribution")


def plan(donor: Sequence[int], ids: Sequence[int], sketcher: Sketcher | None) -> ReusePlan:
    """The plan for ``ids`` over one donor whose slots are its positions."""
    index = RunIndex(len(donor), MIN_RUN_TOKENS)
    tokens, slots = np.array(donor, dtype=np.int64), np.arange(len(donor))
    index.insert(1, b"", tokens, slots, -1, position=0)
    similar = None
    if sketcher is not None:
        similar = SemanticIndex(index, sketcher, SimilaritySettings())
        similar.insert(b"", tokens, slots)
    return plan_reuse(index, np.array(ids, dtype=np.int64), 0, b"", 8, similar=similar)


def trial_of(model: PlainModel, prompt: list[int], donor: Donor, found: ReusePlan) -> Trial:
    lengths = np.array([span.length for span in found.spans], dtype=np.int64)
    number = np.repeat(np.arange(len(lengths)), lengths)
    reused = Reused(found.positions(), found.slots(), number, {})
    return Trial(model, truth_of(model, prompt), [(donor, reused)])


def everywhere(found: ReusePlan) -> ReusePlan:
    """A seam at every span, whether it continues the one before or not."""
    return replace(found, spans=tuple(replace(span, continues=False) for span in found.spans))


def measure(
    model: PlainModel,
    embeddings: np.ndarray,
    prompt: list[int],
    donor: list[int],
    share: float,
    ratios: Sequence[float],
) -> dict[str, float] | None:
    """KL and computed rows of each side; ``None`` where similar donors add nothing."""
    random = np.random.default_rng(_SEED)
    head = edited(np.array(prompt[:-_TAIL_TOKENS]), share, random)
    changed = [*head.tolist(), *prompt[-_TAIL_TOKENS:]]
    plans = {"runs": plan(donor, changed, None), "both": plan(donor, changed, Sketcher(embeddings))}
    matched = {name: found.matched_tokens for name, found in plans.items()}
    if not matched["runs"] or matched["both"] == matched["runs"]:
        return None
    source = donor_of(model, donor)
    told: dict[str, float] = {"prompt": len(changed)}
    for name, found in plans.items():
        told[f"matched, {name}"] = matched[name]
        trial = trial_of(model, changed, source, found)
        scores = trial.contribution()
        told[f"{name}, 0"] = trial.divergence(np.empty(0, dtype=np.int64))
        for ratio in ratios:
            settings = SelectionSettings(ratio, seam_tokens=8, tail_tokens=8)
            for seams, one in (("everywhere", everywhere(found)), ("at jumps", found)):
                chosen = choose(_SELECTOR, one, scores, settings)
                side = f"{name}, {ratio}, seams {seams}"
                told[side] = trial.divergence(trial.positions[chosen])
                told[f"rows, {side}"] = one.new_tokens + int(chosen.sum())
    return told


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama- or Qwen2-like model.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    cases: Annotated[int, typer.Option(min=1)] = 24,
    share: Annotated[float, typer.Option("--edited", min=0.01, max=0.9)] = 0.1,
    task: Annotated[str, typer.Option()] = "squad:questions=1",
) -> None:
    """Measure, and print geometric means of ratios with their intervals."""
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), PlainModel(model)
    embeddings = plain.weights["model.embed_tokens.weight"].numpy()
    ratios = (0.15, 0.3)
    told = collect(
        lambda prompt, history: measure(plain, embeddings, prompt, history[0], share, ratios),
        tokenizer=tokenizer,
        data=data,
        task=task,
        cases=cases,
        shown=rounded,
    )
    groups = list(range(len(told)))
    for name in ("prompt", "matched, runs", "matched, both"):
        print(f"{name}: {np.mean([found[name] for found in told]):.0f} tokens")
    first = f"runs, {ratios[0]}, seams everywhere"
    base = [found[first] for found in told]
    for name in told[0]:
        if name in ("prompt", first) or name.startswith(("matched", "rows")):
            continue
        of = geometric_mean_ratio([found[name] for found in told], base, groups)
        rows = np.mean([found.get(f"rows, {name}", np.nan) for found in told])
        print(f"{name} ({rows:.0f} rows): {of.value:.2f} [{of.low:.2f}, {of.high:.2f}]")
    rows = np.mean([found[f"rows, {first}"] for found in told])
    print(f"of {first} ({rows:.0f} rows), n={len(told)}")


if __name__ == "__main__":
    typer.run(main)
