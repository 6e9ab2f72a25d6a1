"""What the host works out for one narrowing of a batch, timed on the host.

tokens chosen     scores to the tokens that are recomputed     once a request
rows planned      rows kept, form chosen, launches listed      once a batch
plan made         the same, and the adapter's own plan with its copies, launched and not waited
                  for; only where FlashInfer is
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvshare_eval.device.attention_rows import RowsCase
from kvshare_eval.device.flashinfer_setup import MakeWrapper, adapter
from kvshare_eval.device.kv_pool import PoolBackend
from kvshare_eval.device.reusing import Reuse
from kvshare_eval.device.timings import Spread, host_ms, synchronize
from sglang_kvshare.attention.launch_choice import choose
from sglang_kvshare.engine.kept_rows import Extend
from sglang_kvshare.plan import BoolArray, ReusePlan, Span


@dataclass(frozen=True)
class PlanningTimes:
    """``plan_made`` is ``None`` without FlashInfer."""

    rows_planned: Spread
    plan_made: Spread | None
    form: str


def choosing_time(tokens: int, ratio: float) -> Spread:
    """Of a prompt of ``tokens``, of which 95 % are matched in spans of 512."""
    matched = tokens - max(1, tokens // 20)
    spans = tuple(
        Span(begin, begin, np.arange(begin, min(begin + 512, matched)))
        for begin in range(0, matched, 512)
    )
    reuse = Reuse(ReusePlan(tokens, 0, spans), ratio)
    rng = np.random.default_rng(0)
    attention, off = rng.random(matched), rng.random(matched)
    return host_ms(lambda: reuse.by_scores(attention, off))


def planning_times(
    keep: BoolArray, group: int, case: RowsCase | None, make: MakeWrapper | None
) -> PlanningTimes:
    """
    Args:
        keep: bool ``[tokens]``, the rows that are left of one request.
        group: query heads of one key head.
        case: the same rows, for the adapter's plan.
    """
    extend = Extend([0], [len(keep)], torch.arange(len(keep)))

    def plan() -> str:
        kept = extend.keep(keep)
        return choose(kept.row_positions, kept.counts, group=group).form.value

    planned = host_ms(plan)
    made = None if make is None or case is None else _plan_made(case, make)
    return PlanningTimes(planned, made, plan())


def _plan_made(case: RowsCase, make: MakeWrapper) -> Spread:
    rows = adapter(make, PoolBackend.of(case.pool))
    case.attend(rows)
    synchronize(case.slots.device.type)
    # The launch of one layer's kernels is in it too: some tens of microseconds.
    return host_ms(lambda: case.attend(rows, case.narrow()))
