"""Words, sentences, and excerpts of whole sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence

_END = re.compile(r"[.!?]+[\"'”’)\]]*(\s+)(?=[\"'“‘(\[$]*[A-Z0-9])")
_ABBREVIATIONS = (
    "mr mrs ms dr st prof gen col capt lt sgt rev hon jr sr vol vs etc e.g i.e a.m p.m u.s"
)


def word_count(text: str) -> int:
    """Number of words, which is what lengths of options are given in."""
    return len(text.split())


def sentences(text: str) -> list[str]:
    """The sentences in order, each without the white space around it.

    A sentence ends at ``.``, ``!`` or ``?`` before a capital letter or a digit, but not after a
    common abbreviation or an initial.
    """
    return [text[start:end] for start, end in _bounds(text)]


def contains_words(text: str, phrase: str) -> bool:
    """Whether the phrase stands in the text, in any case and not inside a longer word."""
    return _occurrences(text, phrase) > 0


def excerpt(
    text: str, answers: Sequence[Sequence[str]], max_words: int
) -> tuple[str, tuple[int, ...]]:
    """The run of whole sentences that answers most questions within ``max_words``.

    Args:
        text: the passage; it is returned whole where it is short enough.
        answers: for each question its accepted answers.
        max_words: the longest excerpt.

    Returns:
        The excerpt, the earliest of equally good ones and then the longest, and the indices of the
        questions that it still answers: those of whose best answer no occurrence was cut away.
        Both are empty where no sentence is short enough.
    """
    if word_count(text) <= max_words:
        return text, tuple(range(len(answers)))
    bounds = _bounds(text)
    best: tuple[int, int, int] = (-1, 0, 0)  # questions kept, how early, how long
    piece_of_best = ""
    kept_by_best: tuple[int, ...] = ()
    for first, (start, _) in enumerate(bounds):
        for last, (_, end) in enumerate(bounds[first:], first):
            piece = text[start:end]
            if word_count(piece) > max_words:
                break
            kept = tuple(i for i, accepted in enumerate(answers) if _kept(text, piece, accepted))
            rank = (len(kept), -first, last)
            if rank > best:
                best, piece_of_best, kept_by_best = rank, piece, kept
    return piece_of_best, kept_by_best


def _kept(text: str, piece: str, accepted: Sequence[str]) -> bool:
    there = _occurrences(piece, accepted[0])
    return there > 0 and there == _occurrences(text, accepted[0])


def _occurrences(text: str, phrase: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", text, re.IGNORECASE))


def _bounds(text: str) -> list[tuple[int, int]]:
    """Start and end of every sentence."""
    cuts = [len(text) - len(text.lstrip())]
    for match in _END.finditer(text):
        before = text[cuts[-1] : match.start()].rsplit(None, 1)
        last = before[-1].lstrip("\"'“‘([").lower() if before else ""
        is_initial = len(last) == 1 and last.isalpha() and last != "i"
        if text[match.start()] == "." and (last in _ABBREVIATIONS.split() or is_initial):
            continue
        cuts.append(match.end())
    ends = [*cuts[1:], len(text)]
    pieces = [
        (start, start + len(text[start:end].rstrip()))
        for start, end in zip(cuts, ends, strict=True)
    ]
    return [(start, end) for start, end in pieces if end > start]
