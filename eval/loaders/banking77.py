"""BANKING77: what customers ask a bank, by intent; questions of one intent are near-identical.

Files: the published ``banking_data/test.csv`` (``text,category``), or a copy of it. Built in: the
questions about the articles of a made-up bank, which have gold answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvshare_eval.loaders.files import DataSet, HubSet, Row, parsed, read_csv
from kvshare_eval.loaders.help_centre import built_in_desk
from kvshare_eval.loaders.hub import fetch
from kvshare_eval.loaders.source import DataSource

BANKING77 = DataSet(
    "banking77",
    ("banking77_test.csv", "banking_data/test.csv"),
    HubSet("mteb/banking77", "test"),
)


@dataclass(frozen=True)
class CustomerQuestion:
    """What one customer asks; ``answers`` is empty where the set has no gold."""

    text: str
    intent: str
    answers: tuple[str, ...] = ()


def load_banking77(source: DataSource) -> tuple[CustomerQuestion, ...]:
    """The questions in the order of the file."""
    place = BANKING77.find(source)
    if place is None:
        return tuple(
            CustomerQuestion(question, entry["id"], tuple(entry["answers"]))
            for entry in built_in_desk()
            for question in entry["questions"]
        )
    if isinstance(place, HubSet):
        return tuple(parsed(_from_hub, row, place.path) for row in fetch(place))
    return tuple(
        parsed(_question, row, f"{place.name}: row {number}")
        for number, row in enumerate(read_csv(place), 1)
    )


def _from_hub(row: Row) -> CustomerQuestion:
    return CustomerQuestion(_line(row["text"]), row["label_text"].strip())


def _question(row: Row) -> CustomerQuestion:
    return CustomerQuestion(_line(row["text"]), row["category"].strip())


def _line(text: str) -> str:
    return " ".join(text.split())
