"""A small reserve for all requests together, for what their estimates miss (CacheOPT).

Answers outgrow their bounds by a mean and a standard deviation that are observed. Of n answers the
sum of overruns is about n mean, give or take std sqrt(n), so that one reserve for all is far
smaller than one for each (arXiv 2503.13773 keeps 8 blocks).
"""

from __future__ import annotations

import math
from collections import deque

#: Overruns that the size rests on: enough for a standard deviation, few enough to follow a change.
_REMEMBERED = 256
#: Before so many were observed, the least is reserved.
_ENOUGH = 16


class GlobalReserve:
    """Sizes the reserve; the ledger's owner passes it to ``fits``.

    Args:
        pool_tokens: of the whole KV pool.
        z: standard deviations beyond the mean; 2 leaves out about one step in forty.
        most_share: of the pool, whatever was observed.
        least_tokens: while little was observed; CacheOPT's 8 blocks of 8.
    """

    def __init__(
        self,
        pool_tokens: int,
        z: float = 2.0,
        most_share: float = 0.05,
        least_tokens: int = 64,
    ) -> None:
        self._most = int(pool_tokens * most_share)
        self._z = z
        self._least = least_tokens
        self._overruns: deque[int] = deque()
        self._sum = self._squares = 0

    def observe(self, overrun_tokens: int) -> None:
        """An answer is complete; by so much it was longer than its bound, 0 or less for not."""
        newest, oldest = max(0, overrun_tokens), 0
        if len(self._overruns) == _REMEMBERED:
            oldest = self._overruns.popleft()
        self._overruns.append(newest)
        self._sum += newest - oldest
        self._squares += newest**2 - oldest**2

    def tokens(self, running: int) -> int:
        """To keep free beside ``running`` requests; 0 for none running."""
        if running <= 0:
            return 0
        if (seen := len(self._overruns)) < _ENOUGH:
            return min(self._most, self._least)
        mean = self._sum / seen
        variance = (self._squares * seen - self._sum**2) / seen**2
        return min(self._most, math.ceil(mean * running + self._z * math.sqrt(variance * running)))
