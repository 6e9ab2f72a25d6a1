"""SGLang's own way of reserving, as an object, so that it can be simulated and compared with.

Of every running request SGLang 0.5.23 sets aside a share of what it may still generate. The share
(`new_token_ratio`) begins high, decays with every decode step, and is set anew by a retraction. So
it admits ever more until the pool runs dry, and then retracts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_kvshare.scheduling.jobs import Running

#: Nobody is taken to generate more (`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`).
CLIP_MAX_NEW_TOKENS = 4096
#: Steps that a retraction is to buy (`SGLANG_RETRACT_DECODE_STEPS`).
RETRACT_DECODE_STEPS = 20


@dataclass(slots=True)
class NewTokenRatio:
    """Share of a request's remaining `max_new_tokens` that is set aside (`NewTokenRatioTracker`).

    Attributes:
        first: at the start, and whenever nothing runs.
        least: it decays no further.
        decay: a decode step.
        current: the share now.
    """

    first: float
    least: float
    decay: float
    current: float

    @classmethod
    def of(
        cls,
        conservativeness: float = 1.0,
        first: float = 0.7,
        least_factor: float = 0.14,
        decay_steps: int = 600,
    ) -> NewTokenRatio:
        """By SGLang's defaults and `--schedule-conservativeness`."""
        first = min(first * conservativeness, 1.0)
        least = min(first * least_factor, 1.0)
        return cls(first, least, (first - least) / decay_steps, first)

    def step(self) -> None:
        """A decode step went by."""
        self.current = max(self.current - self.decay, self.least)

    def idle(self) -> None:
        """Nothing runs any more."""
        self.current = self.first

    def retracted(self, kept: Iterable[Running]) -> None:
        """Requests were retracted, these stay."""
        kept = list(kept)
        decoded = sum(one.output_tokens for one in kept)
        most = sum(one.max_new_tokens for one in kept)
        self.current = min(1.0, (decoded + RETRACT_DECODE_STEPS * len(kept)) / (most + 1))


class StockBudget:
    """KV budget of one pass over the waiting queue (`PrefillAdder`, `PrefillBudget`).

    Args:
        available_tokens: free and evictable.
        running: what decodes.
        new_token_ratio: see above.
        page_tokens: of the allocator.
    """

    def __init__(
        self,
        available_tokens: int,
        running: Iterable[Running],
        new_token_ratio: float,
        page_tokens: int = 1,
    ) -> None:
        self._page = page_tokens
        self._now = float(available_tokens)
        self._total = available_tokens - sum(
            _clipped(one.max_new_tokens - one.output_tokens) * new_token_ratio for one in running
        )

    @classmethod
    def with_reserved(
        cls, available_tokens: int, reserved_tokens: float, page_tokens: int = 1
    ) -> StockBudget:
        """For a caller that keeps the sum over what decodes itself.

        Args:
            reserved_tokens: what may still be generated, by all, times the ratio.
        """
        budget = cls(available_tokens, (), 0.0, page_tokens)
        budget._total -= reserved_tokens
        return budget

    @property
    def exhausted(self) -> bool:
        """Nobody else is looked at."""
        return self._total <= 0 or self._now <= 0

    def admit(self, extend_tokens: int, max_new_tokens: int, output_tokens: int = 0) -> bool:
        """Whether a request fits; if so it is charged.

        Args:
            extend_tokens: to be computed, the prefix left out.
            max_new_tokens: bound on the answer.
            output_tokens: answer so far, of one that was retracted.
        """
        if not self.fits(extend_tokens, max_new_tokens, output_tokens):
            return False
        self.charge(extend_tokens, max_new_tokens)
        return True

    def fits(self, extend_tokens: int, max_new_tokens: int, output_tokens: int = 0) -> bool:
        """The same without charging it: a prompt that fits whole may be cut into chunks."""
        left = _clipped(max(max_new_tokens - output_tokens, 0))
        return extend_tokens + left + self._page < self._total

    def charge(self, extend_tokens: int, max_new_tokens: int) -> None:
        """
        Args:
            max_new_tokens: 0 for a chunk that is not the last.
        """
        charge = -(-extend_tokens // self._page) * self._page + self._page
        self._now -= charge
        # Not a slip: SGLang charges all that it may generate, the answer so far included.
        self._total -= charge + _clipped(max_new_tokens)

    def pin(self, tokens: int) -> None:
        """So many of the evictable tokens were locked, below 0 for unlocked."""
        self._now -= tokens
        self._total -= tokens

    def chunk_tokens(self, limit_tokens: int) -> int:
        """Of the next chunk of a prompt in progress, which must go on to give back its slots."""
        left = min(limit_tokens, int(self._total))
        return left if left > 0 else limit_tokens


def _clipped(tokens: int) -> int:
    return min(tokens, CLIP_MAX_NEW_TOKENS)
