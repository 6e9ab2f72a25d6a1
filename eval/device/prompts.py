"""Prompts of which most was seen before: passages of one donor, in another order, at other places.

donor      |head'| passage 0 | passage 1 | passage 2 |
prompt     |head | passage 2 | passage 0 | passage 1 |   new tokens   |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvshare_eval.device.kv_pool import KVPool
from sglang_kvshare.plan import ReusePlan, Span

#: Tokens of one passage, as nearly as the prompt allows.
PASSAGE_TOKENS = 512


@dataclass(frozen=True, eq=False)
class ReusedPrompt:
    """
    Attributes:
        tokens, donor_tokens: int64, on the pool's device.
        slots, donor_slots: int64, their KV rows.
        plan: the prompt's passages as spans of the donor.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    donor_tokens: torch.Tensor
    donor_slots: torch.Tensor
    plan: ReusePlan


def reused_prompt(
    pool: KVPool,
    vocabulary: int,
    prompt_tokens: int,
    *,
    share: float = 0.95,
    passage_tokens: int = PASSAGE_TOKENS,
    seed: int = 0,
) -> ReusedPrompt:
    """A prompt of which ``share`` was in a donor; what is left stands before and behind, the most
    of it behind. Takes two rows of the pool, the donor's still to be computed."""
    generator = torch.Generator().manual_seed(seed)
    matched = round(share * prompt_tokens)
    count = max(2, round(matched / passage_tokens))
    bounds = [matched * number // count for number in range(count + 1)]
    head = max(1, (prompt_tokens - matched) // 8)
    tail = prompt_tokens - matched - head
    # Another length than the prompt's head, so that no passage can stay where it was.
    before = 2 * head + 3

    def drawn(tokens: int) -> torch.Tensor:
        return torch.randint(vocabulary, (tokens,), generator=generator)

    passages = drawn(matched)
    donor_slots = pool.take(before + matched)
    on_host = donor_slots.cpu().numpy()
    order = torch.randperm(count, generator=generator).tolist()
    parts, spans, at = [drawn(head)], [], head
    for number in order:
        begin, end = bounds[number], bounds[number + 1]
        parts.append(passages[begin:end])
        source = before + begin
        spans.append(Span(at, source, on_host[source : source + end - begin]))
        at += end - begin
    parts.append(drawn(tail))
    device = donor_slots.device
    return ReusedPrompt(
        tokens=torch.cat(parts).to(device),
        slots=pool.take(prompt_tokens),
        donor_tokens=torch.cat([drawn(before), passages]).to(device),
        donor_slots=donor_slots,
        plan=ReusePlan(prompt_tokens, 0, tuple(spans)),
    )


def needed_tokens(prompt_tokens: int) -> int:
    """Slots for a prompt and its donor, generously."""
    return 2 * prompt_tokens + prompt_tokens // 4 + 64
