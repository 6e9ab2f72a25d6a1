"""What KVShare keeps about one request in the scheduler process; it lives and dies with ``Req``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_kvshare.plan import BoolArray, Int64Array, Placement, ReusePlan, Span
from sglang_kvshare.recompute.choice import Choice
from sglang_kvshare.recompute.refresh_queue import LeftOver, RefreshQueue
from sglang_kvshare.request import RequestOptions, ReuseReport

if TYPE_CHECKING:
    from sglang_kvshare.engine.schedule import Job

_ATTRIBUTE = "_kvshare"
#: Positions of a request that holds no moved value.
NOTHING_PLACED: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Pending:
    """A choice that waits for the forward.

    Attributes:
        plan: what ``placement`` holds all matched tokens of.
        without_measuring: bool ``[plan.matched_tokens]``, what is recomputed in chunks that end
            before the prompt does.
    """

    choice: Choice
    plan: ReusePlan
    without_measuring: BoolArray


@dataclass(frozen=True)
class EdgesUsed:
    """The plan that a request's reuse edges were kept of, and where they begin."""

    anchor: int
    namespace: bytes
    spans: tuple[Span, ...]


#: What is true as long as a prefill's values are there, and what its decoding has come to.
_LASTING = (
    *("placed", "exact_until", "depth", "planned_depth", "generation"),
    *("queue", "decode_steps", "ridden", "again"),
)


@dataclass(eq=False)
class RequestState:
    """Mutable state of one request; compared by identity.

    Attributes:
        options: the request's settings.
        tenant: whose it is; ``None`` where tenants are not told apart, and for unknown ones.
        epoch: how often the tenant had been forgotten when the prefill began.
        domain: equal for requests that may share with each other by their tenants' classes.
        shared_namespaces: where it finds donors besides its own namespace.
        placement: donor values that are still to be placed; ``None`` when there are none left.
        donor_locks: tree locks that keep the donors of ``placement`` in the tree.
        pending: how the tokens of ``placement`` that are recomputed will be chosen, where that is
            not known yet.
        recomputed_tokens: of this prefill, chosen in its forwards.
        computed_rows: rows that ran in this prefill, as a mean over layers.
        left_over: of each chunk of this prefill, what was reused and not recomputed, if it is to be
            refreshed.
        queue: reused tokens that are recomputed while the request decodes.
        refreshed_tokens: those that were, until a retraction: like all of the report they are
            counted once.
        ridden: rows that this request had in decode steps, since the queue was made.
        again: this prefill is not the first.
        decode_steps: since the queue was made.
        fell_back: a chunk of this prefill had to be chosen without measuring.
        branch_tokens: tokens of this prefill's prefix that came from an approximate branch.
        placed: positions of donor values placed in this prefill, ascending, one array a chunk.
        exact_until: positions from here on rest on placed values; ``None`` while none do.
        generation: of the model's weights, when the prefill began.
        depth: approximations that rest on each other from ``exact_until`` on.
        planned_depth: what ``depth`` becomes when ``placement`` is placed.
        edges: of the plan of this prefill.
        deviations: measured at the check layer, by the start of the span.
        lost_because: why less was placed than planned, if less was.
        report: what the response says; fixed at the end of the first prefill.
        reported: the report is fixed (a retracted request prefills again, but is counted once).
        job: what scheduling knows of it; ``None`` where SGLang schedules alone.
        host_copy: its keys and values in host memory, while it is preempted
            (:class:`~sglang_kvshare.engine.swapping.HostCopy`).
        restored_slots: int64, what was copied back, until its row is written.
    """

    options: RequestOptions
    tenant: str | None = None
    domain: str = ""
    shared_namespaces: tuple[bytes, ...] = ()
    epoch: int = 0
    placement: Placement | None = None
    pending: Pending | None = None
    recomputed_tokens: int = 0
    computed_rows: float = 0.0
    left_over: list[LeftOver] = field(default_factory=list)
    queue: RefreshQueue | None = None
    refreshed_tokens: int = 0
    ridden: int = 0
    again: bool = False
    decode_steps: int = 0
    fell_back: bool = False
    donor_locks: list[Any] = field(default_factory=list)
    branch_tokens: int = 0
    placed: list[Int64Array] = field(default_factory=list)
    exact_until: int | None = None
    generation: int = 0
    depth: int = 0
    planned_depth: int = 0
    edges: EdgesUsed | None = None
    deviations: dict[int, float] = field(default_factory=dict)
    lost_because: str = "donor_evicted"
    report: ReuseReport = field(default_factory=ReuseReport)
    reported: bool = False
    job: Job | None = None
    host_copy: Any = None
    restored_slots: Any = None

    def told(self) -> ReuseReport:
        """The report, with what the request has refreshed until now."""
        return replace(self.report, refreshed_tokens=self.refreshed_tokens)

    @property
    def placed_tokens(self) -> int:
        return sum(part.shape[0] for part in self.placed)

    def placed_positions(self) -> Int64Array:
        """int64 ``[placed_tokens]``, ascending."""
        return np.concatenate(self.placed) if self.placed else NOTHING_PLACED

    def begin_prefill(
        self, exact_tokens: int, branch_tokens: int, depth: int, generation: int
    ) -> None:
        """A prefill starts on a prefix of ``exact_tokens`` and ``branch_tokens`` of ``depth``."""
        self.again = self.reported
        self.placed = []
        self.pending = None
        self.recomputed_tokens = 0
        self.computed_rows = 0.0
        self.queue = None
        self.left_over = []
        self.decode_steps = 0
        self.ridden = 0
        self.fell_back = False
        self.generation = generation
        self.branch_tokens = branch_tokens
        self.exact_until = exact_tokens if branch_tokens else None
        self.depth = self.planned_depth = depth
        self.lost_because = "donor_evicted"
        self.edges = None
        self.deviations = {}

    def lasting(self) -> dict[str, Any]:
        """What :meth:`go_on` takes when the same values are there again."""
        return {name: getattr(self, name) for name in _LASTING}

    def go_on(self, lasting: Mapping[str, Any], exact_tokens: int, depth: int) -> None:
        """The request's own values are in its row again, behind a prefix that was found anew.

        Args:
            exact_tokens: of that prefix; a branch may follow.
            depth: of the prefix.
        """
        for name, value in lasting.items():
            setattr(self, name, value)
        if self.exact_until is not None:
            # What others have computed exactly since then is exact; what comes behind is not.
            self.exact_until = max(self.exact_until, exact_tokens)
            self.depth = max(self.depth, depth)

    def end(self) -> None:
        """The request gave its KV back."""
        self.begin_prefill(0, 0, 0, self.generation)

    def note_placed(self, part: Placement) -> None:
        """``part`` of the placement is in the request's own slots now and was not recomputed."""
        if self.pending is not None:
            self.recomputed_tokens += part.recomputed_tokens
        if not part.reused_tokens:
            return
        self.placed.append(part.positions)
        self.depth = max(self.depth, self.planned_depth)
        if self.exact_until is None:
            self.exact_until = part.exact_until


def attach(req: Any, state: RequestState) -> None:
    setattr(req, _ATTRIBUTE, state)


def state_of(req: Any) -> RequestState | None:
    """``None`` for requests that did not come through the scheduler's ordinary entrance."""
    return getattr(req, _ATTRIBUTE, None)
