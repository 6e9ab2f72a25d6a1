"""Gaps between tokens, of millions of requests, when decode steps are jumped over.

All that decode together share their gaps, so that a gap is noted once, with the number of those
that felt it. In a run of steps with the same batch the gaps rise by the same amount from step to
step, and how many fall into a bin of the histogram follows by division: the histogram of a jump is
exactly that of its single steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from kvshare_eval.simulator.costs import PS_PER_MS

#: Bins are this much wider each than the one before: percentiles are right to half of it.
_RATIO = 1.005
_LEAST_PS = PS_PER_MS // 1000
_MOST_PS = 10**8 * PS_PER_MS


def _edges() -> list[int]:
    edges, edge = [0], float(_LEAST_PS)
    while edge < _MOST_PS:
        edges.append(int(edge))
        edge *= _RATIO
    return edges


class GapHistogram:
    """How often which gap was felt; from 1 microsecond to a day, to within 0.5 %."""

    #: A gap of bin i lies in [edges[i], edges[i + 1]).
    EDGES = _edges()

    def __init__(self) -> None:
        self.counts = [0] * len(self.EDGES)

    def add(self, gap_ps: int, weight: int) -> None:
        self.counts[bisect_right(self.EDGES, gap_ps) - 1] += weight

    def add_run(self, first_ps: int, rise_ps: int, steps: int, weight: int) -> None:
        """Gaps ``first, first + rise, ...``, so many of them, each felt ``weight`` times."""
        edges, counts = self.EDGES, self.counts
        place = bisect_right(edges, first_ps) - 1
        if not rise_ps:
            counts[place] += steps * weight
            return
        done, last = 0, len(edges) - 1
        while done < steps:
            upto = steps
            if place < last:
                # Steps whose gap lies below the bin's upper edge.
                upto = min(steps, -((first_ps - edges[place + 1]) // rise_ps))
            if upto > done:
                counts[place] += (upto - done) * weight
                done = upto
            place += 1

    @property
    def total(self) -> int:
        return sum(self.counts)

    def quantile_ms(self, q: float) -> float:
        """The middle of the bin in which it lies; not a number without gaps."""
        counts = np.asarray(self.counts, dtype=np.int64)
        total = int(counts.sum())
        if not total:
            return float("nan")
        place = int(np.searchsorted(np.cumsum(counts), max(1, int(np.ceil(q * total)))))
        low = self.EDGES[place]
        high = self.EDGES[min(place + 1, len(self.EDGES) - 1)]
        return (low + high) / 2 / PS_PER_MS

    def share_up_to(self, ms: float) -> float:
        """Share of the gaps that are no longer."""
        counts = np.asarray(self.counts, dtype=np.int64)
        place = bisect_right(self.EDGES, round(ms * PS_PER_MS)) - 1
        total = int(counts.sum())
        return float(counts[: place + 1].sum() / total) if total else float("nan")


class LargestSince:
    """The largest gap of all steps from a given one on; amortised constant time a step."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._gaps: list[int] = []

    def add(self, step: int, gap_ps: int) -> None:
        """Steps come in ascending order."""
        steps, gaps = self._steps, self._gaps
        while gaps and gaps[-1] <= gap_ps:
            steps.pop()
            gaps.pop()
        steps.append(step)
        gaps.append(gap_ps)

    def since(self, step: int) -> int:
        """0 where no step came since."""
        place = bisect_left(self._steps, step)
        return self._gaps[place] if place < len(self._gaps) else 0
