"""What the scheduler process knows beyond SGLang's own queue, and its owner.

    a request comes ----------> Job, on its state                        requests.py
    calc_priority ------------> order of the waiting, who is held back   ordering.py
    PrefillAdder -------------> what KV is promised, what fits           reserving.py
    update_running_batch -----> who gives way before KV runs short       preempting.py
    a request gives KV back --> lengths and SLOs are learnt from it      here

The decisions are those of ``sglang_kvshare.scheduling``, which the simulator runs as well. A fault
in any of them leaves SGLang's own behaviour.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.eligibility import accepts_approximation
from sglang_kvshare.engine.index_mirror import int64
from sglang_kvshare.engine.lengths import Lengths
from sglang_kvshare.engine.metrics import HOSTED_TOKENS, RESERVED_TOKENS, Series
from sglang_kvshare.engine.reserving import Reserving
from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.matching.glance import Glance, cached_of, glance
from sglang_kvshare.scheduling.forward_cost import Load, Recent
from sglang_kvshare.scheduling.jobs import Waiting
from sglang_kvshare.scheduling.length_estimate import Asked, LengthEstimate
from sglang_kvshare.scheduling.parts import SchedulingParts
from sglang_kvshare.scheduling.prefill_budget import prefill_tokens
from sglang_kvshare.scheduling.slo import Slo

logger = logging.getLogger(__name__)

#: Share of the old arrival rate that is left after a second.
_RATE_FORGETTING_PER_S = 0.95
#: Requests remembered as waiting; SGLang bounds its queue only where it is asked to.
_MOST_WAITING = 100_000


@dataclass(eq=False)
class Job:
    """What scheduling knows of one request; compared by identity.

    Attributes:
        owner: the schedule.
        waiting: as an order sees it, kept up to date as far as anybody asked.
        seen: a glance at its prompt; ``None`` until somebody asks.
        new_keys: of what it is going to compute, as far as is known.
        looked: pass in which ``waiting`` was last brought up to date.
        held: it waits in this pass for a passage that another one computes.
        was_held: in the pass before it did as well.
        asked, estimate: what is expected of its answer; ``None`` until it is first considered for
            admission.
        slo: what it is to meet.
    """

    owner: Schedule
    waiting: Waiting
    seen: Glance | None = None
    new_keys: tuple[int, ...] = ()
    looked: int = -1
    held: bool = False
    was_held: bool = False
    asked: Asked | None = None
    estimate: LengthEstimate | None = None
    slo: Slo = field(default_factory=Slo)


class Clock:
    """Milliseconds for scheduling.

    Tensor-parallel ranks must come to the same decisions and no two read the same time, so that
    with more than one time is counted in scheduling passes.
    """

    def __init__(self, ranks: int) -> None:
        self.is_time = ranks == 1
        self._passes = 0

    def passed(self) -> None:
        """A scheduling pass begins."""
        self._passes += 1

    @property
    def passes(self) -> int:
        return self._passes

    def now_ms(self) -> float:
        return time.perf_counter() * 1e3 if self.is_time else float(self._passes)


class Schedule:
    """Owner of the policies' state in one scheduler process.

    Args:
        cache: the tree cache, which this belongs to.
        parts: the policies.
        lengths: what answers' lengths are told by.
        ranks: of tensor parallelism.
        priority_sign: 1 where larger priorities go first, -1 where smaller do, 0 where none count.
    """

    def __init__(
        self,
        cache: Any,
        config: KVShareConfig,
        parts: SchedulingParts,
        lengths: Lengths,
        ranks: int = 1,
        priority_sign: int = 0,
    ) -> None:
        self.cache = cache
        self.config = config
        self.parts = parts
        self.lengths = lengths
        self.priority_sign = priority_sign
        self.clock = Clock(ranks)
        self.reserving: Reserving | None = None
        if parts.ledger is not None and parts.reserve is not None:
            self.reserving = Reserving(self, parts.ledger, parts.reserve)
        self._decode_ms: defaultdict[int, Recent] = defaultdict(Recent)
        #: Requests that came, with their tenants, until they are first admitted.
        self._waiting: dict[str, tuple[Job, str | None]] = {}
        self._number = 0
        self._rate_per_s = 0.0
        self._rate_at_ms = self.clock.now_ms()

    def arrived(self, req: Any, state: RequestState, namespace: bytes) -> None:
        """A request enters the scheduler."""
        now_ms = self.clock.now_ms()
        self._number += 1
        options = state.options
        slo = self.parts.slos.of(state.tenant or "", Slo(options.ttft_slo_ms, options.tbt_slo_ms))
        state.job = Job(
            owner=self,
            waiting=Waiting(
                rid=req.rid,
                number=self._number,
                arrived_ms=now_ms,
                prompt_tokens=len(req.origin_input_ids),
                ttft_slo_ms=slo.ttft_ms,
                namespace=namespace,
            ),
            slo=slo,
        )
        self._waiting[req.rid] = state.job, state.tenant
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.pop(next(iter(self._waiting)))
        self._count_arrival(now_ms)

    @property
    def arrivals_per_s(self) -> float:
        """Of late; 0 where time is not told."""
        return self._rate_per_s

    def _count_arrival(self, now_ms: float) -> None:
        if not self.clock.is_time:
            return
        passed_s = max(0.0, now_ms - self._rate_at_ms) / 1e3
        self._rate_at_ms = now_ms
        # An exponential window: each arrival counts for ever less, all weights sum to one second.
        self._rate_per_s *= _RATE_FORGETTING_PER_S**passed_s
        self._rate_per_s += -math.log(_RATE_FORGETTING_PER_S)

    def gauges(self) -> dict[Series, float]:
        """For the metrics."""
        ledger = self.parts.ledger
        if ledger is None:
            return {}
        return {
            RESERVED_TOKENS: ledger.reserved_tokens,
            HOSTED_TOKENS: max(0, ledger.hosted_tokens),
        }

    def fault(self, where: str) -> None:
        """A decision could not be made; SGLang's own stands. Call it while handling the error."""
        logger.exception("KVShare could not decide on %s; SGLang does", where)
        self.cache.fault("schedule")

    def survey(self, req: Any, job: Job, prefix_tokens: int) -> int:
        """Have a glance at the prompt: about how many tokens beyond the prefix can be reused.

        What cannot is new (``job.new_keys``): what the request is going to compute.
        """
        cache, state = self.cache, state_of(req)
        if job.seen is None:
            prompt = int64(req.origin_input_ids)
            job.seen = glance(prompt, cache.index.window, job.waiting.namespace)
        namespaces: tuple[bytes, ...] = ()
        if state is not None and not cache.index_failed and accepts_approximation(req, state):
            namespaces = (job.waiting.namespace, *state.shared_namespaces)
        found = cached_of(cache.index, job.seen, namespaces, prefix_tokens, cache.config.max_depth)
        job.new_keys = found.new_keys
        return found.tokens

    def publishes(self, req: Any) -> bool:
        """Whether others may take what ``req`` computes."""
        state = state_of(req)
        return (
            state is not None and state.options.reuse != "off" and not req.skip_radix_cache_insert
        )

    def costs_known(self, req: Any) -> bool:
        """Whether :meth:`cost_ms` tells milliseconds."""
        gate = self.cache.gate_of([req])
        return gate is not None and gate.cost.known

    def cost_ms(self, req: Any, rows: int, context_tokens: int, *, narrowed: bool) -> float:
        """Predicted time of a prefill; its rows where no times are known."""
        gate = self.cache.gate_of([req])
        rows = max(rows, 1)
        if gate is None or not gate.cost.known:
            return float(rows)
        return float(gate.cost.ms(Load.of(rows, max(context_tokens, rows)), narrowed=narrowed))

    def decoded(self, requests: int, ms: float) -> None:
        """A decode step of so many requests was measured."""
        if requests > 0 and ms > 0:
            self._decode_ms[requests.bit_length()].add(ms)

    def prefill_limit(self, running: list[Any], limit_tokens: int, context_tokens: int = 0) -> int:
        """Tokens of prefill that may go before the next decode step of ``running``, behind
        ``context_tokens``."""
        jobs = [job for job in map(job_of, running) if job is not None]
        slos = [job.slo.tbt_ms for job in jobs if job.slo.tbt_ms is not None]
        step = self._decode_ms[len(running).bit_length()]
        gate = self.cache.gate_of(running[:1])
        if not slos or gate is None or not len(step):
            return limit_tokens
        return prefill_tokens(gate.cost, step.median, min(slos), limit_tokens, context_tokens)

    def admitted(self, req: Any) -> None:
        """``req`` is in the batch that is being built."""
        job = job_of(req)
        self._waiting.pop(req.rid, None)
        if job is None or req.beam_group is not None:
            return
        try:
            if self.reserving is not None:
                self.reserving.admitted(req, job)
            self._begins(req, job)
        except Exception:
            self.fault("what an admitted request is promised")

    def _begins(self, req: Any, job: Job) -> None:
        holder = self.parts.holder
        if holder is None or not self.publishes(req):
            return
        if job.looked < 0:
            self.survey(req, job, int(req.prefix_len))
        # Those of one batch are done together; only further chunks are waited for.
        tokens = len(req.full_untruncated_fill_ids)
        left, takes_ms = tokens - int(req.extend_end), 0.0
        if left and self.clock.is_time:
            takes_ms = self.cost_ms(req, left, tokens, narrowed=False)
        holder.begins(req.rid, job.new_keys, self.clock.now_ms() + takes_ms)

    def computed(self, req: Any) -> None:
        """What the prefill of ``req`` computed can be found from now on, of the last chunk too."""
        whole = req.extend_end is None or req.extend_end >= len(req.full_untruncated_fill_ids)
        if self.parts.holder is not None and whole:
            self.parts.holder.ended(req.rid)

    def ended(self, req: Any, state: RequestState) -> None:
        """``req`` gives its KV back: finished, aborted or preempted."""
        job = state.job
        if job is None:
            return
        complete = req.finished() and not _was_aborted(req)
        if self.parts.holder is not None:
            self.parts.holder.ended(req.rid)
        try:
            if self.reserving is not None:
                self.reserving.ended(req, job, complete=complete)
            if complete:
                self._learn(req, state, job)
            elif req.finished():
                self.lost(job, state.tenant, began=bool(req.time_stats.prefill_finished_time))
        except Exception:
            self.fault("what an answer teaches")

    def _learn(self, req: Any, state: RequestState, job: Job) -> None:
        if job.estimate is not None:
            self.cache.metrics.answered(len(req.output_ids), job.estimate.upper_tokens)
        self.lengths.answered(req, job, state.tenant)
        self.lengths.save_when_due(self.clock.now_ms())
        self._attained(req, state, job)

    def lost(self, job: Job, tenant: str | None, *, began: bool) -> None:
        """A request was aborted; without a first token it has missed what it was to meet."""
        if job.slo.ttft_ms is not None and not began:
            self.cache.metrics.attained("ttft", tenant or "", math.inf, job.slo.ttft_ms)

    def aborted_waiting(self, rid: str) -> None:
        """A request was aborted in the queue."""
        found = self._waiting.pop(rid, None)
        if found is not None:
            self.lost(*found, began=False)

    def _attained(self, req: Any, state: RequestState, job: Job) -> None:
        times, tokens, tenant = req.time_stats, len(req.output_ids), state.tenant or ""
        first_s = times.prefill_finished_time
        if not first_s:
            return
        metrics = self.cache.metrics
        ttft_ms = (first_s - times.scheduler_recv_time) * 1e3
        metrics.attained("ttft", tenant, ttft_ms, job.slo.ttft_ms)
        if tokens > 1:
            gap_ms = ((times.completion_time or time.perf_counter()) - first_s) * 1e3 / (tokens - 1)
            metrics.attained("tbt", tenant, gap_ms, job.slo.tbt_ms)


def _was_aborted(req: Any) -> bool:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(req.finished_reason, FINISH_ABORT)


def job_of(req: Any) -> Job | None:
    """``None`` for requests that did not come through the scheduler's ordinary entrance."""
    state = state_of(req)
    return None if state is None else state.job


def schedule_of(cache: Any) -> Schedule | None:
    """The schedule of a tree cache; ``None`` where stock SGLang's serves."""
    return getattr(cache, "schedule", None)
