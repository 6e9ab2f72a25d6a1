"""Passages of moderate length."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvshare_eval.loaders.squad import QuestionedPassage
from kvshare_eval.loaders.text import excerpt, word_count
from kvshare_eval.quality.tasks._shared import shuffled


def short_passages(
    passages: Iterable[QuestionedPassage], max_words: int, random_: random.Random
) -> Iterator[QuestionedPassage]:
    """The passages that are short enough, shuffled, and then excerpts of the others.

    An excerpt keeps the questions that it answers; a passage that has none left is dropped.
    """
    order = shuffled(passages, random_)
    yield from (passage for passage in order if word_count(passage.text) <= max_words)
    for passage in order:
        if word_count(passage.text) > max_words:
            text, kept = excerpt(passage.text, [q.answers for q in passage.questions], max_words)
            if kept:
                questions = tuple(passage.questions[index] for index in kept)
                yield replace(passage, text=text, questions=questions)
