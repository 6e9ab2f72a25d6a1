"""Retrieval: passages of a common pool, in another order in every prompt."""

from __future__ import annotations

import math

from kvshare_eval.serving.tokens import Tokens
from kvshare_eval.serving.workloads import (
    Load,
    LoadRequest,
    at_least,
    register_workload,
    reusable,
)


@register_workload("rag")
def rag(
    tokens: Tokens,
    count: int,
    *,
    prompt_tokens: int = 1000,
    share: float = 0.8,
    passage_tokens: int = 200,
    pool: float = 2.0,
    output_tokens: int = 8,
) -> Load:
    """Passages drawn from a pool in random order, new text around each of them.

    The passages of a prompt are as many as fit at ``passage_tokens``, and as long as the share
    needs. The pool is ``pool`` times as large; the warm-up asks about each of its passages once.
    """
    at_least(1, passage_tokens=passage_tokens, pool=pool, output_tokens=output_tokens)
    wanted = reusable(prompt_tokens, share)
    drawn = max(1, round(wanted / passage_tokens)) if wanted else 0
    library = tokens.passages(math.ceil(drawn * pool), wanted // drawn if drawn else 0)
    taken = sum(len(passage) for passage in library[:drawn])

    def prompt(passages: list[list[int]]) -> tuple[int, ...]:
        return tuple(tokens.spread(passages, prompt_tokens - taken))

    starts = range(0, len(library), drawn or 1)
    warm_up = [(library[start:] + library)[:drawn] for start in starts]
    return Load(
        warm_up=tuple(prompt(passages) for passages in warm_up),
        requests=tuple(
            LoadRequest(prompt(tokens.rng.sample(library, drawn)), output_tokens, taken)
            for _ in range(count)
        ),
    )
