"""A plan for every request that the scheduler admits.

Seams: ``Scheduler.get_prefill_adder_class`` (an intended override point), ``PrefillAdder`` and its
``_select_prefill_admission``, which decides where a prompt is cut.
The plan is made after SGLang has decided to admit, so that KVShare never admits less than stock;
nothing can leave the tree in between, since both happen in one pass of the scheduler thread.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

from sglang_kvshare.config import layer_numbers
from sglang_kvshare.engine.branches import depth_of, exact_ancestor
from sglang_kvshare.engine.eligibility import refusal, scored_tokens
from sglang_kvshare.engine.metrics import Metrics
from sglang_kvshare.engine.schedule import job_of, schedule_of
from sglang_kvshare.engine.state import Pending, RequestState, state_of
from sglang_kvshare.engine.tree_cache import KVShareRadixCache
from sglang_kvshare.plan import Placement, ReusePlan, everything, place
from sglang_kvshare.recompute.choice import Choice, fitted, probe_layers
from sglang_kvshare.recompute.selectors import (
    SelectionSettings,
    Signals,
    choose,
    forced_tokens,
    selector_named,
)
from sglang_kvshare.request import ASSUMED_RATIO, RequestOptions, ReuseReport

logger = logging.getLogger(__name__)

#: A prompt of more than so many chunks is cut all the same: some layers run for all its rows.
MOST_CHUNKS = 8


def adder_class(original: Any, self: Any) -> type:
    """Hook of ``Scheduler.get_prefill_adder_class``."""
    return _planning(original(self))


@lru_cache(maxsize=4)
def _planning(stock: Any) -> type:
    class PlanningPrefillAdder(stock):  # type: ignore[misc]
        """Stock admission, followed by a plan for the admitted request."""

        #: Of the request that is being added, if admitting it took a plan.
        _plan_ahead: ReusePlan | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._rows, self._most_rows = 0, MOST_CHUNKS * (self.rem_chunk_tokens or 0)
            limit_prefill(self)

        def _get_running_request_total_token_offset(self, req: Any) -> Any:
            # The ledger knows of those that it was told of.
            if reservation(self.tree_cache, req) is not None:
                return 0
            return super()._get_running_request_total_token_offset(req)

        def _select_prefill_admission(self, req: Any, *, total_tokens: int, **kwargs: Any) -> Any:
            reserving = reservation(self.tree_cache, req)
            if reserving is None:
                admission = super()._select_prefill_admission(
                    req, total_tokens=total_tokens, **kwargs
                )
            else:
                now = total_tokens - most_new_tokens(req)
                if not has_room(reserving, self, req, now):
                    return AddReqResult.NO_TOKEN
                admission = super()._select_prefill_admission(req, total_tokens=now, **kwargs)
                if not isinstance(admission, AddReqResult):
                    admission = replace(admission, max_new_tokens=0)
            return self._in_one(
                req, admission, kwargs.get("host_hit_length", 0), reserving is not None
            )

        def add_chunked_req(self, req: Any) -> Any:
            limit_prefill(self, int(req.prefix_len))
            left = super().add_chunked_req(req)
            added = bool(self.can_run_list) and self.can_run_list[-1] is req
            if left is None and added and reservation(self.tree_cache, req) is not None:
                # SGLang has reserved its answer, which the ledger does.
                most = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
                self.memory_budget.total_offset -= most
            return left

        def _in_one(self, req: Any, admission: Any, host_hit_tokens: int, reserved: bool) -> Any:
            """A prompt that was to be cut, whole where the rows that run fit."""
            # What is copied back from host memory leaves no more than a page.
            cut = getattr(admission, "is_chunked", False) and not host_hit_tokens
            if cut and isinstance(self.tree_cache, KVShareRadixCache):
                room = self.rem_chunk_tokens
                self._plan_ahead = plan_of_whole(self.tree_cache, req, admission.prefix_len, room)
                if self._plan_ahead is not None:
                    whole = len(req.full_untruncated_fill_ids) - admission.prefix_len
                    most = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
                    new = 0 if reserved else most
                    return replace(
                        admission, extend_len=whole, max_new_tokens=new, is_chunked=False
                    )
            return admission

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            job = job_of(req)
            if job is not None and job.held:
                # Those behind it are held as well.
                return AddReqResult.OTHER
            ours = isinstance(self.tree_cache, KVShareRadixCache)
            if ours and not self.tree_cache.swapping.ready(req):
                # Its turn comes; those behind it need not wait.
                return AddReqResult.CONTINUE
            self._plan_ahead = None
            result = super().add_one_req(req, *args, **kwargs)
            admitted = bool(self.can_run_list) and self.can_run_list[-1] is req
            if not admitted or not ours:
                return result
            branch_tokens = plan_admitted(self.tree_cache, req, self._plan_ahead)
            if not req.retracted_stain:
                # SGLang's own counters say "cached" for what is exact.
                self.log_device_hit_tokens -= branch_tokens
                req.already_computed = branch_tokens
            if job is not None:
                job.owner.admitted(req)
            if not self._give_back(spared_rows(self.tree_cache, req)):
                return result
            # What reuse has spared is there for the next request.
            return self.budget_state()

        def _give_back(self, rows: int) -> bool:
            """Budgets count the rows that run; whether there are any to give back.

            Some layers run for all rows, and all of them should reuse fail, so that a batch is not
            without bound.
            """
            self._rows += self.can_run_list[-1].extend_len
            if rows <= 0 or (self._most_rows and self._rows > self._most_rows):
                return False
            if self.new_chunked_req is not None:
                # SGLang keeps track of one prompt that is cut.
                return False
            self.rem_input_tokens += rows
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens += rows
            return True

    return PlanningPrefillAdder


def reservation(cache: Any, req: Any) -> Any:
    """What reserves KV for the answer of ``req``; ``None`` where SGLang does."""
    job = job_of(req)
    if job is None or not isinstance(cache, KVShareRadixCache) or req.beam_group is not None:
        return None
    return job.owner.reserving


def has_room(reserving: Any, adder: Any, req: Any, extend_tokens: int) -> bool:
    """Whether the ledger has room; SGLang's own budget decides where it cannot say."""
    try:
        return bool(reserving.fits(adder, req, extend_tokens))
    except Exception:
        job_of(req).owner.fault("what fits")  # type: ignore[union-attr]
        return True


