"""The order of SGLang's waiting queue, and who is held back for a pass.

Seam: ``SchedulePolicy.calc_priority``, called before every admission. It sorts the queue in place;
SGLang then admits from the front until one does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

from sglang_kvshare.engine.eligibility import accepts_approximation
from sglang_kvshare.engine.schedule import Job, Schedule, schedule_of
from sglang_kvshare.engine.state import state_of
from sglang_kvshare.matching.glance import KEYS_APART
from sglang_kvshare.scheduling.order import in_window

#: Prompt tokens that one pass looks at anew, about a millisecond's worth, and requests at least:
#: the new ones, then those whose last look is the oldest.
_LOOK_TOKENS, _LEAST_LOOKS = 12_000, 2
#: Passes after which a look is repeated.
_STALE_PASSES = 16


def calc_priority(
    original: Any,
    self: Any,
    waiting_queue: list[Any],
    running_batch: Any = None,
    processed_tokens: int = 0,
) -> None:
    """Hook of ``SchedulePolicy.calc_priority``."""
    sign = -self.priority_sign if self.enable_priority_scheduling else 0
    # Another --schedule-policy than SGLang's default stands.
    ours = self.policy.value == "fcfs" and arranged(self.tree_cache, waiting_queue, sign)
    if not ours:
        original(self, waiting_queue, running_batch, processed_tokens)


def arranged(tree_cache: Any, queue: list[Any], priority_sign: int) -> bool:
    """Sort ``queue`` in place; see :func:`arrange`.

    Returns:
        ``False`` where the order is not ours, or a fault kept it from being so.
    """
    schedule = schedule_of(tree_cache)
    if schedule is None or schedule.parts.order is None:
        return False
    try:
        arrange(schedule, queue, priority_sign)
    except Exception:
        schedule.fault("the order of the queue")
        for job in _jobs(queue):
            job.held = False
        return False
    return True


def arrange(schedule: Schedule, queue: list[Any], priority_sign: int) -> None:
    """Sort ``queue`` in place.

    Args:
        priority_sign: 1 where larger priorities go first, -1 where smaller do, 0 where none count.
    """
    clock, parts = schedule.clock, schedule.parts
    clock.passed()
    jobs = _jobs(queue)
    for job in jobs:
        job.held = False
    if len(jobs) < len(queue):
        # One that came another way has no number to be ordered by. Nobody is held before it.
        return
    for job, req in zip(jobs, queue, strict=True):
        job.waiting.priority = (req.priority or 0) * priority_sign
        job.waiting.preemptions = req.retraction_count
        job.waiting.prompt_tokens = len(req.origin_input_ids) + len(req.output_ids)
    holds = parts.holder is not None and (len(queue) > 1 or len(parts.holder) > 0)
    if len(queue) < 2 and not holds:
        return
    _look(schedule, queue, jobs)
    assert parts.order is not None
    order = parts.order.order([job.waiting for job in jobs], clock.now_ms())
    if holds:
        order = _held_last(schedule, queue, jobs, order)
    queue[:] = [queue[i] for i in order]


def _jobs(queue: list[Any]) -> list[Job]:
    states = (state_of(req) for req in queue)
    return [state.job for state in states if state is not None and state.job is not None]


# --- what is known of the waiting ---------------------------------------------------------------


def _look(schedule: Schedule, queue: list[Any], jobs: list[Job]) -> None:
    """Bring a few of those that may go ahead of others up to date."""
    inside = in_window([job.waiting for job in jobs], schedule.config.most_bypasses)
    passes = schedule.clock.passes
    due = [
        (job.looked, job.waiting.number, i)
        for i, job in enumerate(jobs)
        if inside[i] and (job.looked < 0 or passes - job.looked >= _STALE_PASSES)
    ]
    tokens = 0
    for looks, (_, _, i) in enumerate(sorted(due)):
        tokens += jobs[i].waiting.prompt_tokens
        if tokens > _LOOK_TOKENS and looks >= _LEAST_LOOKS:
            break
        look_at(schedule, queue[i], jobs[i])
        jobs[i].looked = passes


def look_at(schedule: Schedule, req: Any, job: Job) -> None:
    """What of the request's prompt is cached, in its own and in published text, and what its
    prefill is predicted to take."""
    cache, waiting, state = schedule.cache, job.waiting, state_of(req)
    assert state is not None
    # As before its admission, which looks again.
    req.init_next_round_input(cache)
    tokens, prefix = len(req.full_untruncated_fill_ids), int(req.prefix_len)
    waiting.prefix_tokens = prefix + int(req.host_hit_length)
    rest = tokens - waiting.prefix_tokens
    cached = schedule.survey(req, job, waiting.prefix_tokens)
    reused = 0
    if cached >= max(cache.config.min_saved_tokens, cache.config.min_run_tokens):
        reused = round(cached * (1 - state.options.expected_ratio))
    waiting.reused_tokens = min(reused, max(0, rest - 1))
    waiting.effective_ms = schedule.cost_ms(
        req, rest - waiting.reused_tokens, tokens, narrowed=reused > 0
    )
    # A wait in passes, or a cost in tokens, says nothing about a time that is promised.
    told = schedule.clock.is_time and schedule.costs_known(req)
    waiting.ttft_slo_ms = job.slo.ttft_ms if told else None


# --- who is held back --------------------------------------------------------------------------


def _held_last(
    schedule: Schedule, queue: list[Any], jobs: list[Job], order: list[int]
) -> list[int]:
    """``order`` with those last that wait for what is being computed, or by one before them."""
    holder, now_ms = schedule.parts.holder, schedule.clock.now_ms()
    assert holder is not None
    kept: list[int] = []
    held: list[int] = []
    #: What those before it compute in this pass.
    ahead: set[int] = set()
    for i in order:
        job, req = jobs[i], queue[i]
        if job.looked < 0:
            kept.append(i)
            continue
        keys = _takes(req, job, lambda key: key in ahead or key in holder)
        # In one batch with them it would be done no sooner than they are: that wait is none.
        before_ms = None if ahead.isdisjoint(keys) else 0.0
        gain_ms = _gain_ms(schedule, req, job, len(keys)) if keys else 0.0
        if keys and holder.held(job.waiting, keys, gain_ms, now_ms, before_ms):
            job.held = True
            if not job.was_held:
                schedule.cache.metrics.held_back()
            job.was_held = True
            held.append(i)
        else:
            job.was_held = False
            kept.append(i)
            if schedule.publishes(req):
                ahead.update(job.new_keys)
    return kept + held


def _takes(req: Any, job: Job, computed: Callable[[int], bool]) -> tuple[int, ...]:
    """Keys of the request's prompt that it could take if it waited."""
    state = state_of(req)
    if state is not None and accepts_approximation(req, state):
        return tuple(key for key in job.new_keys if computed(key))
    # Only what lies in a common prefix can be taken as it is.
    return tuple(takewhile(computed, job.new_keys))


def _gain_ms(schedule: Schedule, req: Any, job: Job, keys: int) -> float:
    """What its prefill would be shorter by."""
    state, waiting = state_of(req), job.waiting
    rest = waiting.prompt_tokens - waiting.prefix_tokens - waiting.reused_tokens
    assert state is not None
    more = min(keys * KEYS_APART, rest - 1) * (1 - state.options.expected_ratio)
    now = schedule.cost_ms(req, rest, waiting.prompt_tokens, narrowed=False)
    later = schedule.cost_ms(req, round(rest - more), waiting.prompt_tokens, narrowed=True)
    return now - later
