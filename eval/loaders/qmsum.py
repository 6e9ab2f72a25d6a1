"""QMSum: transcripts of meetings and queries about parts of them.

Files: the published JSONL (``ALL/jsonl/test.jsonl``), or a copy as ``qmsum_test.jsonl``. Built in:
evenings of a reading circle whose members read the public-domain passages to each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvshare_eval.loaders.files import DataSet, HubSet, Row, parsed, read_jsonl
from kvshare_eval.loaders.source import DataSource
from kvshare_eval.loaders.text import contains_words, sentences
from kvshare_eval.passages import Passage, load_passages

QMSUM = DataSet("qmsum", ("qmsum_test.jsonl", "ALL/jsonl/test.jsonl"))
#: Marks of the transcribers, such as ``{vocalsound}``.
_MARK = re.compile(r"\{[^{}]*\}")
_READERS = ("Agnes", "Bertram", "Clara", "Duncan", "Edith")
_EVENING_PASSAGES = 5


@dataclass(frozen=True)
class Turn:
    """What one speaker says; ``text`` is empty where the transcript has only a mark."""

    speaker: str
    text: str


@dataclass(frozen=True)
class MeetingQuery:
    """A query about a part of a meeting.

    Attributes:
        query: the question.
        answers: reference answers.
        first, last: the turns that it needs lie between these two, both included.
    """

    query: str
    answers: tuple[str, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Meeting:
    """A transcript; ``queries`` are those about parts, not those about the whole meeting."""

    id: str
    turns: tuple[Turn, ...]
    queries: tuple[MeetingQuery, ...]


def load_qmsum(source: DataSource) -> tuple[Meeting, ...]:
    """The meetings in the order of the file."""
    place = QMSUM.find(source)
    if place is None:
        return tuple(_built_in())
    assert not isinstance(place, HubSet), "the set has no hub name"
    rows = enumerate(read_jsonl(place))
    return tuple(parsed(_meeting, pair, f"{place.name}: line {pair[0] + 1}") for pair in rows)


def _meeting(numbered: tuple[int, Row]) -> Meeting:
    index, row = numbered
    return Meeting(
        str(index),
        tuple(
            Turn(turn["speaker"].strip(), " ".join(_MARK.sub(" ", turn["content"]).split()))
            for turn in row["meeting_transcripts"]
        ),
        tuple(_query(item) for item in row["specific_query_list"] if item["relevant_text_span"]),
    )


def _query(item: Row) -> MeetingQuery:
    bounds = [int(turn) for span in item["relevant_text_span"] for turn in span]
    return MeetingQuery(item["query"].strip(), (item["answer"].strip(),), min(bounds), max(bounds))


def _built_in() -> Iterator[Meeting]:
    passages = load_passages()
    for index in range(0, len(passages), _EVENING_PASSAGES):
        yield _evening(str(index // _EVENING_PASSAGES), passages[index : index + _EVENING_PASSAGES])


def _evening(identity: str, passages: tuple[Passage, ...]) -> Meeting:
    turns: list[Turn] = []
    queries: list[MeetingQuery] = []
    for number, passage in enumerate(passages):
        reader, listener = _READERS[number], _READERS[number - 1]
        start = len(turns)
        turns.append(Turn(listener, f"{reader}, what have you brought us?"))
        turns.append(Turn(reader, f"A page of {passage.title}."))
        turns += [Turn(reader, " ".join(line.split())) for line in passage.text.splitlines()]
        last = len(turns) - 1
        queries += [
            MeetingQuery(item.question, _references(passage, item.answers), start, last)
            for item in passage.questions
        ]
    return Meeting(identity, tuple(turns), tuple(queries))


def _references(passage: Passage, answers: tuple[str, ...]) -> tuple[str, ...]:
    """The short answer, and the sentence that holds it where there is only one."""
    holding = [s for s in sentences(passage.text) if contains_words(s, answers[0])]
    return (*answers, holding[0]) if len(holding) == 1 else answers
