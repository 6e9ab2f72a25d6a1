"""A support desk: near-identical questions of many customers, over help-centre articles."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.banking77 import CustomerQuestion, load_banking77
from kvshare_eval.loaders.help_centre import Article, load_articles
from kvshare_eval.loaders.text import word_count
from kvshare_eval.quality.cases import Case, Group, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._retrieval import TfIdf
from kvshare_eval.quality.tasks._shared import at_least, chunks, document, rng, shuffled

_INSTRUCTION = "You work at a bank's support desk. Answer the customer from the articles below."
_FIRST = ("Amara", "Boris", "Celia", "Dev", "Esther", "Felix", "Gita", "Harald", "Imani", "Jorge")
_LAST = ("Adeyemi", "Brandt", "Costa", "Dubois", "Eriksen", "Fontaine", "Gupta", "Horvat", "Ito")


@register_task("support", metric="contains", max_new_tokens=32)
def support(
    data: DataSource, seed: int, *, articles: int = 3, questions: int = 2, max_words: int = 200
) -> Groups:
    """The same articles for another customer with nearly the same question.

    The articles of a group are those that word overlap (tf-idf) finds for all its questions
    together, as a desk's search finds the same for near-identical questions; each customer sees
    them in the order that fits the customer's own wording best. The customer's line stands at the
    top, so that no two prompts begin alike.

    Args:
        data: where articles and questions are.
        seed: decides the order of the questions and the customers.
        articles: how many stand in a prompt.
        questions: how many customers of an intent are measured; one more asked before.
        max_words: articles that are longer are left out.
    """
    at_least("support", "articles", articles, 1)
    at_least("support", "questions", questions, 1)
    shelf = [a for a in load_articles(data) if word_count(a.text) <= max_words]
    if len(shelf) < articles:
        raise EvalError(f"option max_words of task support: only {len(shelf)} articles are left")
    index = TfIdf([f"{article.title} {article.title} {article.text}" for article in shelf])
    for name, asked in _rounds(load_banking77(data), seed, questions + 1):
        together = " ".join(question.text for question in asked)
        found = [shelf[i] for i in index.best(together, articles)]
        yield _group(name, asked, found, seed)


def _rounds(
    questions: Sequence[CustomerQuestion], seed: int, size: int
) -> Iterator[tuple[str, list[CustomerQuestion]]]:
    """Groups of one intent each: a first group of every intent, then a second, and so on."""
    by_intent: defaultdict[str, list[CustomerQuestion]] = defaultdict(list)
    for question in questions:
        by_intent[question.intent].append(question)
    intents = shuffled(by_intent, rng(seed, "support"))
    of_intents = [
        chunks(shuffled(dict.fromkeys(by_intent[intent]), rng(seed, "support", intent)), size)
        for intent in intents
    ]
    for number, layer in enumerate(zip_longest(*of_intents)):
        for intent, asked in zip(intents, layer, strict=True):
            if asked is not None:
                yield f"{intent}-{number}", asked


def _group(name: str, asked: list[CustomerQuestion], found: list[Article], seed: int) -> Group:
    random_ = rng(seed, "support", name)
    customers = _customers(random_, len(asked))
    index = TfIdf([f"{article.title} {article.text}" for article in found])
    prompts = [
        _prompt(customer, [found[i] for i in index.best(question.text, len(found))], question.text)
        for customer, question in zip(customers, asked, strict=True)
    ]
    cases = tuple(
        Case(str(number), prompt, question.answers, user(_question(question.text)))
        for number, (prompt, question) in enumerate(zip(prompts[1:], asked[1:], strict=True))
    )
    return Group(name, (prompts[0],), cases)


def _customers(random_: random.Random, count: int) -> list[str]:
    names = random_.sample([f"{first} {last}" for first in _FIRST for last in _LAST], count)
    return [f"{name}, account {random_.randint(10**7, 10**8 - 1)}" for name in names]


def _question(question: str) -> str:
    return f"Question: {question}\nAnswer in one short sentence."


def _prompt(customer: str, articles: Sequence[Article], question: str) -> Prompt:
    shown = "".join(document(a.title, a.text, kind="Article") for a in articles)
    return user(f"Customer: {customer}\n\n{_INSTRUCTION}\n\n{shown}{_question(question)}")
