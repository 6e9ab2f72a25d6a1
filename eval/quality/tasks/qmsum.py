"""Queries over one long transcript whose header is edited each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.qmsum import Meeting, MeetingQuery, Turn, load_qmsum
from kvshare_eval.loaders.text import word_count
from kvshare_eval.quality.cases import Case, Group, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._shared import at_least, rng, shuffled

_NEUTRAL = "Summarize the discussion."
_CLERKS = ("Ahmed", "Birgit", "Chen", "Dalia", "Emeka", "Fiona", "Goran", "Hana", "Ivan", "Jun")
_MONTHS = ("January", "March", "April", "June", "September", "October", "November")
_TITLES = ("Minutes", "Transcript", "Record", "Protocol", "Notes", "Proceedings")


@dataclass(frozen=True)
class _Window:
    """A part of a transcript, and the queries that can be answered from it."""

    turns: tuple[Turn, ...]
    queries: tuple[MeetingQuery, ...]


@register_task("qmsum", metric="rouge_l", max_new_tokens=64)
def qmsum(data: DataSource, seed: int, *, max_words: int = 420, questions: int = 4) -> Groups:
    """The same transcript behind another header: nothing is an exact prefix.

    Of every meeting those parts are taken that answer most queries.

    Args:
        data: where the meetings are.
        seed: decides the order of the meetings, the headers, and which queries are asked.
        max_words: the longest part of a transcript, in whole turns.
        questions: the most queries that are asked about a part.
    """
    at_least("qmsum", "max_words", max_words, 1)
    at_least("qmsum", "questions", questions, 1)
    for meeting in shuffled(load_qmsum(data), rng(seed, "qmsum")):
        for index, window in enumerate(_windows(meeting, max_words)):
            yield _group(f"{meeting.id}-{index}", window, seed, questions)


def _windows(meeting: Meeting, max_words: int) -> Iterator[_Window]:
    """Disjoint parts, each with at least one query, those with most queries first."""
    words = [word_count(turn.text) + word_count(turn.speaker) for turn in meeting.turns]
    left = list(meeting.queries)
    taken: set[int] = set()
    while True:
        spans = [_span(query.first, words, max_words, taken) for query in left]
        found = [[q for q in left if _inside(q, span)] for span in spans]
        best = max(range(len(left)), key=lambda i: len(found[i]), default=None)
        if best is None or not found[best]:
            return
        taken.update(spans[best])
        left = [query for query in left if query not in found[best]]
        turns = (meeting.turns[i] for i in spans[best])
        yield _Window(tuple(turn for turn in turns if turn.text), tuple(found[best]))


def _span(first: int, words: list[int], max_words: int, taken: set[int]) -> range:
    """The turns from ``first`` on that are free and not too long together."""
    total, last = 0, first
    while last < len(words) and last not in taken and total + words[last] <= max_words:
        total += words[last]
        last += 1
    return range(first, last)


def _inside(query: MeetingQuery, span: range) -> bool:
    return query.first in span and query.last in span


def _group(name: str, window: _Window, seed: int, questions: int) -> Group:
    random_ = rng(seed, "qmsum", name)
    pool = shuffled(window.queries, random_)
    asked, spare = pool[:questions], pool[questions:]
    headers = _headers(random_, len(asked) + 1)
    cases = tuple(
        Case(
            str(index),
            _prompt(header, window.turns, query.query),
            query.answers,
            user(_query(query.query)),
        )
        for index, (header, query) in enumerate(zip(headers[1:], asked, strict=True))
    )
    earlier = spare[0].query if spare else _NEUTRAL
    return Group(name, (_prompt(headers[0], window.turns, earlier),), cases)


def _headers(random_: random.Random, count: int) -> list[str]:
    """Headers of which no two begin alike, as far as there are first words."""
    clerks = random_.sample(_CLERKS, len(_CLERKS))
    titles = random_.sample(_TITLES, len(_TITLES))
    return [
        f"{titles[index % len(titles)]} of a meeting on {random_.randint(1, 28)} "
        f"{random_.choice(_MONTHS)} {random_.randint(2015, 2025)}\n"
        f"Asked for by: {clerks[index % len(clerks)]}"
        for index in range(count)
    ]


def _query(query: str) -> str:
    return f"Query: {query}\nAnswer in one or two sentences."


def _prompt(header: str, turns: tuple[Turn, ...], query: str) -> Prompt:
    transcript = "\n".join(f"{turn.speaker}: {turn.text}" for turn in turns)
    return user(f"{header}\n\n{transcript}\n\n{_query(query)}")
