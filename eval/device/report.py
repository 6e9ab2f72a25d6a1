"""One table in Markdown of all that was checked and timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEAD = ("case", "measured", "floor", "of floor", "beside it", "goal", "verdict")
#: Verdicts. A missed goal is a finding, a failed check is a fault.
PASSED, FAILED, MET, MISSED, UNJUDGED = "ok", "FAILED", "met", "missed", "not judged"


@dataclass(frozen=True)
class Line:
    """
    Attributes:
        measured: a time in ms as median [quartiles], or an error and its limit.
        floor: the least time in ms, and of what work.
        share: floor over measured.
        beside: the naive composition, or another comparison.
    """

    case: str
    measured: str = ""
    floor: str = ""
    share: str = ""
    beside: str = ""
    goal: str = ""
    verdict: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.case,
            self.measured,
            self.floor,
            self.share,
            self.beside,
            self.goal,
            self.verdict,
        )


@dataclass(frozen=True)
class Section:
    title: str
    lines: tuple[Line, ...]


def table(sections: Sequence[Section]) -> str:
    """All sections in one table; a section begins with its title."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for section in sections:
        if section.lines:
            rows.append((f"**{section.title}**", *("",) * (len(HEAD) - 1)))
            rows += [tuple(_cell(text) for text in line.cells) for line in section.lines]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    lines = []
    for row in rows:
        fill = "-" if row[0] == "---" else " "
        cells = [text.ljust(width, fill) for text, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def judged(reached: bool, judges: bool) -> str:
    """The verdict on a goal; where times are of no GPU there is none."""
    if not judges:
        return UNJUDGED
    return MET if reached else MISSED


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
