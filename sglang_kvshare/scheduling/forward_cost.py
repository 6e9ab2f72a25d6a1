"""What a forward takes, fitted to what forwards on this machine were measured to take.

    ms = floor + row * rows + pair * pairs                      every row runs
         + extra + extra_pair * pairs                           narrowed: some rows run
         + what the last forwards of about as many rows took beyond that

No coefficient is negative. Rows alone do not tell the time: 700 rows of a 1,000-token prompt attend
to less than 700 rows of a 2,500-token one. And no line tells it for few rows, which cost hardly
less than some more (the weights are read all the same); that is what the last term is for.

Measurements are kept by kind and by powers of two of rows and pairs. The fit is to the medians of
these: a single hiccup of a shared machine moves none. Squared errors are weighted by the inverse
of the time, between long forwards, which show the slopes, and short ones, which would be lost.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import nnls

#: Measurements kept of each kind and size: enough for a median, few enough to follow a change.
_RECENT = 16
#: Measurements of a kind and size before they count.
ENOUGH = 4
#: How far it is believed, against one measured size, that no rows take no time and that narrowing
#: costs nothing. It decides only what the measurements leave open.
_PRIOR = 0.05
#: The terms that this is said of: floor, extra, extra_pair.
_PRESUMED_ABSENT = [0, 3, 4]
#: Larger numbers are no load but an error.
_MOST = 1 << 60


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
    def known(self) -> bool:
        return len(self) >= ENOUGH

    @property
    def median(self) -> float:
        return median(self._values)


@dataclass(frozen=True)
class Load:
    """What runs in a forward.

    Attributes:
        rows: tokens that run.
        pairs: sum over the rows of the tokens in the row's context. Causal kernels skip up to half
            of them, always about the same share.
    """

    rows: int
    pairs: int

    @classmethod
    def of(cls, rows: int, context_tokens: int) -> Load:
        """``rows`` of one request whose context, these rows included, is ``context_tokens``."""
        return cls(rows, rows * context_tokens)


def total(loads: Iterable[Load]) -> Load:
    """Of several requests in one forward."""
    rows = pairs = 0
    for load in loads:
        rows, pairs = rows + load.rows, pairs + load.pairs
    return Load(rows, pairs)


class _Size:
    """Forwards of one kind and about one size."""

    def __init__(self) -> None:
        self.rows, self.pairs, self.ms = Recent(), Recent(), Recent()

    def add(self, load: Load, ms: float) -> None:
        self.rows.add(load.rows)
        self.pairs.add(load.pairs)
        self.ms.add(ms)
        self.medians = Load(round(self.rows.median), round(self.pairs.median)), self.ms.median


@dataclass(frozen=True)
class _Fit:
    """``rest`` holds, for forwards that are narrowed or not, rows (ascending) and milliseconds."""

    coefficients: tuple[float, ...]
    rest: dict[bool, tuple[list[float], list[float]]]

    def formula_ms(self, narrowed: bool, load: Load) -> float:
        return float(sum(map(operator.mul, self.coefficients, _terms(narrowed, load))))


class ForwardCost:
    """Learns the time of forwards, and tells it for others."""

    def __init__(self) -> None:
        self._sizes: defaultdict[tuple[bool, int, int], _Size] = defaultdict(_Size)
        self._last: defaultdict[tuple[bool, int], deque[tuple[Load, float]]] = defaultdict(
            lambda: deque(maxlen=_RECENT)
        )
        self._fit: _Fit | None = None

    def observe(self, load: Load, ms: float, *, narrowed: bool) -> None:
        """Note a forward; a time that is not above 0 (a clock that went back) is ignored."""
        if not (0 < load.rows <= load.pairs < _MOST) or not 0 < ms < math.inf:
            return
        key = narrowed, load.rows.bit_length(), load.pairs.bit_length()
        self._sizes[key].add(load, ms)
        self._last[key[:2]].append((load, ms))
        self._fit = None

    @property
    def known(self) -> bool:
        """Full forwards of two sizes at least have been measured well enough to compare them."""
        return len({key[1] for key, _ in self._known() if not key[0]}) >= 2

    @property
    def sizes(self) -> int:
        """Sizes that measurements are kept of."""
        return len(self._sizes)

    def ms(self, load: Load, *, narrowed: bool) -> float:
        """Predicted time, not below 0. Call it only when ``known``.

        Of a narrowed forward smaller than all that were measured nothing is held against it but
        the formula, so that it is carried out, and its time is known from then on.
        """
        if self._fit is None:
            self._fit = self._fitted()
        told = self._fit.formula_ms(narrowed, load)
        rows, rest = self._fit.rest[narrowed]
        if rows:
            beyond = float(np.interp(load.rows, rows, rest))
            smaller = load.rows.bit_length() < int(rows[0]).bit_length()
            told += min(0.0, beyond) if narrowed and smaller else beyond
        return max(0.0, told)

    def _known(self) -> Iterator[tuple[tuple[bool, int, int], _Size]]:
        return ((key, size) for key, size in self._sizes.items() if size.ms.known)

    def _fitted(self) -> _Fit:
        known = [(key[0], *size.medians) for key, size in sorted(self._known())]
        table = np.array([_terms(narrowed, load) for narrowed, load, _ in known])
        ms = np.array([each[2] for each in known])
        weight = ms**-0.5
        prior = np.diag(_PRIOR * table.max(axis=0) * weight.min())[_PRESUMED_ABSENT]
        weighted = np.vstack([table * weight[:, None], prior])
        coefficients, _ = nnls(weighted, np.r_[ms * weight, np.zeros(len(prior))])
        fit = _Fit(tuple(coefficients.tolist()), {False: ([], []), True: ([], [])})
        for (narrowed, _), last in sorted(self._last.items()):
            if len(last) >= ENOUGH:
                rows, beyond = fit.rest[narrowed]
                rows.append(median(load.rows for load, _ in last))
                beyond.append(median(ms - fit.formula_ms(narrowed, load) for load, ms in last))
        return fit


def _terms(narrowed: bool, load: Load) -> tuple[float, ...]:
    return 1.0, load.rows, load.pairs, narrowed, load.pairs if narrowed else 0.0
