"""Prompts that begin alike: what stock SGLang's prefix cache is made for."""

from __future__ import annotations

from kvshare_eval.serving.tokens import Tokens
from kvshare_eval.serving.workloads import (
    Load,
    LoadRequest,
    at_least,
    register_workload,
    reusable,
)


@register_workload("shared_prefix")
def shared_prefix(
    tokens: Tokens,
    count: int,
    *,
    prompt_tokens: int = 1000,
    share: float = 0.8,
    prefixes: int = 2,
    output_tokens: int = 8,
) -> Load:
    """One of a few prefixes, then new text."""
    at_least(1, prefixes=prefixes, output_tokens=output_tokens)
    size = reusable(prompt_tokens, share)
    library = tokens.passages(prefixes, size)

    def prompt(prefix: list[int]) -> tuple[int, ...]:
        return (*prefix, *tokens.new(prompt_tokens - size))

    return Load(
        warm_up=tuple(prompt(prefix) for prefix in library),
        requests=tuple(
            LoadRequest(prompt(tokens.rng.choice(library)), output_tokens, size)
            for _ in range(count)
        ),
    )
