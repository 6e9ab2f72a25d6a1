"""What KVShare keeps about one request in the scheduler process; it lives and dies with ``Req``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_kvshare.plan import Placement
from sglang_kvshare.request import RequestOptions, ReuseReport

_ATTRIBUTE = "_kvshare"


@dataclass(eq=False)
class RequestState:
    """Mutable state of one request; compared by identity.

    Attributes:
        options: the request's settings.
        placement: donor values that are still to be placed; ``None`` when there are none left.
        donor_locks: tree locks that keep the donors of ``placement`` in the tree.
        placed_tokens: donor values placed so far in this prefill.
        exact_until: positions from here on rest on placed values; ``None`` while none do.
        report: what the response says; fixed at the end of the first prefill.
        reported: the report is fixed (a retracted request prefills again, but is counted once).
    """

    options: RequestOptions
    placement: Placement | None = None
    donor_locks: list[Any] = field(default_factory=list)
    placed_tokens: int = 0
    exact_until: int | None = None
    report: ReuseReport = field(default_factory=ReuseReport)
    reported: bool = False


def attach(req: Any, state: RequestState) -> None:
    setattr(req, _ATTRIBUTE, state)


def state_of(req: Any) -> RequestState | None:
    """``None`` for requests that did not come through the scheduler's ordinary entrance."""
    return getattr(req, _ATTRIBUTE, None)
