"""What arrives: arrays over requests, without any text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvshare_eval.errors import EvalError
from kvshare_eval.simulator.costs import PS_PER_MS

Ints = npt.NDArray[np.int64]
#: Twice as long still fits into 64 bits.
_MOST_PS = 1 << 61


@dataclass(frozen=True)
class Requests:
    """Requests in order of arrival.

    Attributes:
        name: of the workload.
        arrived_ps: when each comes, ascending.
        prompt: tokens of each prompt, at least 1.
        output: tokens of each answer, at least 1; the scheduler does not know it.
        max_new: bound on the answer that the request names.
        blocks: content numbers of the prompt's blocks, in order; equal numbers are equal tokens.
            Empty: a prompt that shares nothing.
        block_tokens: tokens of a block, but of the last.
        chained: equal numbers also mean equal blocks before (Mooncake); else a block may be met
            anywhere.
        ignore_eos: the bound is the length, and the scheduler knows (SGLang reserves it whole).
        ttft_slo_ms, tbt_slo_ms: that all requests have; ``None`` for no bound.
        namespaces: whose each is; empty: all belong to one. Their contents must differ where they
            are not to share what is cached.
    """

    name: str
    arrived_ps: Ints
    prompt: Ints
    output: Ints
    max_new: Ints
    blocks: Sequence[tuple[int, ...]] = ()
    block_tokens: int = 512
    chained: bool = True
    ignore_eos: bool = False
    ttft_slo_ms: float | None = None
    tbt_slo_ms: float | None = None
    namespaces: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.prompt)

    def namespace(self, i: int) -> str:
        """Empty where all belong to one."""
        return self.namespaces[i] if self.namespaces else ""

    @property
    def rate(self) -> float:
        """Arrivals a second."""
        if len(self) < 2:
            return float("nan")
        span = int(self.arrived_ps[-1] - self.arrived_ps[0]) / PS_PER_MS / 1000
        return (len(self) - 1) / span if span else float("inf")

    def faster(self, factor: float) -> Requests:
        """The same, each gap between arrivals divided by ``factor``."""
        arrived = np.rint(self.arrived_ps / factor).astype(np.int64)
        return replace(self, arrived_ps=arrived)

    def at_rate(self, rate: float) -> Requests:
        """The same at a mean rate, in requests a second; a single request comes as it does.

        Raises:
            EvalError: so few a second that time cannot be counted.
        """
        if len(self) < 2:
            return self
        if len(self) / rate * 1e12 > _MOST_PS:
            raise EvalError(f"{len(self)} requests at {rate:g} a second take too long to count")
        return self.faster(rate / self.rate)

    def of_one(self) -> Requests:
        """The same, as if one had sent all. What they share is told by their contents alone."""
        return replace(self, namespaces=())

    def with_slo(self, ttft_ms: float | None, tbt_ms: float | None) -> Requests:
        return replace(self, ttft_slo_ms=ttft_ms, tbt_slo_ms=tbt_ms)
