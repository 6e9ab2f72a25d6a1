"""A decode step between prefills, where somebody who decodes was promised a time between tokens.

SGLang prefills for as long as anything waits. A prefill is cut to what a TBT SLO leaves beside a
decode step (:func:`~sglang_kvshare.engine.admission.limit_prefill`), which holds only if that step
comes.

Seam: ``Scheduler._arm_prefill_decode_interval``, which keeps ``--prefill-decode-interval``.
"""

from __future__ import annotations

from typing import Any

from sglang_kvshare.engine.schedule import job_of, schedule_of


def arm(original: Any, self: Any, batch: Any) -> None:
    """Hook of ``Scheduler._arm_prefill_decode_interval``."""
    original(self, batch)
    schedule = schedule_of(self.tree_cache)
    if schedule is None or batch is None or not batch.forward_mode.is_extend():
        return
    if any(_is_promised(req) for reqs in (self.running_batch.reqs, batch.reqs) for req in reqs):
        remaining = self._prefill_decode_interval_remaining
        self._prefill_decode_interval_remaining = max(1, remaining)


def _is_promised(req: Any) -> bool:
    job = job_of(req)
    return job is not None and job.slo.tbt_ms is not None
