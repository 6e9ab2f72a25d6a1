"""Articles of a bank's help centre.

Files: ``banking_knowledge_docs.json`` of the tau2 banking domain, ``[{"id", "title",
"content"}]``. Built in: twelve articles of a made-up bank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvshare_eval.loaders.files import DataSet, HubSet, Row, parsed, read_json
from kvshare_eval.loaders.source import DataSource

HELP_CENTRE = DataSet("help-centre articles", ("banking_knowledge_docs.json",))


@dataclass(frozen=True)
class Article:
    """One help-centre article; the text may be in Markdown."""

    id: str
    title: str
    text: str


def load_articles(source: DataSource) -> tuple[Article, ...]:
    """The articles in the order of the file."""
    place = HELP_CENTRE.find(source)
    if place is None:
        return tuple(
            Article(entry["id"], entry["title"], entry["text"]) for entry in built_in_desk()
        )
    assert not isinstance(place, HubSet), "the set has no hub name"
    return tuple(
        parsed(_article, entry, f"{place.name}: entry {index}")
        for index, entry in enumerate(read_json(place))
    )


def built_in_desk() -> list[dict[str, Any]]:
    """The packaged articles, each with near-identical questions and the phrase that answers them.

    Every entry has ``id``, ``title``, ``text``, ``questions`` and ``answers``.
    """
    packaged = resources.files("kvshare_eval").joinpath("data", "support.json")
    entries: list[dict[str, Any]] = json.loads(packaged.read_text(encoding="utf-8"))["articles"]
    return entries


def _article(entry: Row) -> Article:
    return Article(str(entry["id"]), " ".join(entry["title"].split()), entry["content"].strip())
