"""Numbers, tables and the words under them, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvshare_eval.run_dir import Run
from kvshare_eval.stats.bootstrap import MIN_GROUPS, Interval

NONE = "–"

Format = Callable[[float], str]


def number(value: float) -> str:
    """Three significant digits; whole numbers from a hundred on."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def fixed(value: float) -> str:
    """Three decimals: for scores and their differences."""
    return f"{value:.3f}".replace("-0.000", "0.000")


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-0.000", "0.000").replace("+0.000", "0.000")


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def plain(value: float | None, form: Format = number) -> str:
    return NONE if value is None or not math.isfinite(value) else form(value)


def interval(found: Interval | None, form: Format = number) -> str:
    """``0.637 [0.551, 0.720]``, or why there are no bounds."""
    if found is None or not math.isfinite(found.value):
        return NONE
    if found.low is None or found.high is None:
        why = "too few groups" if found.groups < MIN_GROUPS else "no interval"
        return f"{form(found.value)} [{why}]"
    if found.low == found.high:
        return f"{form(found.value)} [all equal]"
    return f"{form(found.value)} [{form(found.low)}, {form(found.high)}]"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def provenance(run: Run) -> str:
    """Where the tables above it, or a figure, come from, in one line."""
    facts = run.facts
    parts = [
        f"commit `{facts.get('commit', 'unknown')}`",
        f"model {model_name(run)}",
        machine(run),
        str(facts.get("started", "date unknown")),
        f"`{facts.get('command', 'command unknown')}`",
    ]
    return f"From run `{run.name}`: " + "; ".join(parts) + "."


def machine(run: Run) -> str:
    return f"{run.facts.get('machine', 'machine unknown')}, {run.facts.get('cores', '?')} cores"


def model_name(run: Run) -> str:
    return str(run.settings.get("model") or "not named")


def settings_text(settings: dict[str, Any]) -> str:
    """Settings as ``key=value``, for the list of runs."""
    return ", ".join(f"{key}={_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + settings_text(value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)