def most_new_tokens(req: Any) -> int:
    """What ``PrefillAdder.add_one_req`` reserves for an answer."""
    left = req.sampling_params.max_new_tokens - len(req.output_ids)
    return int(min(max(left, 0), CLIP_MAX_NEW_TOKENS))


def limit_prefill(adder: Any, context_tokens: int = 0) -> None:
    """Cut the chunk, behind ``context_tokens``, so that the tightest TBT SLO of those that decode
    holds."""
    running, room = adder.running_batch, adder.rem_chunk_tokens
    if room is None or room <= 0 or running is None or not running.reqs:
        return
    schedule = schedule_of(adder.tree_cache)
    if schedule is None:
        return
    try:
        limit = schedule.prefill_limit(running.reqs, room, context_tokens)
        adder.rem_chunk_tokens = min(room, max(limit, adder.page_size))
    except Exception:
        schedule.fault("how much prefill goes beside decoding")


def spared_rows(cache: KVShareRadixCache, req: Any) -> int:
    """Rows that are not expected to run, of those that this pass was charged for."""
    state = state_of(req)
    if state is None or state.placement is None:
        return 0
    if state.pending is None:
        begin, end = int(req.prefix_len), int(req.extend_end)
        return int(state.placement.within(begin, end).reused_tokens)
    if req.extend_end < len(req.full_untruncated_fill_ids):
        return 0
    pending = state.pending
    return expected_savings(cache, pending.choice, pending.plan).rows


def plan_of_whole(
    cache: KVShareRadixCache, req: Any, prefix_tokens: int, room: int
) -> ReusePlan | None:
    """The plan with which a prompt that SGLang would cut into chunks runs in one, if it may.

    A selector that looks with the prompt's last rows must not be cut away from them. What a chunk
    is bounded for is the rows that run, and these fit into ``room`` tokens.
    """
    state = state_of(req)
    try:
        if state is None or refusal(req, state.options) or cache.index_failed:
            return None
        choice = choice_of(cache, state.options)
        rows = len(req.full_untruncated_fill_ids) - prefix_tokens
        if state.options.reuse != "approximate" or not choice.waits or rows > MOST_CHUNKS * room:
            return None
        plan = cache.plan(req)
        fits = bool(plan.spans) and rows - expected_savings(cache, choice, plan).tokens <= room
        return plan if fits else None
    except Exception:
        logger.exception("KVShare could not plan ahead for request %s; it is cut", req.rid)
        cache.fault("match")
        return None


