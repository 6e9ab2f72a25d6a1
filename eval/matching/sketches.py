"""How well do window sketches find the right donor?

    python -m kvshare_eval.matching.sketches --model DIR [--data DIR] [--dims 128] [--window 64]
        [--embedder DIR_OR_NAME]

Labelled sets; donors are indexed, then asked for, with the very index that the server uses:

* **questions**: a question in two wordings; the donors are all fluent ones, the right one is known.
* **passages**: every passage in windows; asked for are passages with a share of their tokens
  replaced, inserted or deleted, and cut into windows elsewhere. Right is a window of the passage.
* **intents**: customer questions; right is a question of the same intent.
* **strangers**: questions and passages of which no donor is indexed; nothing is right, and what
  passes a gate is a false alarm.

For each: the right donor first (recall at 1), among the first five, and for a row of gates the
share of queries that pass and how many of these have the right donor first (precision). With
``--embedder`` a sentence model's sketches are measured beside those of the model's own embeddings.
"""

from __future__ import annotations

import time
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
from sglang_kvshare.matching.sketch import (
    Float32Array,
    Sketcher,
    TokenRarity,
    WindowSketcher,
    windows_of,
)
from sglang_kvshare.plan import Int64Array

GATES = (0.4, 0.5, 0.6, 0.7, 0.8)
EDITED = (0.0, 0.1, 0.2, 0.3)
#: So many tokens at the beginning of a passage are left out, at most.
_MOST_CUT = 60
_NEAREST = 5
#: The label of a query without a right donor.
_STRANGER = -1
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


class Donors:
    """Labelled texts whose windows are indexed in one namespace.

    Attributes:
        seconds_per_1000_tokens: what sketching and indexing them took.
    """

    def __init__(self, sketcher: WindowSketcher, donors: Sequence[tuple[int, Int64Array]]) -> None:
        self._sketcher = sketcher
        self._rarity = TokenRarity()
        for _, tokens in donors:
            self._rarity.observe(tokens, windows_of(tokens.shape[0], sketcher.size_tokens))
        self._index, labels, self._sketches = DonorIndex(sketcher.dims), [], []
        began, first = time.perf_counter(), 0
        for label, tokens in donors:
            sketches = sketcher.sketch(tokens, self._rarity)[1]
            self._index.add(b"", np.arange(first, first + sketches.shape[0]), sketches)
            first += sketches.shape[0]
            labels += [label] * sketches.shape[0]
            self._sketches.append(sketches)
        taken = time.perf_counter() - began
        self._labels = np.array(labels, dtype=np.int64)
        count = sum(tokens.shape[0] for _, tokens in donors)
        self.seconds_per_1000_tokens = taken / count * 1000 if count else 0.0

    def ask(self, queries: Sequence[tuple[int, Int64Array]]) -> Found:
        """Ask for every window of ``queries``."""
        sketched = [
            (label, self._sketcher.sketch(tokens, self._rarity)[1]) for label, tokens in queries
        ]
        labels = np.concatenate([np.full(sketches.shape[0], label) for label, sketches in sketched])
        near = self._index.search(
            b"", np.concatenate([sketches for _, sketches in sketched]), _NEAREST
        )
        right = (near.windows >= 0) & (self._labels[near.windows] == labels[:, None])
        return Found(right, near.similarity[:, 0])

    def ask_each_other(self) -> Found:
        """Ask for every window that is indexed; none may find one of its own text."""
        counts = np.array([sketches.shape[0] for sketches in self._sketches])
        text_of = np.repeat(np.arange(counts.shape[0]), counts)
        near = self._index.search(b"", np.concatenate(self._sketches), _NEAREST + int(counts.max()))
        others = text_of[near.windows] != text_of[:, None]
        # Those of other texts come first, each in the order of its likeness.
        order = np.argsort(~others, axis=1, kind="stable")[:, :_NEAREST]
        windows = np.take_along_axis(near.windows, order, axis=1)
        right = (windows >= 0) & (self._labels[windows] == self._labels[:, None])
        right &= np.take_along_axis(others, order, axis=1)
        return Found(right, np.take_along_axis(near.similarity, order, axis=1)[:, 0])


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
    embedder: Annotated[
        str, typer.Option(help="A sentence model, by folder or name, to be measured as well.")
    ] = "",
) -> None:
    """Measure, and print a table."""
    from transformers import AutoTokenizer

    from kvshare_eval.simulate.plain_model import PlainModel
    from sglang_kvshare.engine.embedder import load_embedder

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    embeddings = PlainModel(model).weights["model.embed_tokens.weight"].numpy()
    source = DataSource(data)

    def ids(text: str) -> Int64Array:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    sketchers: dict[str, WindowSketcher] = {
        "input embeddings": Sketcher(embeddings, size_tokens=window, dims=dims)
    }
    if embedder:
        sketchers["embedder"] = load_embedder(embedder, tokenizer, window)
    gates = (f"gate {gate}" for gate in GATES)
    table = Table("sketches", "set", "queries", "recall at 1", "at 5", *gates)
    console = Console(width=200)
    for which, sketcher in sketchers.items():
        found, upkeep = measured(source, ids, sketcher, most)
        for name, one in found:
            shares = (f"{one.passing(g):.3f}, right {one.precision(g):.3f}" for g in GATES)
            shown = (f"{one.recall(places):.3f}" for places in (1, _NEAREST))
            table.add_row(which, name, str(len(one.right)), *shown, *shares)
        table.add_section()
        console.print(f"{which}: {upkeep * 1000:.1f} ms of upkeep per 1,000 tokens of passages")
    console.print(table)


def measured(
    source: DataSource,
    ids: Callable[[str], Int64Array],
    sketcher: WindowSketcher,
    most: int,
) -> tuple[list[tuple[str, Found]], float]:
    """Every set by name, and the upkeep of passages in seconds per 1,000 tokens."""
    passages = load_squad(source)
    asked = [question for passage in passages for question in passage.questions if question.variant]
    told: list[tuple[str, Found]] = []
    if asked:
        fluent = list(enumerate(ids(question.question) for question in asked[:most]))
        other = list(enumerate(ids(question.variant) for question in asked[:most]))
        strangers = [(_STRANGER, ids(question.variant)) for question in asked[most : 2 * most]]
        donors = Donors(sketcher, fluent)
        told.append(("questions", donors.ask(other)))
        if strangers:
            told.append(("questions, strangers", donors.ask(strangers)))
    indexed = min(most, len(passages) - 1) // 3 + 1
    texts = list(enumerate(ids(passage.text) for passage in passages[:indexed]))
    donors = Donors(sketcher, texts)
    for share in EDITED:
        random = np.random.default_rng(_SEED)
        queries = []
        for label, text in texts[::3]:
            changed = edited(text, share, random)
            # Windows that begin where those of the donor do not.
            queries.append((label, changed[random.integers(min(_MOST_CUT, len(changed) // 2)) :]))
        told.append((f"passages, {share:.0%} edited", donors.ask(queries)))
    others = passages[indexed : indexed + len(queries)]
    told.append(("passages, strangers", donors.ask([(_STRANGER, ids(one.text)) for one in others])))
    customers = load_banking77(source)
    intents = {name: number for number, name in enumerate(sorted({c.intent for c in customers}))}
    questions = Donors(sketcher, [(intents[c.intent], ids(c.text)) for c in customers])
    told.append(("intents", questions.ask_each_other()))
    return told, donors.seconds_per_1000_tokens


if __name__ == "__main__":
    typer.run(main)
