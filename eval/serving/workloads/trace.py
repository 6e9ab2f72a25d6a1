"""Replay of a trace's arrivals and lengths."""

from __future__ import annotations

import random
from itertools import islice

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders.traces import BLOCK_TOKENS, TraceRequest, load_trace
from kvshare_eval.serving.tokens import Tokens
from kvshare_eval.serving.workloads import Load, LoadRequest, at_least, register_workload


@register_workload("trace", arrivals=True)
def trace(
    tokens: Tokens,
    count: int,
    *,
    name: str = "azure_llm_2023_conv",
    speed: float = 1.0,
    skip: int = 0,
    seconds: float = 60.0,
    scale: float = 1.0,
    max_tokens: int = 4000,
    max_output_tokens: int = 64,
) -> Load:
    """The requests of a trace at their times; equal block hashes give equal tokens.

    ``skip`` leaves out the first ones; at most ``count``, as far as ``seconds`` of the replay, are
    taken, ``speed`` times as fast as they came. Prompts, and the blocks of which they are made, are
    ``scale`` times as long as in the trace, then cut at ``max_tokens``.
    """
    at_least(1, max_tokens=max_tokens, max_output_tokens=max_output_tokens)
    at_least(0, skip=skip)
    if min(speed, scale, seconds) <= 0:
        raise EvalError(f"speed={speed:g},scale={scale:g},seconds={seconds:g}: must be above 0")
    block_tokens = max(1, round(BLOCK_TOKENS * scale))
    # Blocks must not repeat those of another window, yet be the same for all of its sides.
    salt = tokens.rng.random()
    sent: set[int] = set()
    requests: list[LoadRequest] = []
    start: float | None = None
    for one in islice(load_trace(tokens.corpus.data, name), skip, skip + count):
        start = one.arrival_s if start is None else start
        due_s = (one.arrival_s - start) / speed
        if due_s >= seconds:
            break
        size = min(max_tokens, max(1, round(one.prompt_tokens * scale)))
        prompt = _prompt(tokens, one, size, block_tokens, salt)
        blocks = one.block_hashes[: -(-size // block_tokens)]
        known = sum(
            min(block_tokens, size - place * block_tokens)
            for place, block in enumerate(blocks)
            if block in sent
        )
        sent.update(blocks)
        requests.append(
            LoadRequest(prompt, max(1, min(max_output_tokens, one.output_tokens)), known, due_s)
        )
    if not requests:
        raise EvalError(f"trace {name} has no request after the first {skip}")
    return Load(warm_up=(), requests=tuple(requests))


def _prompt(
    tokens: Tokens, one: TraceRequest, size: int, block_tokens: int, salt: float
) -> tuple[int, ...]:
    prompt: list[int] = []
    for block in one.block_hashes:
        if len(prompt) >= size:
            break
        rng = random.Random(f"{salt} block {block}")
        prompt += rng.choices(tokens.corpus.word_ids, k=block_tokens)
    return tuple(prompt[:size] + tokens.new(size - len(prompt)))
