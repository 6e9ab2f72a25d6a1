"""Questions over several passages that come in another order each time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.squad import PassageQuestion, QuestionedPassage, load_squad
from kvshare_eval.passages import DEFAULT_SYSTEM
from kvshare_eval.quality.cases import Case, Group, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._excerpts import short_passages
from kvshare_eval.quality.tasks._shared import at_least, chunks, document, reordered, rng, shuffled

WORDINGS = ("fluent", "disfluent", "both")
#: How the passages came into the cache: several together in another order, or each on its own, at
#: the very beginning, behind a few sink tokens, behind a neutral text, or behind another passage.
DONORS = ("together", "alone", "sinks", "preamble", "neighbour")
_SINKS = "\n" * 14
_PREAMBLE = (
    "Below is a document from a collection. Each document of the collection has a title in its "
    "first line and a text that follows it. The documents are about history, science, sports, "
    "places and people. They are kept so that questions about them can be answered, and each can "
    "be read on its own.\n\n"
)
#: Asked in the history where every question of the passages is needed for the cases.
_NEUTRAL = "Which of the documents is the longest?"


@register_task("squad", metric="f1", max_new_tokens=24, first_line=True)
def squad(
    data: DataSource,
    seed: int,
    *,
    passages: int = 4,
    questions: int = 4,
    wording: str = "both",
    ask_variant: bool = False,
    donors: str = "together",
    max_words: int = 110,
    edited_percent: int = 0,
) -> Groups:
    """The same passages in another order, behind another question.

    Args:
        data: where the passages are.
        seed: decides which passages stand together, and their orders.
        passages: how many stand in a prompt.
        questions: how many are asked about a group's passages; the answer is in any of them.
        wording: which wording is asked, ``fluent``, ``disfluent`` or ``both`` (a case each).
        ask_variant: the history asks the cases' questions in the other wording, over the passages
            in an order of their own; needs one wording.
        donors: how the passages came into the cache, one of :data:`DONORS`.
        max_words: the longest passage; longer ones come last and as excerpts.
        edited_percent: of the words of the cached passages, replaced by another of their
            words, preceded by one, or left out. What is asked about stays as it is.
    """
    at_least("squad", "passages", passages, 2)
    if not 0 <= edited_percent < 100:
        raise EvalError(
            f"option edited_percent of task squad: {edited_percent}; allowed are 0 to 99"
        )
    at_least("squad", "questions", questions, 1)
    loaded = load_squad(data)
    has_variants = any(question.variant for passage in loaded for question in passage.questions)
    _check_wording(wording, ask_variant, has_variants)
    if donors not in DONORS:
        raise EvalError(f"option donors of task squad: {donors!r}; allowed are {', '.join(DONORS)}")
    if ask_variant and donors != "together":
        raise EvalError("option ask_variant of task squad needs donors=together")
    order = short_passages(loaded, max_words, rng(seed, "squad"))
    for index, together in enumerate(chunks(order, passages)):
        yield _group(
            f"{index:04d}",
            together,
            seed,
            questions,
            wording,
            ask_variant,
            donors,
            edited_percent / 100,
        )


def _check_wording(wording: str, ask_variant: bool, has_variants: bool) -> None:
    if wording not in WORDINGS:
        raise EvalError(
            f"option wording of task squad: {wording!r}; allowed are {', '.join(WORDINGS)}"
        )
    if ask_variant and wording == "both":
        raise EvalError("option ask_variant of task squad needs wording=fluent or disfluent")
    if (ask_variant or wording == "disfluent") and not has_variants:
        raise EvalError("the passages at hand have questions in one wording: use wording=fluent")


def _group(
    name: str,
    together: list[QuestionedPassage],
    seed: int,
    questions: int,
    wording: str,
    ask_variant: bool,
    donors: str,
    edited: float,
) -> Group:
    random_ = rng(seed, "squad", name)
    base = shuffled(together, random_)
    pool = list(_interleaved([shuffled(p.questions, random_) for p in base]))
    asked, spare = pool[:questions], pool[questions:]
    cases = tuple(
        Case(
            f"{question.id}/{form}",
            _prompt(reordered(base, rng(seed, "squad", name, question.id, form)), text),
            question.answers,
            _prompt([], text),
        )
        for question in asked
        for form, text in _wordings(question, wording)
    )
    if edited:
        words = rng(seed, "squad", name, "edited")
        base = [replace(passage, text=_edited(passage.text, edited, words)) for passage in base]
    if donors != "together":
        history = tuple(_apart(base, donors))
    elif ask_variant:
        history = tuple(
            _prompt(_same_first(base, rng(seed, "squad", name, question.id, "history")), text)
            for question in asked
            for form, text in _wordings(question, "both")
            if form != wording
        )
    else:
        history = (_prompt(base, spare[0].question if spare else _NEUTRAL),)
    return Group(name, history, cases)


def _edited(text: str, share: float, random_: random.Random) -> str:
    """Paragraphs and their number stay."""
    told = []
    for line in text.split("\n"):
        words = line.split(" ")
        kept: list[str] = []
        for word in words:
            other = random_.choice(words)
            how = random_.random() / share
            if how >= 1:
                kept.append(word)
            elif how < 2 / 3:
                kept += [other] if how < 1 / 3 else [other, word]
        told.append(" ".join(kept))
    return "\n".join(told)


def _apart(base: Sequence[QuestionedPassage], donors: str) -> Iterator[Prompt]:
    """Each passage in a prompt of its own."""
    texts = [document(passage.title, passage.text) for passage in base]
    for index, text in enumerate(texts):
        before = {
            "alone": "",
            "sinks": _SINKS,
            "preamble": _PREAMBLE,
            "neighbour": texts[index - 1],
        }
        yield Prompt(text=f"{before[donors]}{text}Read.")


def _interleaved(of_passages: Sequence[Sequence[PassageQuestion]]) -> Iterator[PassageQuestion]:
    """One question of each passage, then the second of each, and so on."""
    for layer in zip_longest(*of_passages):
        yield from (question for question in layer if question is not None)


def _wordings(question: PassageQuestion, wording: str) -> Iterator[tuple[str, str]]:
    if wording != "disfluent":
        yield "fluent", question.question
    if wording != "fluent" and question.variant:
        yield "disfluent", question.variant


def _same_first(items: list[QuestionedPassage], random_: random.Random) -> list[QuestionedPassage]:
    """An order that begins as ``items`` does, so that no case begins like it."""
    return [items[0], *shuffled(items[1:], random_)]


def _prompt(passages: Sequence[QuestionedPassage], question: str) -> Prompt:
    if not passages:
        return user(f"Question: {question}\nAnswer with a few words only.")
    documents = "".join(document(passage.title, passage.text) for passage in passages)
    return user(
        f"{DEFAULT_SYSTEM}\n\n{documents}Question: {question}\nAnswer with a few words only."
    )
