"""The decode stage of DHD: reused tokens that wait to be recomputed while the request decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.plan import Int64Array
from sglang_kvshare.recompute.selectors.registry import FloatArray

#: What is left over is not worth a row any more below this share of the first importance.
DONE_SHARE = 0.02
#: How much of what was known before counts beside a new look.
_MEMORY = 0.5


@dataclass(frozen=True)
class LeftOver:
    """Reused tokens of a chunk that were not recomputed.

    Attributes:
        positions: int64 ``[n]``, ascending.
        scores: float64 ``[n]``, of the selector; ``None`` where it measured nothing.
        deviations: float64 ``[n]``, how far each value is off; ``None`` where that is not known.
    """

    positions: Int64Array
    scores: FloatArray | None
    deviations: FloatArray | None


class RefreshQueue:
    """Positions of one request, the most important first (KVShare, arXiv 2503.16525).

    Args:
        positions: int64 ``[n]``, ascending: reused tokens that were not recomputed.
        importance: float64 ``[n]``; tokens of importance 0 are not queued.
        weights: float64 ``[n]``, how far each value is off: what attention is multiplied by to make
            an importance of it.
    """

    def __init__(self, positions: Int64Array, importance: FloatArray, weights: FloatArray) -> None:
        queued = importance > 0
        self.positions = positions[queued]
        self._importance = importance[queued].copy()
        self._weights = weights[queued].copy()
        self._end = DONE_SHARE * float(importance.sum())

    @classmethod
    def of(cls, parts: Sequence[LeftOver]) -> RefreshQueue:
        """The queue of a prompt that ran in several chunks. What was not measured counts as much as
        the median of what was, so that without any measurement the order is that of position."""
        return cls(
            np.concatenate([part.positions for part in parts]),
            _filled([(part.scores, len(part.positions)) for part in parts]),
            _filled([(part.deviations, len(part.positions)) for part in parts]),
        )

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    @property
    def done(self) -> bool:
        """Nothing is left that matters."""
        return len(self) == 0 or float(self._importance.sum()) <= self._end

    def take(self, count: int) -> Int64Array:
        """Remove the ``count`` most important positions, the earlier of two equal ones first.

        Returns:
            int64, ascending; nothing when the queue is done.
        """
        if self.done or count <= 0:
            return self.positions[:0]
        best = np.sort(np.argsort(-self._importance, kind="stable")[:count])
        taken = self.positions[best]
        kept = np.ones(len(self), dtype=np.bool_)
        kept[best] = False
        self.positions = self.positions[kept]
        self._importance, self._weights = self._importance[kept], self._weights[kept]
        return taken

    def look_again(self, attention: FloatArray) -> None:
        """Rank anew by the attention that a generated token pays to each queued position.

        Args:
            attention: float64 ``[len(self)]``, in order of ``positions``.
        """
        fresh = np.nan_to_num(np.maximum(attention, 0.0), nan=0.0) * self._weights
        total, before = float(fresh.sum()), float(self._importance.sum())
        # Below it a library may have the CPU take numbers for zero, and shares are none.
        if min(total, before) < np.finfo(np.float64).tiny:
            return
        # In shares, so that what is left over is worth as much as before.
        mixed = _MEMORY * self._importance / before + (1 - _MEMORY) * fresh / total
        self._importance = mixed * before


def _filled(parts: Sequence[tuple[FloatArray | None, int]]) -> FloatArray:
    known = np.concatenate([np.zeros(0), *(values for values, _ in parts if values is not None)])
    known = known[known > 0]
    middle = float(np.median(known)) if len(known) else 1.0
    return np.concatenate(
        [np.full(count, middle) if values is None else values for values, count in parts]
    )
