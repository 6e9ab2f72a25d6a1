"""What loses, what gains and what cannot be told, in sentences made from the figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvshare_eval.report.quality import BASE, FULL, NO_CONTEXT, TaskCases
from kvshare_eval.report.serving import Cell, ratios, read_slos
from kvshare_eval.report.serving_page import rate_text
from kvshare_eval.report.text import interval, signed
from kvshare_eval.run_dir import Run
from kvshare_eval.stats.bootstrap import Interval

Verdict = Literal["loses", "gains", "noise", "undecided"]


@dataclass(frozen=True)
class Finding:
    """One comparison: whose, of which figure, with what outcome.

    ``undecided``: the sample gives no interval, so nothing can be said.
    """

    run: str
    where: str
    figure: str
    verdict: Verdict


def judge(found: Interval, neutral: float, *, lower_is_better: bool) -> Verdict:
    """By the side of ``neutral`` on which the whole interval lies."""
    if found.low is None:
        return "undecided"
    if found.above(neutral):
        return "loses" if lower_is_better else "gains"
    if found.below(neutral):
        return "gains" if lower_is_better else "loses"
    return "noise"


def quality_findings(run: Run, tasks: Iterable[TaskCases]) -> list[Finding]:
    """Every method's score against full recompute, and its divergence against no repair."""
    found = []
    for task in tasks:
        for row in task.summaries:
            if row.method in (FULL, NO_CONTEXT):
                continue
            where = f"{task.task}, `{row.method}`"
            if row.minus_full is not None:
                verdict = judge(row.minus_full, 0.0, lower_is_better=False)
                text = f"{task.metric} minus `{FULL}` {interval(row.minus_full, signed)}"
                found.append(Finding(run.name, where, text, verdict))
            if row.kl_ratio is not None:
                verdict = judge(row.kl_ratio, 1.0, lower_is_better=True)
                text = f"KL / `{BASE}` {interval(row.kl_ratio)}"
                found.append(Finding(run.name, where, text, verdict))
    return found


def serving_findings(run: Run, cells: list[Cell]) -> list[Finding]:
    """Every side against the reference side."""
    return [
        Finding(
            run.name,
            f"{one.workload}, {rate_text(one.rate)}, `{one.side}` / `{one.reference}`",
            f"{one.measure.name} {interval(one.ratio)}",
            judge(one.ratio, 1.0, lower_is_better=one.measure.lower_is_better),
        )
        for one in ratios(cells, read_slos(run))
    ]


_HEADINGS: tuple[tuple[Verdict, str, str], ...] = (
    ("loses", "Loses", "nothing: no interval lies wholly on the wrong side"),
    ("gains", "Gains", "nothing: no interval lies wholly on the right side"),
    ("noise", "Within noise", "nothing"),
    ("undecided", "Not to be told: the sample gives no interval", "nothing"),
)


def findings_section(found: list[Finding]) -> str:
    """The section, every sentence with its run."""
    if not found:
        return (
            "There is nothing to compare: no method was run beside `full` or `none`, and no side "
            "beside `stock` or `off`.\n"
        )
    expected = 0.025 * sum(finding.verdict != "undecided" for finding in found)
    parts = [
        f"{len(found)} comparisons at 95 %. Were nothing different at all, some {expected:.1f} of "
        "them would still lose by chance, and as many gain.",
        "",
    ]
    for verdict, heading, empty in _HEADINGS:
        figures: dict[tuple[str, str], list[str]] = {}
        for finding in found:
            if finding.verdict == verdict:
                figures.setdefault((finding.run, finding.where), []).append(finding.figure)
        if verdict == "undecided" and not figures:
            continue
        lines = [f"- {where} (run `{run}`): {'; '.join(f)}" for (run, where), f in figures.items()]
        parts += [f"**{heading}**", "", *(lines or [f"- {empty}"]), ""]
    return "\n".join(parts)
