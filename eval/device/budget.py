"""Steps of a run within a budget of time: none begins that would not end in it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from kvshare_eval.device.report import FAILED, Line, Section


@dataclass(frozen=True)
class Step:
    """
    Attributes:
        needs_s: what it takes at most, by estimate.
    """

    name: str
    needs_s: float
    run: Callable[[], Iterable[Line]]


@dataclass
class Budget:
    """
    Args:
        seconds: from its making.
    """

    seconds: float
    sections: list[Section] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _begin: float = field(default_factory=time.monotonic)

    @property
    def used_s(self) -> float:
        return time.monotonic() - self._begin

    @property
    def left_s(self) -> float:
        return self.seconds - self.used_s

    def verdicts(self, verdict: str) -> list[str]:
        """Cases of that verdict."""
        return [
            line.case
            for section in self.sections
            for line in section.lines
            if line.verdict == verdict
        ]

    def run(self, title: str, steps: Iterable[Step]) -> None:
        """Run what there is time for, and tell of each step on stderr as it ends: a run that is
        ended from outside has told what it had."""
        lines: list[Line] = []
        for step in steps:
            if self.left_s < step.needs_s:
                self.left_out.append(f"{step.name} (no time)")
                continue
            told = self._lines(step)
            for line in told:
                told_of = "; ".join(filter(None, line.cells))
                print(f"{self.used_s:6.1f} s  {told_of}", file=sys.stderr, flush=True)
            lines += told
        self.sections.append(Section(title, tuple(lines)))

    def _lines(self, step: Step) -> list[Line]:
        try:
            return list(step.run())
        except torch.OutOfMemoryError:
            self.left_out.append(f"{step.name} (no memory)")
            return []
        except Exception as error:
            # One that fails must not take what comes after it along.
            return [Line(step.name, f"{type(error).__name__}: {str(error)[:200]}", verdict=FAILED)]
