"""Prompts that have nothing in common: what an unused KVShare costs."""

from __future__ import annotations

from kvshare_eval.serving.tokens import Tokens
from kvshare_eval.serving.workloads import Load, LoadRequest, at_least, register_workload


@register_workload("no_reuse")
def no_reuse(
    tokens: Tokens, count: int, *, prompt_tokens: int = 1000, output_tokens: int = 8
) -> Load:
    """New text only."""
    at_least(1, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    return Load(
        warm_up=(),
        requests=tuple(
            LoadRequest(tuple(tokens.new(prompt_tokens)), output_tokens, 0) for _ in range(count)
        ),
    )
