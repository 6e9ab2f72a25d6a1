"""Agents: a context that grows step by step, its tool outputs re-ordered and trimmed."""

from __future__ import annotations

from kvshare_eval.serving.tokens import Tokens
from kvshare_eval.serving.workloads import (
    Load,
    LoadRequest,
    at_least,
    register_workload,
    reusable,
)

#: New words that every step adds at its end: what the agent thinks next.
THOUGHT_TOKENS = 8


@register_workload("agent")
def agent(
    tokens: Tokens,
    count: int,
    *,
    prompt_tokens: int = 1000,
    tool_share: float = 0.8,
    steps: int = 5,
    sessions: int = 4,
    trimmed: float = 0.3,
    output_tokens: int = 16,
) -> Load:
    """A task, the tool outputs so far in changing order, some trimmed, and one new output a step.

    A session has ``steps`` steps; its last prompt has at most ``prompt_tokens``, of which
    ``tool_share`` are tool outputs. ``sessions`` of them run at a time, turn by turn. Each earlier
    output loses its first or its last third with probability ``trimmed``. Nothing is warmed up: a
    step reuses what the steps before it left.
    """
    at_least(1, steps=steps, sessions=sessions, output_tokens=output_tokens)
    at_least(0, trimmed=trimmed)
    tool_tokens = reusable(prompt_tokens, tool_share) // steps
    at_least(THOUGHT_TOKENS, new_tokens=prompt_tokens - steps * tool_tokens)
    task_tokens = prompt_tokens - steps * tool_tokens - THOUGHT_TOKENS

    def trim(output: list[int]) -> list[int]:
        if tokens.rng.random() >= trimmed:
            return output
        third = len(output) // 3
        return output[third:] if tokens.rng.random() < 0.5 else output[: len(output) - third]

    requests: list[LoadRequest] = []
    while len(requests) < count:
        tasks = [tokens.new(task_tokens) for _ in range(sessions)]
        seen: list[list[list[int]]] = [[] for _ in range(sessions)]
        for _ in range(steps):
            for task, outputs in zip(tasks, seen, strict=True):
                earlier = [trim(one) for one in tokens.rng.sample(outputs, len(outputs))]
                known = [*task, *(token for one in earlier for token in one)]
                latest = tokens.new(tool_tokens)
                prompt = (*known, *latest, *tokens.new(THOUGHT_TOKENS))
                repeated = len(known) if outputs else 0
                requests.append(LoadRequest(prompt, output_tokens, repeated))
                outputs.append(latest)
    return Load(warm_up=(), requests=tuple(requests[:count]))
