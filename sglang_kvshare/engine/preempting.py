"""Who gives way when KV runs short, before it does and when it has.

    each decode step   the ledger foresees that the next steps will not fit
                       -> a victim is preempted now; its copy to the host runs beside the others
    pool full          SGLang retracts; the order of its victims is ours

Seams: ``Scheduler.update_running_batch``, ``ScheduleBatch._get_decode_retraction_order``,
and those of :mod:`~sglang_kvshare.engine.swapping`.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.runtime_context import get_schedule

from sglang_kvshare.engine import swapping
from sglang_kvshare.engine.schedule import Schedule, job_of, schedule_of
from sglang_kvshare.engine.swapping import private_tokens
from sglang_kvshare.scheduling.jobs import Running
from sglang_kvshare.scheduling.preemption import victims

logger = logging.getLogger(__name__)


def update_running_batch(original: Any, self: Any, batch: Any) -> Any:
    """Hook of ``Scheduler.update_running_batch``."""
    schedule = schedule_of(self.tree_cache)
    if schedule is not None:
        try:
            _before_decode(self, schedule, batch)
        except Exception:
            schedule.fault("who gives way")
    before = list(batch.reqs)
    result = original(self, batch)
    if schedule is not None and len(batch.reqs) < len(before):
        for req in before:
            if req.is_retracted:
                self.tree_cache.metrics.preempted("pool_full")
    return result


def retraction_order(original: Any, reqs: list[Any]) -> list[int]:
    """Hook of ``ScheduleBatch._get_decode_retraction_order``: indices, the last goes first."""
    jobs = [job_of(req) for req in reqs]
    schedule = next((job.owner for job in jobs if job is not None), None)
    stands = schedule is None or schedule.config.victims == "stock" or None in jobs
    if stands or get_schedule().retraction_policy != "length":
        return list(original(reqs))
    assert schedule is not None
    try:
        first = _victims(schedule, reqs, needed_tokens=1 << 62)
        rest = sorted(set(range(len(reqs))) - set(first))
        return rest + first[::-1]
    except Exception:
        schedule.fault("whom to retract")
        return list(original(reqs))


def _before_decode(scheduler: Any, schedule: Schedule, batch: Any) -> None:
    reserving = schedule.reserving
    if reserving is None:
        return
    reqs = [req for req in batch.reqs if not req.finished()]
    reserving.decodes(reqs)
    # Their last token is on its way, and then they give back what they hold.
    ending = {req.rid for req in scheduler._reqs_finishing_inflight(batch)}
    # Beams go all or none, which SGLang alone knows to do.
    reqs = [req for req in reqs if req.rid not in ending and req.beam_group is None]
    if schedule.config.victims == "stock" or len(reqs) < 2:
        return
    cache, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    steps = schedule.config.lookahead_steps
    available = int(allocator.available_size()) + int(cache.evictable_size())
    short = reserving.ledger.short_tokens(steps, available)
    if short <= 0:
        return
    # Slots of copies that are on their way come back in time, and those of whoever ends.
    short -= cache.swapping.pending_tokens
    short -= sum(private_tokens(req) for req in batch.reqs if req.rid in ending)
    short -= sum(max(0, steps - _most_to_come(req)) for req in reqs)
    if short <= 0:
        return
    for req in [reqs[i] for i in _victims(schedule, reqs, short)]:
        at = next(i for i, one in enumerate(batch.reqs) if one is req)
        copied = swapping.preempt(scheduler, batch, at)
        cache.metrics.preempted("foreseen")
        logger.info(
            "KVShare preempts request %s before KV runs short; it is %s",
            req.rid,
            "copied to host memory" if copied else "recomputed later",
        )


def _most_to_come(req: Any) -> int:
    return int(req.sampling_params.max_new_tokens) - len(req.output_ids)


def _victims(schedule: Schedule, reqs: list[Any], needed_tokens: int) -> list[int]:
    running = [_running(schedule, req) for req in reqs]
    return victims(
        running,
        needed_tokens,
        schedule.parts.victim_order,
        schedule.config.most_preemptions,
    )


def _running(schedule: Schedule, req: Any) -> Running:
    job = job_of(req)
    assert job is not None
    return Running(
        rid=req.rid,
        number=job.waiting.number,
        prompt_tokens=len(req.origin_input_ids),
        output_tokens=len(req.output_ids),
        max_new_tokens=req.sampling_params.max_new_tokens,
        private_tokens=private_tokens(req),
        left_tokens=schedule.lengths.expected_left_tokens(req, job),
        tbt_slo_ms=job.slo.tbt_ms,
        preempt_ms=schedule.cache.swapping.predicted_ms(req),
        preemptions=req.retraction_count,
        priority=(req.priority or 0) * schedule.priority_sign,
    )
