"""A help desk: many customers, few intents, the same help articles."""

from __future__ import annotations

from kvshare_eval.serving.tokens import Tokens
from kvshare_eval.serving.workloads import (
    Load,
    LoadRequest,
    at_least,
    register_workload,
    reusable,
)

#: A question, and how many of its words each customer puts differently.
QUESTION_TOKENS = 24
REWORDED_TOKENS = 2


@register_workload("support")
def support(
    tokens: Tokens,
    count: int,
    *,
    prompt_tokens: int = 1000,
    share: float = 0.8,
    articles: int = 3,
    intents: int = 8,
    output_tokens: int = 16,
) -> Load:
    """A new customer's data, an intent's articles in the order of retrieval, a similar question.

    Articles are shared by neighbouring intents; the first intents are asked most (one over rank).
    Only the articles count as reusable: a question that was put a little differently is a bonus.
    """
    at_least(1, articles=articles, intents=intents, output_tokens=output_tokens)
    size = reusable(prompt_tokens, share) // articles
    library = tokens.passages(intents + articles - 1, size)
    questions = tokens.passages(intents, QUESTION_TOKENS)
    ranks = [1 / (rank + 1) for rank in range(intents)]
    new = prompt_tokens - articles * size

    def prompt(intent: int) -> tuple[int, ...]:
        question = list(questions[intent])
        for place in tokens.rng.sample(range(QUESTION_TOKENS), REWORDED_TOKENS):
            question[place] = tokens.new(1)[0]
        question = question[: new // 2]
        found = tokens.rng.sample(library[intent : intent + articles], articles)
        customer = tokens.new(new - len(question))
        return (*customer, *(token for one in found for token in one), *question)

    # Every articles-th intent, and the last one, together show each article once at least.
    shown = sorted({*range(0, intents, articles), intents - 1})
    asked = tokens.rng.choices(range(intents), ranks, k=count)
    return Load(
        warm_up=tuple(prompt(intent) for intent in shown),
        requests=tuple(
            LoadRequest(prompt(intent), output_tokens, articles * size) for intent in asked
        ),
    )
