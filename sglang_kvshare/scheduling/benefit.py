"""Whether reuse pays, judged by what forwards on this machine were measured to take.

    full forward of n rows                      curve(n)
    narrowed forward: k rows kept, s placed     curve(k) + overhead + copy * s
    a plan that spares s of n rows gains        curve(n) - curve(n - s) - overhead - copy * s

The curve is not a line: few rows cost hardly less than some more (weights are read all the same),
which is why short prompts would lose. It is the running median of measurements by powers of two.
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
    """Time of a full forward by its rows, in milliseconds."""

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

    def ms(self, rows: float) -> float:
        """Predicted time; never falls with ``rows``, flat below the smallest size measured."""
        sizes, times = self._known()
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
        self.curve = CostCurve()
        self._overhead_ms = Recent()
        self._copy_ms_per_token = Recent()
        self._match_ms_per_token = Recent()

    def observe_full(self, rows: int, ms: float) -> None:
        """A forward in which every one of ``rows`` rows ran."""
        self.curve.observe(rows, ms)

    def observe_narrowed(self, kept_rows: int, ms: float) -> None:
        """A forward in which ``kept_rows`` ran, without the copy before it."""
        if self.curve.known and ms > 0:
            self._overhead_ms.add(ms - self.curve.ms(kept_rows))

    def observe_copy(self, tokens: int, ms: float) -> None:
        if tokens > 0 and ms >= 0:
            self._copy_ms_per_token.add(ms / tokens)

    def observe_match(self, tokens: int, ms: float) -> None:
        """Planning for ``tokens`` prompt tokens beyond the prefix."""
        if tokens > 0 and ms >= 0:
            self._match_ms_per_token.add(ms / tokens)

    @property
    def known(self) -> bool:
        """Enough has been measured; until then every plan passes."""
        return (
            self.curve.known
            and len(self._overhead_ms) >= _ENOUGH
            and len(self._copy_ms_per_token) >= _ENOUGH
        )

    def saved_ms(self, rows: int, spared_rows: int) -> float:
        """Predicted gain of a plan that spares ``spared_rows`` of ``rows``; may be negative."""
        gain = self.curve.ms(rows) - self.curve.ms(rows - spared_rows)
        return gain - self._overhead_ms.median - self._copy_ms_per_token.median * spared_rows

    def pays(self, rows: int, spared_rows: int) -> bool:
        """Whether a plan at hand is worth carrying out."""
        return not self.known or self.saved_ms(rows, spared_rows) > 0

    def worth_a_look(self, rows: int) -> bool:
        """Whether the best plan there can be would pay for the search as well."""
        if not self.known or rows < 2:
            return True
        search = self._match_ms_per_token.median * rows if len(self._match_ms_per_token) else 0.0
        return self.saved_ms(rows, rows - 1) > search
