"""The tables of serving runs."""

from __future__ import annotations

from kvshare_eval.report.serving import (
    MEASURES,
    Cell,
    Ratio,
    Saturation,
    Slos,
    by_repeat,
    ratios,
    read_slos,
    reference_side,
    saturation,
)
from kvshare_eval.report.text import NONE, interval, number, percent, plain, provenance, table
from kvshare_eval.run_dir import Run
from kvshare_eval.stats import serving as stats

HOW_TO_READ = f"""\
Times are the client's, in ms, of completed requests, from the moment at which a request was due:
lookup, copy, queueing and the client's own lag are in them. Intervals are 95 %: of percentiles and
shares by bootstrap over blocks of requests that followed each other; of ratios by Student's t over
repeats, on logarithms, since what else the machine does varies between repeats more than within
one. A percentile is given where at least one request lies beyond it (p95 from 20 on, p99 from 100
on).

- **attained**: share of all requests, failed ones included, that meet the SLO; **goodput**: those
  requests a second. In a ratio, a window in which there were none counts as half a request.
- **prefix / reused / recomputed / new**: of all prompt tokens; a stock server tells its exact
  prefix only.
- **knee**: the highest offered rate at which {percent(stats.ATTAINED)} of the requests attain the
  SLO, and at which {percent(stats.FOLLOWED)} of the offered requests are completed in time to keep
  up, both interpolated between rates.
"""


def rate_text(rate: float | None) -> str:
    return "one at a time" if rate is None else f"{rate:g}/s"


def serving_section(run: Run, found: list[Cell]) -> str:
    """All tables of one run."""
    slos = read_slos(run)
    parts: list[str] = []
    for workload in dict.fromkeys(cell.workload for cell in found):
        mine = [cell for cell in found if cell.workload == workload]
        slo = slos.of(workload)
        parts += [f"### {workload}", "", _slo_sentence(slo), ""]
        parts += [_latency(mine), "", _work(mine, slo), ""]
        parts += [*_ratio_part(ratios(mine, slos), reference_side(mine)), provenance(run), ""]
    knees = saturation(found, slos)
    if knees:
        parts += ["### Saturation", "", _knees(knees), "", provenance(run), ""]
    by_share = _shares(found, slos)
    if by_share:
        parts += ["### TTFT by reusable share", "", by_share, "", provenance(run), ""]
    return "\n".join(parts)


def _slo_sentence(slo: stats.Slo | None) -> str:
    if slo is None:
        return "No SLO is set: attainment and goodput are missing."
    bounds = []
    if slo.ttft_ms is not None:
        bounds.append(f"TTFT at most {number(slo.ttft_ms)} ms")
    if slo.tbt_ms is not None:
        bounds.append(f"{slo.tbt_of} TBT of a request at most {number(slo.tbt_ms)} ms")
    return f"SLO: {' and '.join(bounds)}."


def _latency(found: list[Cell]) -> str:
    head = ["rate", "side", "requests (failed)", "repeats"]
    names = [(f"{name} p{100 * q:.0f}", times, q) for name, times in _TIMES for q in _QUANTILES]
    rows = []
    for cell in found:
        row = [rate_text(cell.rate), f"`{cell.side}`", _count(cell), str(len(cell.load.windows))]
        for _, times, q in names:
            row.append(interval(stats.percentile(*times(cell.load), q)))
        rows.append(row)
    return table([*head, *(name for name, _, _ in names)], rows)


_TIMES = (("TTFT", stats.ttft), ("TBT", stats.tbt), ("e2e", stats.e2e))
_QUANTILES = (0.5, 0.95, 0.99)


def _count(cell: Cell) -> str:
    requests, done = cell.load.requests, cell.load.done
    return f"{len(requests)} ({len(requests) - len(done)})"


