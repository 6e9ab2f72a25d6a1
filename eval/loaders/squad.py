"""SQuAD: passages with questions that their text answers.

Files: SQuAD 1.1 as it is published (``dev-v1.1.json``, ``train-v1.1.json``), or pairs of one
question in two wordings, fluent and disfluent, after Disfl-QA: ``{"contexts": [text], "pairs":
[{"ctx": index, "question", "variant", "answers"}]}``. Built in: the public-domain passages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvshare_eval.loaders.files import DataSet, HubSet, Row, parsed, read_json
from kvshare_eval.loaders.hub import fetch
from kvshare_eval.loaders.source import DataSource
from kvshare_eval.passages import load_passages

_PAIRS = "disfl_squad_pairs.json"
SQUAD = DataSet(
    "squad",
    (_PAIRS, "dev-v1.1.json", "train-v1.1.json"),
    HubSet("rajpurkar/squad", "validation"),
)


@dataclass(frozen=True)
class PassageQuestion:
    """A question about a passage.

    Attributes:
        id: unique within the set.
        question: its wording.
        variant: the same question in another, disfluent wording; empty where there is none.
        answers: accepted answers, each a part of the passage.
    """

    id: str
    question: str
    variant: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class QuestionedPassage:
    """A passage and the questions it answers; ``title`` is empty where there is none."""

    id: str
    title: str
    text: str
    questions: tuple[PassageQuestion, ...]


def load_squad(source: DataSource) -> tuple[QuestionedPassage, ...]:
    """The passages that have a question, in the order of the file."""
    place = SQUAD.find(source)
    if place is None:
        return tuple(_built_in())
    if isinstance(place, HubSet):
        return parsed(_by_context, fetch(place), place.path)
    content = read_json(place)
    read = _from_pairs if place.name.startswith(_PAIRS) else _from_articles
    return parsed(read, content, place.name)


def _from_articles(content: Any) -> tuple[QuestionedPassage, ...]:
    return tuple(
        QuestionedPassage(
            f"{article['title']}-{index}",
            article["title"].replace("_", " "),
            _one_block(paragraph["context"]),
            tuple(
                PassageQuestion(
                    str(qa["id"]),
                    qa["question"].strip(),
                    "",
                    _distinct(answer["text"] for answer in qa["answers"]),
                )
                for qa in paragraph["qas"]
                if qa["answers"]
            ),
        )
        for article in content["data"]
        for index, paragraph in enumerate(article["paragraphs"])
        if any(qa["answers"] for qa in paragraph["qas"])
    )


def _from_pairs(content: Any) -> tuple[QuestionedPassage, ...]:
    asked: defaultdict[int, list[PassageQuestion]] = defaultdict(list)
    for pair in content["pairs"]:
        index = int(pair["ctx"])
        asked[index].append(
            PassageQuestion(
                f"{index}-{len(asked[index])}",
                pair["question"].strip(),
                pair["variant"].strip(),
                _distinct(pair["answers"]),
            )
        )
    return tuple(
        QuestionedPassage(str(index), "", _one_block(content["contexts"][index]), tuple(questions))
        for index, questions in sorted(asked.items())
    )


def _by_context(rows: Iterable[Row]) -> tuple[QuestionedPassage, ...]:
    """Rows of the hub, one a question, put back together."""
    by_text: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["answers"]["text"]:
            by_text[row["context"]].append(row)
    return tuple(
        QuestionedPassage(
            str(index),
            asked[0]["title"].replace("_", " "),
            _one_block(text),
            tuple(
                PassageQuestion(
                    str(row["id"]), row["question"].strip(), "", _distinct(row["answers"]["text"])
                )
                for row in asked
            ),
        )
        for index, (text, asked) in enumerate(by_text.items())
    )


def _built_in() -> Iterator[QuestionedPassage]:
    for passage in load_passages():
        yield QuestionedPassage(
            passage.id,
            passage.title,
            passage.text,
            tuple(
                PassageQuestion(f"{passage.id}-{index}", item.question, "", item.answers)
                for index, item in enumerate(passage.questions)
            ),
        )


def _one_block(text: str) -> str:
    """Without blank lines inside: these separate the passages of a prompt."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def _distinct(answers: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer.strip() for answer in answers))
