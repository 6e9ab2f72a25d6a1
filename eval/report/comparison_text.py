"""A comparison in words."""

from __future__ import annotations

from kvshare_eval.report.comparison import Change, Comparison
from kvshare_eval.report.text import NONE, interval, number, percent, signed, table

_ORDER = ("worse", "better", "within noise", "no interval")


def render(found: Comparison) -> str:
    """Markdown: a verdict, warnings, and every figure, the worst first."""
    lines = [f"`{found.before}` (A) against `{found.after}` (B): {_counts(found)}.", ""]
    lines += [f"Warning: {warning}" for warning in found.warnings]
    lines += [""] if found.warnings else []
    regressions = [change for change in found.changes if change.regression]
    if regressions:
        lines.append(f"Regressions, worse beyond noise by more than {percent(found.threshold)}:")
        lines += [f"- {change.where}: {change.figure} {_size(change)}" for change in regressions]
    else:
        lines.append(f"No regression: nothing is worse beyond noise by {percent(found.threshold)}.")
    ranked = sorted(
        found.changes, key=lambda change: (not change.regression, _ORDER.index(change.outcome))
    )
    head = ["where", "figure", "A", "B", "B - A, or B / A", "relative", "outcome", "sample"]
    return "\n".join([*lines, "", table(head, map(_row, ranked)), "", *_notes(found)])


def _counts(found: Comparison) -> str:
    outcomes = [change.outcome for change in found.changes]
    return ", ".join(f"{outcomes.count(one)} {one}" for one in _ORDER if one in outcomes)


def _row(change: Change) -> list[str]:
    form = number if change.ratio else signed
    sign = "× " if change.ratio else ""
    outcome = f"**{change.outcome}**" if change.regression else change.outcome
    return [
        change.where,
        change.figure,
        number(change.before),
        number(change.after),
        sign + interval(change.change, form),
        _size(change),
        outcome,
        change.how,
    ]


def _size(change: Change) -> str:
    return NONE if change.size is None else f"{100 * change.size:+.1f} %"


def _notes(found: Comparison) -> list[str]:
    judged = sum(change.outcome != "no interval" for change in found.changes)
    return [
        f"Intervals are 95 %: of {judged} figures that did not change some {0.05 * judged:.1f} "
        "would be called better or worse. A and B of KL are medians, the ratio is a geometric mean "
        "over cases. What the machine did differently during the two runs is in no interval that "
        "is not paired."
    ]
