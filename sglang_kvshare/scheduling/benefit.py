"""Whether reuse pays, judged by what forwards on this machine were measured to take.

    full forward of n rows                      full(n)
    narrowed forward of k kept rows             narrowed(k), else full(k) + overhead
    a plan that spares s of n rows gains        full(n) - narrowed(n - s) - copy * s

The curves are no lines: few rows cost hardly less than some more (weights are read all the same),
which is why short prompts would lose. They are running medians of measurements by powers of two.

What was not measured is not held against a plan: of a narrowed forward smaller than all that are
known the least is assumed, so that the plan is carried out, and its time is known from then on. A
gate that took the smallest size it knows for all smaller ones would close where only long prompts
were computed in full, and then never learn better.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import numpy as np

#: Measurements kept of each kind: enough for a median, few enough to follow a change.
_RECENT = 16
#: Measurements of each kind before the gate has an opinion.
_ENOUGH = 4


class Recent:
    """The median of the last measurements; what is not a plausible time is ignored."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._values.append(value)

    @property
    def median(self) -> float:
        return median(self._values)


@dataclass
class _Bucket:
    rows: Recent
    ms: Recent


class CostCurve:
    """Time of a forward by the rows that run, in milliseconds."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._points: tuple[list[float], list[float]] | None = None

    @property
    def known(self) -> bool:
        """Two sizes at least have been measured well enough to compare them."""
        return len(self._known()[0]) >= 2

    def observe(self, rows: int, ms: float) -> None:
        """Note a forward of ``rows`` rows; a time that is not above 0 (a clock that went back)
        is ignored."""
        if rows < 1 or not ms > 0:
            return
        bucket = self._buckets.setdefault(rows.bit_length(), _Bucket(Recent(), Recent()))
        bucket.rows.add(rows)
        bucket.ms.add(ms)
        self._points = None

    def covers(self, rows: int) -> bool:
        """``rows`` is no less, by powers of two, than the smallest size measured well enough."""
        sizes, _ = self._known()
        return bool(sizes) and rows.bit_length() >= int(sizes[0]).bit_length()

    def ms(self, rows: float) -> float:
        """Predicted time; never falls with ``rows``.

        Below the smallest size measured it follows the line of the two smallest, and is not below
        0: where rows hardly matter any more it stays flat, and where only long forwards are known
        it says little, and so less than it will take.
        """
        sizes, times = self._known()
        if rows < sizes[0]:
            slope = (times[1] - times[0]) / (sizes[1] - sizes[0]) if len(sizes) > 1 else 0.0
            return max(0.0, times[0] - slope * (sizes[0] - rows))
        if rows <= sizes[-1]:
            return float(np.interp(rows, sizes, times))
        # Beyond the largest: along its own average, which is less than what attention will take.
        return times[-1] * rows / sizes[-1]

    def _known(self) -> tuple[list[float], list[float]]:
        if self._points is None:
            known = [b for _, b in sorted(self._buckets.items()) if len(b.ms) >= _ENOUGH]
            times = list(accumulate((b.ms.median for b in known), max))
            self._points = [b.rows.median for b in known], times
        return self._points


class BenefitGate:
    """Lets a plan through when it is predicted to save time; learns from every forward."""

    def __init__(self) -> None:
        self.full = CostCurve()
        self.narrowed = CostCurve()
        self._overhead_ms = Recent()
        self._copy_ms_per_token = Recent()
        self._match_ms_per_token = Recent()

    def observe_full(self, rows: int, ms: float) -> None:
        """A forward in which every one of ``rows`` rows ran."""
        self.full.observe(rows, ms)

    def observe_narrowed(self, kept_rows: int, ms: float) -> None:
        """A forward in which ``kept_rows`` ran, without the copy before it."""
        self.narrowed.observe(kept_rows, ms)
        if ms > 0 and self.full.known and self.full.covers(kept_rows):
            self._overhead_ms.add(ms - self.full.ms(kept_rows))

    def observe_copy(self, tokens: int, ms: float) -> None:
        if tokens > 0 and ms >= 0:
            self._copy_ms_per_token.add(ms / tokens)

    def observe_match(self, tokens: int, ms: float) -> None:
        """Planning for ``tokens`` prompt tokens beyond the prefix."""
        if tokens > 0 and ms >= 0:
            self._match_ms_per_token.add(ms / tokens)

    @property
    def known(self) -> bool:
        """Enough has been measured to judge some plans; until then every plan passes."""
        return self.full.known and len(self._copy_ms_per_token) >= _ENOUGH

    def saved_ms(self, rows: int, spared_rows: int) -> float:
        """Predicted gain of a plan that spares ``spared_rows`` of ``rows``; may be negative."""
        copy = self._copy_ms_per_token.median * spared_rows
        return self.full.ms(rows) - self._narrowed_ms(rows - spared_rows) - copy

    def _narrowed_ms(self, kept_rows: int) -> float:
        if self.narrowed.covers(kept_rows):
            return self.narrowed.ms(kept_rows)
        overhead = self._overhead_ms.median if len(self._overhead_ms) >= _ENOUGH else 0.0
        return self.full.ms(kept_rows) + overhead

    def pays(self, rows: int, spared_rows: int) -> bool:
        """Whether a plan at hand is worth carrying out."""
        return not self.known or self.saved_ms(rows, spared_rows) > 0

    def worth_a_look(self, rows: int) -> bool:
        """Whether the best plan there can be would pay for the search as well."""
        if not self.known or rows < 2:
            return True
        search = self._match_ms_per_token.median * rows if len(self._match_ms_per_token) else 0.0
        return self.saved_ms(rows, rows - 1) > search
