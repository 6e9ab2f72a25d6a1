"""What KV running requests are promised, beside SGLang's admission.

    PrefillAdder      what is new of the prompt fits now        SGLang's own budget
                      what all answers grow to fits as well     the demand ledger
    a decode step     reservations that end soon are renewed

Seams: ``PrefillAdder._get_running_request_total_token_offset``, ``_select_prefill_admission`` and
``rem_total_tokens`` (through :mod:`~sglang_kvshare.engine.admission`), ``ReqKvInfo``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_kvshare.engine.state import state_of
from sglang_kvshare.engine.swapping import held_by_others, private_tokens
from sglang_kvshare.scheduling.ledger import DemandLedger
from sglang_kvshare.scheduling.reserve import GlobalReserve

if TYPE_CHECKING:
    from sglang_kvshare.engine.schedule import Job, Schedule

#: Steps after which the ledger is told what requests really hold.
_SYNC_STEPS = 16


class Reserving:
    """Drives the demand ledger of one scheduler."""

    def __init__(self, schedule: Schedule, ledger: DemandLedger, reserve: GlobalReserve) -> None:
        self._schedule = schedule
        self.ledger = ledger
        self._reserve = reserve
        self._steps = 0

    def fits(self, adder: Any, req: Any, extend_tokens: int) -> bool:
        """Whether ``req`` may be admitted without its answer, or another one, running dry.

        Where nothing runs it may: no other request has to give way, and its prompt fits.
        """
        if not len(self.ledger) and not adder.can_run_list:
            return True
        ledger, available = self.ledger, self._available(adder)
        steps = self._schedule.config.lookahead_steps
        if extend_tokens + steps + ledger.short_tokens(steps, 0) > available:
            # Somebody would have to give way at once.
            return False
        left = self._left_tokens(req, _job_of(req))
        return ledger.fits(extend_tokens, left, available, self._reserve.tokens(len(ledger)))

    def _available(self, adder: Any) -> int:
        """Free and evictable, less what this pass and the chunks to come will take."""
        to_come = sum(
            max(0, len(req.full_untruncated_fill_ids) - req.extend_end)
            for req in adder.can_run_list
        )
        return int(adder.rem_total_tokens) - to_come

    def admitted(self, req: Any, job: Job) -> None:
        """Its slots are about to be taken."""
        if req.rid in self.ledger:
            return
        whole = len(req.full_untruncated_fill_ids)
        self.ledger.open(
            req.rid, max(0, whole - held_by_others(req.last_node)), self._left_tokens(req, job)
        )

    def decodes(self, reqs: list[Any]) -> None:
        """A decode step of ``reqs`` begins."""
        self._steps += 1
        self.ledger.step()
        if self._steps % _SYNC_STEPS == 0:
            for req in reqs:
                if req.rid in self.ledger:
                    self.ledger.sync(req.rid, private_tokens(req))
        ending = self.ledger.due()
        by_rid = {req.rid: req for req in reqs} if ending else {}
        for rid in ending:
            due = by_rid.get(rid)
            if due is not None:
                self.ledger.sync(rid, private_tokens(due))
                self.ledger.renew(rid, self._left_tokens(due, _job_of(due)))

    def ended(self, req: Any, job: Job, *, complete: bool) -> None:
        """``req`` gives back what it holds.

        Args:
            complete: its answer is, so that its length tells something.
        """
        if req.rid in self.ledger:
            self.ledger.close(req.rid)
        if complete and job.estimate is not None:
            self._reserve.observe(len(req.output_ids) - job.estimate.upper_tokens)

    def _left_tokens(self, req: Any, job: Job) -> int:
        """A new bound where the old one ends within the look-ahead."""
        schedule = self._schedule
        ahead = schedule.config.lookahead_steps
        return schedule.lengths.left_tokens(req, job, schedule.arrivals_per_s, ahead)


def _job_of(req: Any) -> Job:
    state = state_of(req)
    assert state is not None
    assert state.job is not None
    return state.job
