"""What users felt in a run, as figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvshare_eval.simulator.costs import PS_PER_MS
from kvshare_eval.simulator.felt import Felt
from kvshare_eval.simulator.requests import Requests

NAN = float("nan")


@dataclass(frozen=True)
class Outcome:
    """One run; times in milliseconds.

    Attributes:
        requests, refused, aborted: counts; a refused request could never fit into the pool.
        offered, completed: requests a second.
        output_tokens_per_s: throughput.
        ttft_*: from arrival to the first token.
        tbt_*: of all gaps between tokens, those of preemptions and prefills included.
        mean_tbt_*: of the mean gap of each answer of two tokens or more.
        worst_wait_ms: longest time from arrival to the choice for prefill.
        ttft_slo, tbt_slo, slo: share of all requests within; TBT by a request's mean gap.
        tbt_max_slo: the same by its largest gap.
        gaps_in_slo: share of all gaps within.
        preemptions, swaps, recomputes: counts.
        hit_share, reused_share: of the prompt tokens, found as a prefix, and taken from elsewhere.
        rows, steps, prefills: work of the server.
        peak_share: of the pool that was locked or private at most.
        stalled_ms: that decoding waited for copies.
    """

    requests: int
    refused: int
    aborted: int
    offered: float
    completed: float
    output_tokens_per_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tbt_mean_ms: float
    tbt_p50_ms: float
    tbt_p95_ms: float
    tbt_p99_ms: float
    mean_tbt_p50_ms: float
    mean_tbt_p95_ms: float
    mean_tbt_p99_ms: float
    worst_wait_ms: float
    ttft_slo: float
    tbt_slo: float
    tbt_max_slo: float
    gaps_in_slo: float
    slo: float
    preemptions: int
    swaps: int
    recomputes: int
    hit_share: float
    reused_share: float
    rows: int
    steps: int
    prefills: int
    peak_share: float
    stalled_ms: float
    idle_share: float

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def outcome(requests: Requests, felt: Felt, pool_tokens: int) -> Outcome:
    """Figures over all requests, the refused ones counted as missed."""
    first = np.array(felt.first_ps, dtype=np.int64)
    end = np.array(felt.end_ps, dtype=np.int64)
    served = first >= 0
    arrived = requests.arrived_ps
    ttft = (first - arrived)[served] / PS_PER_MS
    wait = (np.array(felt.admitted_ps, dtype=np.int64) - arrived)[served] / PS_PER_MS
    output = np.minimum(requests.output, requests.max_new)[served]
    many = output > 1
    mean_gap = ((end - first)[served][many]) / PS_PER_MS / (output[many] - 1)
    largest = np.array(felt.gap_ps, dtype=np.int64)[served][many] / PS_PER_MS
    span_s = max(felt.end_of_all_ps - (int(arrived[0]) if len(arrived) else 0), 1) / PS_PER_MS / 1e3
    count = len(requests)
    ttft_slo = _inf(requests.ttft_slo_ms)
    tbt_slo = _inf(requests.tbt_slo_ms)
    tbt_met = np.ones(len(output), dtype=bool)
    tbt_met[many] = mean_gap <= tbt_slo
    max_met = np.ones(len(output), dtype=bool)
    max_met[many] = largest <= tbt_slo
    ttft_met = ttft <= ttft_slo
    gaps = felt.gaps
    tokens = felt.tokens
    prompt = max(1, int(requests.prompt.sum()))
    return Outcome(
        requests=count,
        refused=felt.refused,
        aborted=felt.aborted,
        offered=requests.rate,
        completed=int(served.sum()) / span_s,
        output_tokens_per_s=tokens / span_s,
        ttft_mean_ms=float(ttft.mean()) if len(ttft) else NAN,
        ttft_p50_ms=_quantile(ttft, 0.5),
        ttft_p95_ms=_quantile(ttft, 0.95),
        ttft_p99_ms=_quantile(ttft, 0.99),
        tbt_mean_ms=float((end - first)[served].sum() / PS_PER_MS / max(1, gaps.total)),
        tbt_p50_ms=gaps.quantile_ms(0.5),
        tbt_p95_ms=gaps.quantile_ms(0.95),
        tbt_p99_ms=gaps.quantile_ms(0.99),
        mean_tbt_p50_ms=_quantile(mean_gap, 0.5),
        mean_tbt_p95_ms=_quantile(mean_gap, 0.95),
        mean_tbt_p99_ms=_quantile(mean_gap, 0.99),
        worst_wait_ms=float(wait.max()) if len(wait) else NAN,
        ttft_slo=int(ttft_met.sum()) / count,
        tbt_slo=int(tbt_met.sum()) / count,
        tbt_max_slo=int(max_met.sum()) / count,
        gaps_in_slo=gaps.share_up_to(tbt_slo) if np.isfinite(tbt_slo) else 1.0,
        slo=int((ttft_met & tbt_met).sum()) / count,
        preemptions=felt.swaps + felt.recomputes,
        swaps=felt.swaps,
        recomputes=felt.recomputes,
        hit_share=sum(felt.prefix) / prompt,
        reused_share=sum(felt.reused) / prompt,
        rows=felt.rows,
        steps=felt.steps,
        prefills=felt.prefills,
        peak_share=felt.peak_tokens / pool_tokens,
        stalled_ms=felt.stalled_ps / PS_PER_MS,
        idle_share=felt.idle_ps / max(1, felt.end_of_all_ps),
    )


def _quantile(values: np.ndarray, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else NAN


def _inf(slo_ms: float | None) -> float:
    return float("inf") if slo_ms is None else slo_ms