def plan_admitted(cache: KVShareRadixCache, req: Any, ahead: ReusePlan | None = None) -> int:
    """Match, select and hold the donors of one admitted request; a fault is a miss.

    Args:
        ahead: the plan, where admitting the request took one.

    Returns:
        the part of the request's prefix that came from an approximate branch, in tokens.
    """
    state = state_of(req)
    if state is None:
        return 0
    cache.release(state)
    _, branch_tokens = exact_ancestor(req.last_node)
    if cache.swapping.resume(req, state):
        cache.retention.begins(state)
        return branch_tokens
    state.begin_prefill(
        int(req.prefix_len) - branch_tokens,
        branch_tokens,
        depth_of(req.last_node),
        cache.generation,
    )
    cache.retention.begins(state)
    begin = time.perf_counter()
    try:
        outcome = _plan(cache, req, state, ahead)
    except Exception as error:
        step = getattr(error, "kvshare_step", "match")
        logger.exception(
            "KVShare could not plan request %s (%s); it is served without", req.rid, step
        )
        cache.fault(step)
        cache.release(state)
        outcome = _Outcome("planning_failed")
    cache.metrics.planned((time.perf_counter() - begin) * 1e3)
    if not state.reported:
        state.report = _report(req, state, outcome)
    return branch_tokens


@dataclass(frozen=True)
class _Outcome:
    """What planning came to; ``placement`` is ``None`` when nothing is placed."""

    reason: str
    placement: Placement | None = None
    donors: int = 0
    matched_tokens: int = 0
    selector: str = ""


def _plan(
    cache: KVShareRadixCache, req: Any, state: RequestState, ahead: ReusePlan | None
) -> _Outcome:
    options = state.options
    if options.reuse != "approximate":
        return _Outcome(options.reuse)
    if reason := refusal(req, options):
        return _Outcome(reason)
    config = cache.config
    tokens = len(req.full_untruncated_fill_ids)
    rows = tokens - int(req.prefix_len)
    scored = scored_tokens(req)
    if rows - scored < config.min_run_tokens:
        return _Outcome("prefix_covers_prompt" if scored == 1 else "prompt_logprobs")
    if cache.index_failed:
        return _Outcome("index_failed")
    gate = cache.gate_of([req]) if options.spares else None
    if gate is not None and not gate.worth_a_look(rows, tokens):
        return _Outcome("gate_closed")
    with step("match"):
        begin = time.perf_counter()
        if ahead is not None and ahead.prefix_tokens != int(req.prefix_len):
            # Admission took another prefix than the one that was planned behind.
            ahead = None
        plan = cache.plan(req) if ahead is None else ahead
        if gate is not None and ahead is None:
            gate.observe_match(rows, (time.perf_counter() - begin) * 1e3)
    if not plan.spans:
        return _Outcome("no_match")
    with step("select"):
        choice = choice_of(cache, options)
        placement, spared = _select(cache, state, choice, plan)
    # With ratio 1 nothing is to be spared; that is no reason to call the plan too small.
    if options.spares and spared.tokens < config.min_saved_tokens:
        return _Outcome("below_minimum")
    if gate is not None and not gate.pays(rows, spared.rows, tokens):
        return _Outcome("gate_closed")
    with step("lock"):
        donors = cache.hold(state, placement)
    cache.carried_out(req, state, plan)
    state.planned_depth = max(state.depth, plan.depth + 1)
    return _Outcome("ok", placement, donors, plan.matched_tokens, choice.selector.name)


@dataclass(frozen=True)
class _Spared:
    """``tokens`` that are reused as they are; ``rows`` that the forward is shorter by, as a mean
    over layers and with the probe pass subtracted."""

    tokens: int
    rows: int


