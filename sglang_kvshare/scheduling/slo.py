"""What was promised to whom, whether it can still be kept, and how often it was.

TTFT counts from a request's arrival to its first token. TBT is the mean gap between a request's
tokens, from the first to the last, preemptions included: one slow step in a long answer is no
violation, a pause that a reader notices is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["ttft", "tbt"]
#: Tenants that are counted one by one; those that come later are counted together.
_MOST_TENANTS = 1024
_OTHERS = "(others)"


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


@dataclass(slots=True)
class Attainment:
    """Requests whose SLO of one kind was met, and was missed."""

    met: int = 0
    missed: int = 0

    @property
    def share(self) -> float:
        """Of those counted; 1 where there are none."""
        return self.met / counted if (counted := self.met + self.missed) else 1.0


def feasible(waited_ms: float, effective_ms: float, ttft_slo_ms: float | None) -> bool:
    """Whether the first token can still come in time if its prefill started now."""
    return ttft_slo_ms is None or waited_ms + effective_ms <= ttft_slo_ms


class SloBook:
    """SLOs by precedence request, tenant, default; and attainment by tenant.

    Args:
        default: for all.
        tenants: by tenant name.
    """

    def __init__(
        self, default: Slo | None = None, tenants: Mapping[str, Slo] | None = None
    ) -> None:
        self._default = default or Slo()
        self._tenants = dict(tenants or {})
        self._counts: dict[tuple[str, Kind], Attainment] = {}

    def of(self, tenant: str, request: Slo | None = None) -> Slo:
        """What holds for a request of ``tenant`` that asks for ``request``."""
        of_tenant = self._tenants.get(tenant, Slo()).over(self._default)
        return of_tenant if request is None else request.over(of_tenant)

    def observe_ttft(self, tenant: str, ttft_ms: float, slo: Slo) -> None:
        """A first token came; without an SLO nothing is counted."""
        if slo.ttft_ms is not None:
            self._count(tenant, "ttft", ttft_ms <= slo.ttft_ms)

    def observe_tbt(self, tenant: str, mean_gap_ms: float, slo: Slo) -> None:
        """An answer of two tokens or more is complete; see the module for the gap."""
        if slo.tbt_ms is not None:
            self._count(tenant, "tbt", mean_gap_ms <= slo.tbt_ms)

    def lost(self, tenant: str, kind: Kind) -> None:
        """A request with an SLO ended before there was anything to measure."""
        self._count(tenant, kind, False)

    @property
    def attainment(self) -> Mapping[tuple[str, Kind], Attainment]:
        """Counts by tenant and kind."""
        return self._counts

    def _count(self, tenant: str, kind: Kind, met: bool) -> None:
        key = tenant, kind
        if key not in self._counts and len(self._counts) >= 2 * _MOST_TENANTS:
            key = _OTHERS, kind
        counts = self._counts.setdefault(key, Attainment())
        if met:
            counts.met += 1
        else:
            counts.missed += 1
