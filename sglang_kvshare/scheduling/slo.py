"""What was promised to whom, and whether it can still be kept.

TTFT counts from a request's arrival to its first token. TBT is the mean gap between a request's
tokens, from the first to the last, preemptions included: one slow step in a long answer is no
violation, a pause that a reader notices is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Slo:
    """
    Attributes:
        ttft_ms: the first token is due so long after the arrival; ``None`` for no SLO.
        tbt_ms: most mean gap between tokens; ``None`` for no SLO.
    """

    ttft_ms: float | None = None
    tbt_ms: float | None = None

    def over(self, other: Slo) -> Slo:
        """What is said here, and where nothing is, what ``other`` says."""
        return Slo(
            other.ttft_ms if self.ttft_ms is None else self.ttft_ms,
            other.tbt_ms if self.tbt_ms is None else self.tbt_ms,
        )


def feasible(waited_ms: float, effective_ms: float, ttft_slo_ms: float | None) -> bool:
    """Whether the first token can still come in time if its prefill started now."""
    return ttft_slo_ms is None or waited_ms + effective_ms <= ttft_slo_ms


class SloBook:
    """SLOs by precedence: request, tenant, default.

    Args:
        default: for all.
        tenants: by tenant name.
    """

    def __init__(
        self, default: Slo | None = None, tenants: Mapping[str, Slo] | None = None
    ) -> None:
        self._default = default or Slo()
        self._tenants = dict(tenants or {})

    def of(self, tenant: str, request: Slo | None = None) -> Slo:
        """What holds for a request of ``tenant`` that asks for ``request``."""
        of_tenant = self._tenants.get(tenant, Slo()).over(self._default)
        return of_tenant if request is None else request.over(of_tenant)
