"""How many rows a decode step may carry to refresh prompt tokens: what the slack allows, no more.

A step grants a share of its own time as credit; rows cost what they were measured to take. So the
mean time between tokens grows by that share at most. With a TBT SLO in the batch a step that would
come near it carries none.
"""

from __future__ import annotations

from collections import defaultdict

from sglang_kvshare.scheduling.forward_cost import Recent

#: A slowdown that means: whatever it takes.
NO_LIMIT = 1e9
#: Steps come no nearer to an SLO than this share of it.
_SLO_SHARE = 0.8
#: Credit does not pile up beyond so many steps, or a pause would be followed by a burst.
_MOST_STEPS = 32


class RefreshPace:
    """Owner of the credit for refresh rows of one server.

    Args:
        slowdown: the share of the decode time that refreshing may add; from :data:`NO_LIMIT` on
            only an SLO and the room in the batch bound it.
        most_rows: rows that a decode batch may have in all.
        by_time: whether times count. Ranks that must decide alike measure different ones: without,
            every row costs the same, and who was promised a TBT gets no rows beside it.
    """

    def __init__(self, slowdown: float, most_rows: int, *, by_time: bool = True) -> None:
        self._by_time = by_time
        self._slowdown = slowdown
        self._most_rows = most_rows
        self._plain: defaultdict[int, Recent] = defaultdict(Recent)
        self._row_ms = Recent()
        self._credit_ms = 0.0

    def observe(self, rows: int, refresh_rows: int, ms: float) -> None:
        """A decode step of ``rows`` requests took ``ms`` with ``refresh_rows`` more rows; a time
        that is not above 0 is ignored."""
        if not self._by_time:
            ms = float(rows + refresh_rows)
        if not ms > 0:
            return
        plain = self._plain[rows.bit_length()]
        if refresh_rows == 0:
            plain.add(ms / rows)
        elif plain.known:
            self._row_ms.add(max(0.0, ms - plain.median * rows) / refresh_rows)

    def allowance(self, rows: int, wanted: int, tbt_slo_ms: float | None = None) -> int:
        """Rows that this step may carry beside ``rows`` requests; they are paid for by asking.

        Args:
            wanted: as many as are queued.
            tbt_slo_ms: the tightest of the batch.
        """
        if not self._by_time and tbt_slo_ms is not None:
            return 0
        count = max(0, min(wanted, self._most_rows - rows))
        plain = self._plain[rows.bit_length()]
        if self._slowdown >= NO_LIMIT and tbt_slo_ms is None:
            return count
        if not plain.known or not count:
            return 0
        step_ms = plain.median * rows
        limit = self._slowdown * step_ms
        self._credit_ms = min(self._credit_ms + limit, _MOST_STEPS * limit)
        # Until a first one was measured, a row is taken to cost as much as a request's.
        row_ms = self._row_ms.median if len(self._row_ms) else plain.median
        if row_ms > 0:
            count = min(count, int(self._credit_ms / row_ms))
            if tbt_slo_ms is not None:
                count = min(count, int((_SLO_SHARE * tbt_slo_ms - step_ms) / row_ms))
        count = max(0, count)
        self._credit_ms -= count * row_ms
        return count
