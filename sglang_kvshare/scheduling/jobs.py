"""What policies see of requests: those that wait, and those that decode.

Both are plain records that their owner (the scheduler of an engine, or a simulator) fills in before
a decision and throws away after it. Times are milliseconds on the owner's clock, which every rank
of a tensor-parallel group must read alike; lengths are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Waiting:
    """One waiting request, as an order sees it.

    Attributes:
        rid: its id.
        number: order of arrival, unique, kept through preemptions.
        arrived_ms: when it came first.
        prompt_tokens: to have in the KV cache before the next token: the prompt, and of one that
            resumes the answer so far.
        prefix_tokens: exact prefix in its own or the public cache. Hits elsewhere must not count:
            the order of the queue would tell one tenant what another has asked (PromptPeek).
        reused_tokens: beyond the prefix, predicted to be taken and not recomputed.
        effective_ms: predicted time of its prefill, rows that are narrowed away counted; tokens
            where no times are known.
        ttft_slo_ms: its first token is due so long after its arrival; ``None`` for no SLO.
        priority: larger goes first; 0 for all unless the engine schedules by priority.
        preemptions: how often it was preempted; above 0 it resumes.
        namespace: its own. What is cached in one decides nothing between two.
    """

    rid: str
    number: int
    arrived_ms: float
    prompt_tokens: int
    prefix_tokens: int = 0
    reused_tokens: int = 0
    effective_ms: float = 0.0
    ttft_slo_ms: float | None = None
    priority: int = 0
    preemptions: int = 0
    namespace: bytes = b""

    @property
    def hit_share(self) -> float:
        """KVShare's hit rate: the share of the prompt that is not computed, 0 to 1."""
        return (self.prefix_tokens + self.reused_tokens) / max(self.prompt_tokens, 1)


@dataclass(slots=True)
class Running:
    """One decoding request, as victim selection sees it.

    Attributes:
        rid: its id.
        number: order of arrival.
        prompt_tokens: length of the prompt.
        output_tokens: answer so far.
        max_new_tokens: bound on the answer.
        private_tokens: tokens that preempting it gives back; what it shares with others is not.
        left_tokens: predicted to come, expected and not padded.
        tbt_slo_ms: mean gap between tokens that it may have; ``None`` for no SLO.
        preempt_ms: predicted time that preempting and resuming it takes, the cheaper way.
        preemptions: how often it was preempted.
        priority: larger is kept longer.
    """

    rid: str
    number: int
    prompt_tokens: int
    output_tokens: int
    max_new_tokens: int
    private_tokens: int
    left_tokens: int
    tbt_slo_ms: float | None = None
    preempt_ms: float = 0.0
    preemptions: int = 0
    priority: int = 0
