"""Multi-hop questions over paragraphs that come in another order each time."""

from __future__ import annotations

from collections.abc import Sequence

from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.hotpotqa import MultiHopQuestion, Paragraph, load_hotpotqa
from kvshare_eval.passages import DEFAULT_SYSTEM
from kvshare_eval.quality.cases import Case, Group, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._shared import at_least, document, reordered, rng, shuffled

_NEUTRAL = "Which of the documents is the longest?"


@register_task("hotpotqa", metric="f1", max_new_tokens=24, first_line=True)
def hotpotqa(data: DataSource, seed: int, *, paragraphs: int = 10) -> Groups:
    """A question's own paragraphs in another order, behind another question.

    Args:
        data: where the questions are.
        seed: decides the order of the questions and of their paragraphs.
        paragraphs: how many of a question's paragraphs stand in a prompt; those that support the
            answer are kept first.
    """
    at_least("hotpotqa", "paragraphs", paragraphs, 2)
    for question in shuffled(load_hotpotqa(data), rng(seed, "hotpotqa")):
        yield _group(question, seed, paragraphs)


def _group(question: MultiHopQuestion, seed: int, paragraphs: int) -> Group:
    random_ = rng(seed, "hotpotqa", question.id)
    supporting_first = sorted(question.paragraphs, key=lambda paragraph: not paragraph.supports)
    base = shuffled(supporting_first[:paragraphs], random_)
    case = Case(
        "0",
        _prompt(reordered(base, random_), question.question),
        question.answers,
        user(f"Question: {question.question}\nAnswer with a few words only."),
    )
    return Group(question.id, (_prompt(base, _NEUTRAL),), (case,))


def _prompt(paragraphs: Sequence[Paragraph], question: str) -> Prompt:
    documents = "".join(document(paragraph.title, paragraph.text) for paragraph in paragraphs)
    return user(
        f"{DEFAULT_SYSTEM}\n\n{documents}Question: {question}\nAnswer with a few words only."
    )