def _select(
    cache: KVShareRadixCache, state: RequestState, choice: Choice, plan: ReusePlan
) -> tuple[Placement, _Spared]:
    """Choose the tokens that are recomputed, or leave that to the forward (``state.pending``)."""
    settings = choice.settings
    if not choice.waits:
        # A selector that measures does not wait at the ends of the ratio, where no score counts.
        measures = choice.selector.measures
        scores = (
            np.zeros(plan.matched_tokens) if measures else choice.selector.score(plan, Signals())
        )
        placement = place(plan, choose(choice.selector, plan, scores, settings))
        return placement, _Spared(placement.reused_tokens, placement.reused_tokens)
    seams = selector_named("seams")
    marks = choose(seams, plan, seams.score(plan, Signals()), settings)
    state.pending = Pending(choice, plan, marks)
    return everything(plan), expected_savings(cache, choice, plan)


def choice_of(cache: KVShareRadixCache, options: RequestOptions) -> Choice:
    config = cache.config
    return fitted(
        options.selector,
        SelectionSettings(
            options.recompute_ratio,
            config.seam_tokens,
            config.tail_tokens,
            options.recompute_error,
        ),
        attention=options.attention,
        check_layers=layer_numbers(options.check_layers),
        max_deviation=options.max_deviation,
        probe_tokens=options.probe_tokens,
        layers=cache.layers,
    )


def expected_savings(cache: KVShareRadixCache, choice: Choice, plan: ReusePlan) -> _Spared:
    """Of a choice that is still to be made."""
    settings = choice.settings
    # What an error target comes to is not known; most prompts reach theirs with less than this.
    ratio = settings.recompute_ratio if settings.recompute_error >= 1 else ASSUMED_RATIO
    forced = int(forced_tokens(plan, settings).sum())
    spared = plan.matched_tokens - max(forced, math.ceil(ratio * plan.matched_tokens))
    rows = spared * (1 - choice.dense_layers / cache.layers)
    if choice.probes:
        probes = min(choice.probe_tokens, plan.scored_from + 1 - plan.spans[-1].end)
        rows -= probes * probe_layers(cache.layers).stop / cache.layers
    return _Spared(spared, max(0, int(rows)))


def _report(req: Any, state: RequestState, outcome: _Outcome) -> ReuseReport:
    length, prefix = len(req.full_untruncated_fill_ids), int(req.prefix_len)
    placement, branch = outcome.placement, state.branch_tokens
    reuses = placement is not None or branch > 0
    return ReuseReport(
        prefix_tokens=prefix - branch,
        reused_tokens=branch + (0 if placement is None else placement.reused_tokens),
        recomputed_tokens=0 if placement is None else placement.recomputed_tokens,
        new_tokens=length - prefix - outcome.matched_tokens,
        donors=outcome.donors + (branch > 0),
        decision="reuse" if reuses else "none",
        # With a branch the request did reuse, whatever became of the rest of its prompt.
        reason="ok" if reuses else outcome.reason,
        selector="" if placement is None else outcome.selector,
    )


class step:
    """Names the step in which an exception arose, for the one who counts it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not hasattr(error, "kvshare_step"):
            error.kvshare_step = self._name  # type: ignore[attr-defined]


def settle(state: RequestState, metrics: Metrics) -> None:
    """Make the report true to what was placed, when the last chunk of the prefill runs."""
    if state.reported:
        return
    state.reported = True
    report, placed = state.report, state.placed_tokens
    matched = report.reused_tokens + report.recomputed_tokens - state.branch_tokens
    pending = state.pending is not None
    recomputed = state.recomputed_tokens if pending else report.recomputed_tokens
    reused, lost = state.branch_tokens + placed, matched - recomputed - placed
    state.report = replace(
        report,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        new_tokens=report.new_tokens + lost,
        computed_rows=round(state.computed_rows, 1),
    )
    if pending and state.fell_back:
        state.report = replace(state.report, selector=f"{report.selector}+seams")
    if lost > 0 or (pending and not reused):
        # What was neither lost nor left as it was is computed because its donor was too far off.
        reason = state.lost_because if lost > 0 else "deviation"
        decision = "reuse" if reused else "none"
        state.report = replace(state.report, decision=decision, reason=reason)
    metrics.prefill(state.report, state.branch_tokens)
