"""A plan for every request that the scheduler admits.

Seams: ``Scheduler.get_prefill_adder_class`` (an intended override point), ``PrefillAdder``.
The plan is made after SGLang has decided to admit, so that KVShare never admits less than stock;
nothing can leave the tree in between, since both happen in one pass of the scheduler thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sglang_kvshare.engine.branches import depth_of, exact_ancestor
from sglang_kvshare.engine.eligibility import refusal, scored_tokens
from sglang_kvshare.engine.metrics import Metrics
from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.engine.tree_cache import KVShareRadixCache
from sglang_kvshare.plan import Placement, ReusePlan, place
from sglang_kvshare.recompute.selectors import SelectionSettings, select
from sglang_kvshare.request import ReuseReport

logger = logging.getLogger(__name__)


def adder_class(original: Any, self: Any) -> type:
    """Hook of ``Scheduler.get_prefill_adder_class``."""
    return _planning(original(self))


@lru_cache(maxsize=4)
def _planning(stock: Any) -> type:
    class PlanningPrefillAdder(stock):  # type: ignore[misc]
        """Stock admission, followed by a plan for the admitted request."""

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().add_one_req(req, *args, **kwargs)
            admitted = bool(self.can_run_list) and self.can_run_list[-1] is req
            if admitted and isinstance(self.tree_cache, KVShareRadixCache):
                branch_tokens = plan_admitted(self.tree_cache, req)
                if not req.retracted_stain:
                    # SGLang's own counters say "cached" for what is exact.
                    self.log_device_hit_tokens -= branch_tokens
                    req.already_computed = branch_tokens
            return result

    return PlanningPrefillAdder


def plan_admitted(cache: KVShareRadixCache, req: Any) -> int:
    """Match, select and hold the donors of one admitted request; a fault is a miss.

    Returns:
        the part of the request's prefix that came from an approximate branch, in tokens.
    """
    state = state_of(req)
    if state is None:
        return 0
    cache.release(state)
    _, branch_tokens = exact_ancestor(req.last_node)
    state.begin_prefill(
        int(req.prefix_len) - branch_tokens,
        branch_tokens,
        depth_of(req.last_node),
        cache.generation,
    )
    begin = time.perf_counter()
    try:
        outcome = _plan(cache, req, state)
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


def _plan(cache: KVShareRadixCache, req: Any, state: RequestState) -> _Outcome:
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
    gate = cache.gate if options.recompute_ratio < 1 else None
    if gate is not None and not gate.worth_a_look(rows, tokens):
        return _Outcome("gate_closed")
    with step("match"):
        begin = time.perf_counter()
        plan = cache.plan(req)
        if gate is not None:
            gate.observe_match(rows, (time.perf_counter() - begin) * 1e3)
    if not plan.spans:
        return _Outcome("no_match")
    with step("select"):
        placement = _select(cache, state, plan)
    # With ratio 1 nothing is to be spared; that is no reason to call the plan too small.
    if options.recompute_ratio < 1 and placement.reused_tokens < config.min_saved_tokens:
        return _Outcome("below_minimum")
    if gate is not None and not gate.pays(rows, placement.reused_tokens, tokens):
        return _Outcome("gate_closed")
    with step("lock"):
        donors = cache.hold(state, placement)
    state.planned_depth = max(state.depth, plan.depth + 1)
    return _Outcome("ok", placement, donors, plan.matched_tokens)


def _select(cache: KVShareRadixCache, state: RequestState, plan: ReusePlan) -> Placement:
    options, config = state.options, cache.config
    settings = SelectionSettings(options.recompute_ratio, config.seam_tokens, config.tail_tokens)
    return place(plan, select(options.selector, plan, settings))


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
    reused = state.branch_tokens + state.placed_tokens
    lost = state.report.reused_tokens - reused
    if lost > 0:
        state.report = replace(
            state.report,
            reused_tokens=reused,
            new_tokens=state.report.new_tokens + lost,
            decision="reuse" if reused else "none",
            reason=state.lost_because,
        )
    metrics.prefill(state.report, state.branch_tokens)