def _work(found: list[Cell], slo: stats.Slo | None) -> str:
    head = ["rate", "side", "requests/s", "prompt tokens/s", "output tokens/s", "attained"]
    head += ["goodput, requests/s", *stats.KINDS, "KV peak, tokens", "KV peak, MiB"]
    rows = []
    for cell in found:
        done = stats.throughput(cell.load)
        rates = (done.requests, done.prompt_tokens, done.output_tokens) if done else (None,) * 3
        shares = stats.hit_shares(cell.load) or {}
        attained = None if slo is None else stats.attainment_interval(cell.load, slo)
        good = None if slo is None else stats.goodput(cell.load, slo)
        mib = None if cell.kv_bytes_peak is None else cell.kv_bytes_peak / 2**20
        rows.append(
            [
                rate_text(cell.rate),
                f"`{cell.side}`",
                *map(plain, rates),
                interval(attained, percent),
                plain(good),
                *(plain(shares.get(kind), percent) for kind in stats.KINDS),
                NONE if cell.kv_tokens_peak is None else f"{cell.kv_tokens_peak:,}",
                plain(mib),
                plain(stats.cpu_seconds_per_request(cell.load)),
            ]
        )
    return table([*head, "scheduler CPU, s a request"], rows)


def _ratio_part(found: list[Ratio], reference: str | None) -> list[str]:
    if reference is None:
        return ["Neither `stock` nor `off` was measured: no ratios.", ""]
    if not found:
        return [f"No other side has a figure to hold against `{reference}`.", ""]
    cells: dict[tuple[float | None, str], dict[str, Ratio]] = {}
    for ratio in found:
        cells.setdefault((ratio.rate, ratio.side), {})[ratio.measure.name] = ratio
    names = [measure.name for measure in MEASURES]
    rows = [
        [
            rate_text(rate),
            f"`{side}` / `{reference}`",
            str(max(one.ratio.cases for one in by_name.values())),
            *(_ratio(by_name.get(name)) for name in names),
        ]
        for (rate, side), by_name in cells.items()
    ]
    return [table(["rate", "sides", "repeats", *names], rows), ""]


def _ratio(found: Ratio | None) -> str:
    if found is None:
        return NONE
    if found.ratio.low is None:
        return f"{number(found.ratio.value)} [one repeat]"
    return interval(found.ratio)


def _knees(found: list[Saturation]) -> str:
    return table(
        ["workload", "side", "knee by SLO", "throughput follows up to"],
        [[row.workload, f"`{row.side}`", _knee(row.slo), _knee(row.throughput)] for row in found],
    )


def _knee(found: stats.Knee | None) -> str:
    if found is None:
        return NONE
    if found.below:
        return f"below {found.rate:g}/s, the lowest rate"
    return f"{'at least ' if found.at_least else ''}{number(found.rate)}/s"


def families(found: list[Cell]) -> dict[tuple[str, float | None], list[Cell]]:
    """Cells that differ in the reusable share only, where there are at least two shares."""
    groups: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in found:
        if cell.share is not None:
            groups.setdefault((cell.family, cell.rate), []).append(cell)
    return {
        key: sorted(cells, key=lambda cell: cell.share or 0.0)
        for key, cells in groups.items()
        if len({cell.workload for cell in cells}) > 1
    }


def _shares(found: list[Cell], slos: Slos) -> str:
    reference = reference_side(found)
    rows = []
    for (family, rate), cells in families(found).items():
        base = {cell.workload: cell for cell in cells if cell.side == reference}
        for cell in cells:
            ratio = None
            if cell.side != reference and cell.workload in base:
                ratio = by_repeat(cell, base[cell.workload], MEASURES[0], slos)
            rows.append(
                [
                    family,
                    rate_text(rate),
                    number(cell.prompt_tokens),
                    plain(cell.share, percent),
                    f"`{cell.side}`",
                    interval(stats.percentile(*stats.ttft(cell.load), 0.5)),
                    NONE if ratio is None else interval(ratio),
                ]
            )
    if not rows:
        return ""
    head = ["workload", "rate", "prompt tokens", "reusable share", "side", "TTFT p50, ms"]
    return table([*head, f"TTFT p50 / {reference or 'reference'}"], rows)
