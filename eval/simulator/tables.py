"""Outcomes as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from kvshare_eval.simulator.experiments import Against, Sweep, against
from kvshare_eval.simulator.results import Outcome
from kvshare_eval.stats.bootstrap import Interval

_COLUMNS = (
    ("req/s", "completed", "{:.3g}"),
    ("TTFT mean ms", "ttft_mean_ms", "{:,.0f}"),
    ("p50", "ttft_p50_ms", "{:,.0f}"),
    ("p95", "ttft_p95_ms", "{:,.0f}"),
    ("p99", "ttft_p99_ms", "{:,.0f}"),
    ("worst wait", "worst_wait_ms", "{:,.0f}"),
    ("gap p50 ms", "tbt_p50_ms", "{:.1f}"),
    ("p95", "tbt_p95_ms", "{:.1f}"),
    ("p99", "tbt_p99_ms", "{:.1f}"),
    ("mean gap p95", "mean_tbt_p95_ms", "{:.1f}"),
    ("p99", "mean_tbt_p99_ms", "{:.1f}"),
    ("TTFT SLO", "ttft_slo", "{:.1%}"),
    ("TBT SLO", "tbt_slo", "{:.1%}"),
    ("both", "slo", "{:.1%}"),
    ("preempted", "preemptions", "{:,.0f}"),
    ("swapped", "swaps", "{:,.0f}"),
    ("hit", "hit_share", "{:.1%}"),
    ("reused", "reused_share", "{:.1%}"),
)


def outcomes_table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """One row a side, means over repeats."""
    rows = [["side", *(title for title, _, _ in _COLUMNS)]]
    for side, repeats in outcomes.items():
        rows.append([f"`{side}`", *(_mean(repeats, name, form) for _, name, form in _COLUMNS)])
    return table(rows)


def against_table(outcomes: Mapping[str, Sequence[Outcome]], base: str) -> str:
    """Times of the base over those of the others, and points of attainment gained."""
    head = ["side", "TTFT mean", "p50", "p99", "gap p99", "mean gap p99", "TTFT SLO", "TBT SLO"]
    rows = [[*head, "both"]]
    rows += [
        _against_row(against(side, repeats, outcomes[base]))
        for side, repeats in outcomes.items()
        if side != base
    ]
    return f"`{base}` over the side (above 1: the side is better), and points gained\n\n" + table(
        rows
    )


def sweep_text(found: Sweep, base: str) -> str:
    served = found.served_rates
    rows = [["side", "req/s at 90 %", f"over {base}"]]
    rows += [[f"`{s}`", f"{rate:.3g}", f"{rate / served[base]:.2f}"] for s, rate in served.items()]
    half = f"`{base}` meets both SLOs of half of the requests at {found.half_rate:.3g} requests/s:"
    return "\n\n".join(
        (table(rows), half, outcomes_table(found.at_half), against_table(found.at_half, base))
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean(repeats: Sequence[Outcome], name: str, form: str) -> str:
    return form.format(statistics.fmean(getattr(each, name) for each in repeats))


def _against_row(found: Against) -> list[str]:
    names = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tbt_p99_ms", "mean_tbt_p99_ms")
    points = (f"{found.gains[name]:+.1f}" for name in ("ttft_slo", "tbt_slo", "slo"))
    return [f"`{found.side}`", *(_ratio(found.ratios.get(name)) for name in names), *points]


def _ratio(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
