"""A chat whose thinking the client strips, as most clients do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest

from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.squad import QuestionedPassage, load_squad
from kvshare_eval.quality.cases import Case, Group, Message, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._excerpts import short_passages
from kvshare_eval.quality.tasks._shared import at_least, chunks, rng, shuffled

_ASK = (
    "Please quote these pages of our reading list for me: {}.",
    "Thanks. Now quote these pages of the list, please: {}.",
    "And these pages: {}.",
)
_THOUGHTS = (
    "The reader asks for {pages}. I have to quote, so I must not shorten or change anything.",
    "The order in which the pages are named is the order in which I should give them.",
    "I could add a remark on each page, but nobody asked for one.",
    "A summary would be shorter; quoting is what was asked for, though.",
    "Let me check that I have all of them: {pages}. Yes, that is all.",
    "A heading above each page will help to find it again later.",
    "There may be questions about these pages afterwards, so the wording matters.",
    "I should say at the start what comes, and then only quote.",
)


@register_task("chat", metric="contains", max_new_tokens=24, first_line=True)
def chat(
    data: DataSource,
    seed: int,
    *,
    turns: int = 1,
    passages: int = 4,
    questions: int = 3,
    max_words: int = 110,
) -> Groups:
    """Earlier answers of a chat, moved because the thinking before them was cut out.

    The history holds every earlier turn as it was served, with the thinking of its last answer; in
    the cases all thinking is gone, and the user asks about what was quoted. The thinking has the
    mark ``Thoughts:`` and ends with a blank line: templates of reasoning models drop what stands
    in ``<think>`` by themselves, which would leave nothing to strip.

    Args:
        data: where the passages are that the answers quote.
        seed: decides which passages stand in which chat, and the thoughts.
        turns: answers before the question. The history of a later answer holds the earlier ones
            without their thinking, so that only the last answer is not an exact prefix.
        passages: how many each answer quotes.
        questions: how many are asked about a chat, a case each.
        max_words: the longest passage; longer ones come last and as excerpts.
    """
    for option, value in (("turns", turns), ("passages", passages), ("questions", questions)):
        at_least("chat", option, value, 1)
    order = short_passages(load_squad(data), max_words, rng(seed, "chat"))
    for index, quoted in enumerate(chunks(order, turns * passages)):
        yield _group(f"{index:04d}", quoted, seed, passages, questions)


def _group(
    name: str, quoted: list[QuestionedPassage], seed: int, passages: int, questions: int
) -> Group:
    random_ = rng(seed, "chat", name)
    history: list[Prompt] = []
    stripped: list[Message] = []
    for number, pages in enumerate(chunks(quoted, passages)):
        titles = ", ".join(f'"{_page(page)}"' for page in pages)
        asked = Message("user", _ASK[min(number, len(_ASK) - 1)].format(titles))
        answer = _answer(pages)
        thoughts = _thoughts(titles, random_)
        served = Message("assistant", f"Thoughts: {thoughts}\n\n{answer}")
        history.append(Prompt((*stripped, asked, served)))
        stripped += [asked, Message("assistant", answer)]
    layers = zip_longest(*(shuffled(page.questions, random_) for page in quoted))
    pool = [question for layer in layers for question in layer if question is not None]
    cases = tuple(
        Case(
            question.id,
            Prompt((*stripped, Message("user", _question(question.question)))),
            question.answers,
            user(_question(question.question)),
        )
        for question in pool[:questions]
    )
    return Group(name, tuple(history), cases)


def _page(page: QuestionedPassage) -> str:
    return page.title or f"page {page.id}"


def _answer(pages: Sequence[QuestionedPassage]) -> str:
    quotes = "\n\n".join(f"{_page(page)}:\n{page.text}" for page in pages)
    return f"Here are the pages.\n\n{quotes}"


def _thoughts(titles: str, random_: random.Random) -> str:
    """Thinking of varying length, so that the answers move by varying distances."""
    lines = shuffled(_THOUGHTS, random_)[: random_.randint(3, len(_THOUGHTS))]
    return " ".join(line.format(pages=titles) for line in lines)


def _question(question: str) -> str:
    return f"{question} Answer with a few words only."
