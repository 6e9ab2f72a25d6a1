"""How well do window sketches find the right donor?

    python -m kvshare_eval.matching.sketches --model DIR [--data DIR] [--dims 128] [--window 64]

Three labelled sets; donors are indexed, then asked for, with the very index that the server uses:

* **questions**: a question in two wordings; the donors are all fluent ones, the right one is known.
* **passages**: every passage in windows; asked for are passages with a share of their tokens
  replaced, inserted or deleted, and cut into windows elsewhere. Right is a window of the passage.
* **intents**: customer questions; right is a question of the same intent.

For each: the right donor first (recall at 1), among the first five, and for a row of gates the
share of queries that pass and how many of these have the right donor first (precision).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.banking77 import load_banking77
from kvshare_eval.loaders.squad import load_squad
from sglang_kvshare.matching.donor_index import DonorIndex
from sglang_kvshare.matching.sketch import Float32Array, Sketcher, TokenRarity, windows_of
from sglang_kvshare.plan import Int64Array

GATES = (0.5, 0.6, 0.7, 0.8)
EDITED = (0.0, 0.1, 0.2, 0.3)
#: So many tokens at the beginning of a passage are left out, at most.
_MOST_CUT = 60
_NEAREST = 5
_SEED = 1


@dataclass(frozen=True)
class Found:
    """What a labelled set came to.

    Attributes:
        right: bool ``[queries, 5]``: the donor in each place is a right one.
        similarity: fp32 ``[queries]``, of the first.
    """

    right: np.ndarray
    similarity: Float32Array

    def recall(self, places: int) -> float:
        """Share of the queries that have a right donor in the first ``places``."""
        return float(self.right[:, :places].any(1).mean())

    def passing(self, gate: float) -> float:
        """Share of the queries whose nearest donor is at least so similar."""
        return float((self.similarity >= gate).mean())

    def precision(self, gate: float) -> float:
        """Share of those that have the right one first; not a number where there are none."""
        passing = self.similarity >= gate
        return float(self.right[passing, 0].mean()) if passing.any() else float("nan")


def search(
    sketcher: Sketcher,
    donors: Sequence[tuple[int, Int64Array]],
    queries: Sequence[tuple[int, Int64Array]],
    *,
    skip_self: bool = False,
) -> Found:
    """Index the windows of ``donors`` and ask for those of ``queries``; both carry their label.

    Args:
        skip_self: the queries are the donors, and none may find itself.
    """
    rarity = TokenRarity()
    for _, tokens in donors:
        rarity.observe(tokens, windows_of(tokens.shape[0], sketcher.size_tokens))
    index, labels = DonorIndex(sketcher.dims), np.zeros(0, dtype=np.int64)
    for label, tokens in donors:
        sketches = sketcher.sketch(tokens, rarity)[1]
        first = labels.shape[0]
        index.add(b"", np.arange(first, first + sketches.shape[0]), sketches)
        labels = np.append(labels, np.full(sketches.shape[0], label))
    right, similarity = [], []
    for number, (label, tokens) in enumerate(queries):
        sketches = sketcher.sketch(tokens, rarity)[1]
        near = index.search(b"", sketches, _NEAREST + skip_self)
        for windows, likeness in zip(near.windows, near.similarity, strict=True):
            kept = np.flatnonzero(windows != number) if skip_self else np.arange(_NEAREST)
            places = kept[:_NEAREST]
            right.append((windows[places] >= 0) & (labels[windows[places]] == label))
            similarity.append(likeness[places[0]])
    return Found(np.array(right), np.array(similarity, dtype=np.float32))


def edited(tokens: Int64Array, share: float, random: np.random.Generator) -> Int64Array:
    """``share`` of the tokens replaced by, preceded by, or dropped for another of their own."""
    told: list[int] = []
    for token in tokens.tolist():
        what = random.random() / share if share else 1.0
        other = int(tokens[random.integers(tokens.shape[0])])
        if what < 1 / 3:
            continue
        told += [other] if what < 2 / 3 else [token] if what >= 1 else [other, token]
    return np.array(told, dtype=np.int64)


def main(
    model: Annotated[Path, typer.Option(help="A folder with a model and its tokenizer.")],
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    dims: Annotated[int, typer.Option(min=8)] = 128,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window, even.")] = 64,
    most: Annotated[int, typer.Option(min=2, help="Questions and passages at most.")] = 2000,
) -> None:
    """Measure, and print a table."""
    from transformers import AutoTokenizer

    from kvshare_eval.simulate.plain_model import PlainModel

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    embeddings = PlainModel(model).weights["model.embed_tokens.weight"].numpy()
    source = DataSource(data)

    def ids(text: str) -> Int64Array:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def sketcher() -> Sketcher:
        return Sketcher(embeddings, size_tokens=window, dims=dims)

    table = Table("set", "queries", "recall at 1", "at 5", *(f"gate {gate}" for gate in GATES))
    for name, found in measured(source, ids, sketcher, most):
        gates = (f"{found.passing(g):.3f}, right {found.precision(g):.3f}" for g in GATES)
        shown = (f"{found.recall(places):.3f}" for places in (1, _NEAREST))
        table.add_row(name, str(len(found.right)), *shown, *gates)
    Console(width=180).print(table)


def measured(
    source: DataSource,
    ids: Callable[[str], Int64Array],
    sketcher: Callable[[], Sketcher],
    most: int,
) -> list[tuple[str, Found]]:
    """Every set by name."""
    passages = load_squad(source)
    asked = [question for passage in passages for question in passage.questions if question.variant]
    fluent = list(enumerate(ids(question.question) for question in asked[:most]))
    other = list(enumerate(ids(question.variant) for question in asked[:most]))
    told = [("questions", search(sketcher(), fluent, other))] if asked else []
    texts = list(enumerate(ids(passage.text) for passage in passages[: most // 3]))
    for share in EDITED:
        random = np.random.default_rng(_SEED)
        queries = []
        for label, text in texts[::3]:
            changed = edited(text, share, random)
            # Windows that begin where those of the donor do not.
            queries.append((label, changed[random.integers(min(_MOST_CUT, len(changed) // 2)) :]))
        told.append((f"passages, {share:.0%} edited", search(sketcher(), texts, queries)))
    customers = load_banking77(source)
    intents = {name: number for number, name in enumerate(sorted({c.intent for c in customers}))}
    questions = [(intents[c.intent], ids(c.text)) for c in customers]
    told.append(("intents", search(sketcher(), questions, questions, skip_self=True)))
    return told


if __name__ == "__main__":
    typer.run(main)
