"""A plan for every request that the scheduler admits.

Seams: ``Scheduler.get_prefill_adder_class`` (an intended override point), ``PrefillAdder``.
The plan is made after SGLang has decided to admit, so that KVShare never admits less than stock;
nothing can leave the tree in between, since both happen in one pass of the scheduler thread.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sglang.srt.environ import envs

from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.engine.tree_cache import KVShareRadixCache
from sglang_kvshare.plan import place
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
                plan_admitted(self.tree_cache, req)
            return result

    return PlanningPrefillAdder


def plan_admitted(cache: KVShareRadixCache, req: Any) -> None:
    """Match, select and hold the donors of one admitted request; a fault is a miss."""
    state = state_of(req)
    if state is None:
        return
    cache.release(state)
    state.placed_tokens, state.exact_until = 0, None
    try:
        report = _plan(cache, req, state)
    except Exception:
        logger.exception("KVShare could not plan request %s; it is served without reuse", req.rid)
        cache.release(state)
        report = _none(req, "planning_failed")
    if not state.reported:
        state.report = report


def _plan(cache: KVShareRadixCache, req: Any, state: RequestState) -> ReuseReport:
    options = state.options
    if options.reuse != "approximate":
        return _none(req, options.reuse)
    if reason := _refusal(req):
        return _none(req, reason)
    config = cache.config
    left_tokens = len(req.full_untruncated_fill_ids) - 1 - int(req.prefix_len)
    if left_tokens < config.min_run_tokens:
        return _none(req, "prefix_covers_prompt")
    if cache.index_failed:
        return _none(req, "index_failed")
    plan = cache.plan(req)
    if not plan.spans:
        return _none(req, "no_match")
    settings = SelectionSettings(options.recompute_ratio, config.seam_tokens, config.tail_tokens)
    placement = place(plan, select(options.selector, plan, settings))
    # With ratio 1 nothing is to be spared; that is no reason to call the plan too small.
    if options.recompute_ratio < 1 and placement.reused_tokens < config.min_saved_tokens:
        return _none(req, "below_minimum")
    donors = cache.hold(state, placement)
    return ReuseReport(
        prefix_tokens=plan.prefix_tokens,
        reused_tokens=placement.reused_tokens,
        recomputed_tokens=placement.recomputed_tokens,
        new_tokens=plan.new_tokens,
        donors=donors,
        decision="reuse",
        reason="ok",
    )


def _refusal(req: Any) -> str | None:
    """Why this request must be computed in full, if it must."""
    if envs.SGLANG_RADIX_FORCE_MISS.get():
        return "force_miss"
    length = len(req.full_untruncated_fill_ids)
    if req.return_logprob and 0 <= req.logprob_start_len < length - 1:
        return "prompt_logprobs"
    special = (
        req.input_embeds,
        req.positional_embed_overrides,
        req.multimodal_inputs,
        req.session,
        req.beam_group,
        req.multi_item_delimiter_indices,
        req.token_indices_to_pool,
    )
    if req.return_hidden_states or any(value is not None for value in special):
        return "unsupported_request"
    return None


def _none(req: Any, reason: str) -> ReuseReport:
    length, prefix = len(req.full_untruncated_fill_ids), int(req.prefix_len)
    return ReuseReport(prefix_tokens=prefix, new_tokens=length - prefix, reason=reason)


def settle(state: RequestState, *, lost_because: str) -> None:
    """Make the report true to what was placed, when the last chunk of the prefill runs."""
    if state.reported:
        return
    state.reported = True
    lost = state.report.reused_tokens - state.placed_tokens
    if lost > 0:
        state.report = replace(
            state.report,
            reused_tokens=state.placed_tokens,
            new_tokens=state.report.new_tokens + lost,
            decision="reuse" if state.placed_tokens else "none",
            reason=lost_because,
        )
