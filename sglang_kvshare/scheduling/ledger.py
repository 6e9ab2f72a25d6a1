"""What running requests will hold of the KV pool, step by step, until they end (CacheOPT).

    tokens                                    Each holds what it has and one more a decode step,
      ^            /|                         until the step at which it is expected to have ended
      |  host    /  |                         (with confidence: `left` is a padded bound). Then it
      |        /    |                         gives everything back. What all hold together rises
      |      /      |                         from end to end and falls only at ends, so its peak
      |    /    /|  |                         is at one of them, and n sums tell it.
      |  /guest/ |  |
      +--------------> decode steps           A guest that ends before its host has grown into
                                              the tail that it lives in raises no peak.

A request fits if the peak of all, itself included, stays within the pool. That is CacheOPT's
hosting in reserved but unused tails (arXiv 2503.13773; EconoServe nests it) taken to its end: a
guest may have guests, in any number and depth, and in the tails of several hosts at once, for no
slot is set aside for anyone: only sums have to be right.

A request that outlives its reservation is taken to go on through the look-ahead: the ledger never
counts on tokens that are not given back yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_Int64 = npt.NDArray[np.int64]


class DemandLedger:
    """Reservations of all running requests. Time is counted in decode steps.

    One scheduler owns it. Opening, closing and asking cost O(running), a step O(1).

    Args:
        page_tokens: the allocator gives out whole pages; every request is counted with one page
            less a token more than it fills.
        lookahead_steps: reservations are due for renewal so many steps before they end.

    Raises:
        ValueError: a page below 1 or a look-ahead below 0.
    """

    def __init__(self, page_tokens: int = 1, lookahead_steps: int = 2) -> None:
        if page_tokens < 1 or lookahead_steps < 0:
            raise ValueError(
                f"page_tokens={page_tokens}, lookahead_steps={lookahead_steps}: the least are 1, 0"
            )
        self._page = page_tokens
        self._lookahead = lookahead_steps
        self._now = 0
        self._rids: list[str] = []
        self._place: dict[str, int] = {}
        # At step s the request at a place holds base + s tokens, up to its end.
        self._base: _Int64 = np.zeros(64, dtype=np.int64)
        self._end: _Int64 = np.zeros(64, dtype=np.int64)
        self._peaks: tuple[_Int64, _Int64, _Int64] | None = None

    # --- what happens ------------------------------------------------------------------------

    def open(self, rid: str, private_tokens: int, left_tokens: int) -> None:
        """It was admitted.

        Args:
            private_tokens: what it holds for itself from now on, its prefill included.
            left_tokens: upper bound of the tokens to come.

        Raises:
            ValueError: it is open already, or a length is below 0.
        """
        if rid in self._place:
            raise ValueError(f"request {rid!r} is open already")
        _not_negative(private_tokens=private_tokens, left_tokens=left_tokens)
        place = len(self._rids)
        if place == len(self._base):
            self._base, self._end = (np.r_[a, np.zeros_like(a)] for a in (self._base, self._end))
        self._rids.append(rid)
        self._place[rid] = place
        self._set(place, private_tokens, left_tokens)

    def step(self, count: int = 1) -> None:
        """So many decode steps went by: everybody holds so many tokens more.

        Raises:
            ValueError: a count below 0.
        """
        _not_negative(count=count)
        self._now += count
        self._peaks = None

    def sync(self, rid: str, private_tokens: int) -> None:
        """What it really holds, where that is not what was expected.

        Raises:
            KeyError: it is not open.
            ValueError: below 0.
        """
        _not_negative(private_tokens=private_tokens)
        self._base[self._place[rid]] = private_tokens - self._now
        self._peaks = None

    def renew(self, rid: str, left_tokens: int) -> None:
        """A new bound on the tokens to come, counted from now.

        Raises:
            KeyError: it is not open.
            ValueError: below 0.
        """
        _not_negative(left_tokens=left_tokens)
        self._end[self._place[rid]] = self._now + left_tokens
        self._peaks = None

    def close(self, rid: str) -> None:
        """It finished, was preempted or aborted, and gives back what it holds.

        Raises:
            KeyError: it is not open.
        """
        place = self._place.pop(rid)
        last = self._rids.pop()
        if last != rid:
            # The last one moves into the gap.
            self._rids[place], self._place[last] = last, place
            self._base[place] = self._base[len(self._rids)]
            self._end[place] = self._end[len(self._rids)]
        self._peaks = None

    # --- what is asked -----------------------------------------------------------------------

    def due(self) -> list[str]:
        """Those whose reservation ends within the look-ahead or has ended; in the same order
        wherever the same was told."""
        ends = self._end[: len(self._rids)] - self._now <= self._lookahead
        return [self._rids[place] for place in np.flatnonzero(ends)]

    def fits(
        self, extend_tokens: int, left_tokens: int, available_tokens: int, reserve_tokens: int = 0
    ) -> bool:
        """Whether one more may be admitted without ever needing more than there is.

        With nothing open a request has only to begin: it can harm nobody, and would wait for ever.

        Args:
            extend_tokens: what admitting it takes from what is available: new slots, and those of
                its cached prefix that are evictable now and will not be.
            left_tokens: upper bound of its tokens to come.
            available_tokens: free and evictable now.
            reserve_tokens: to leave alone, see ``reserve.py``.
        """
        if not self._rids:
            return extend_tokens <= available_tokens
        limit = available_tokens + self.held_tokens - reserve_tokens
        return self._peak_with(extend_tokens, left_tokens) <= limit

    def short_tokens(self, steps: int, available_tokens: int) -> int:
        """Tokens that are missing for so many further decode steps, 0 for none.

        Nobody is counted on to end before its time is up; pages are counted exactly.
        """
        now = self._held()
        later = _paged(self._base[: len(now)] + self._now + steps, self._page)
        return max(0, int((later - now).sum()) - available_tokens)

    def __len__(self) -> int:
        return len(self._rids)

    def __contains__(self, rid: str) -> bool:
        return rid in self._place

    @property
    def held_tokens(self) -> int:
        """In pages that are in use now."""
        return int(self._held().sum())

    @property
    def reserved_tokens(self) -> int:
        """What plain reservations would set aside: everybody's most, all at once."""
        ends = self._ends()
        return int((self._base[: len(ends)] + ends + self._page - 1).sum())

    @property
    def peak_tokens(self) -> int:
        """The most that all will hold together at any step to come."""
        _, _, peaks = self._demand()
        return int(peaks.max(initial=0))

    @property
    def hosted_tokens(self) -> int:
        """Granted beyond what plain reservations would allow: tails that two or more live in."""
        return self.reserved_tokens - self.peak_tokens

    # --- details -----------------------------------------------------------------------------

    def _set(self, place: int, private_tokens: int, left_tokens: int) -> None:
        self._base[place] = private_tokens - self._now
        self._end[place] = self._now + left_tokens
        self._peaks = None

    def _held(self) -> _Int64:
        return _paged(self._base[: len(self._rids)] + self._now, self._page)

    def _ends(self) -> _Int64:
        """Of one that outlived its reservation, the end of the look-ahead."""
        ends = self._end[: len(self._rids)]
        return np.where(ends < self._now, self._now + self._lookahead, ends)

    def _demand(self) -> tuple[_Int64, _Int64, _Int64]:
        """Ends, the latest first; how many run up to each; and what these hold then."""
        if self._peaks is None:
            ends = self._ends()
            latest_first = np.argsort(-ends, kind="stable")
            ends = ends[latest_first]
            running = np.arange(1, len(ends) + 1, dtype=np.int64)
            bases = np.cumsum(self._base[latest_first])
            self._peaks = ends, running, bases + running * (ends + self._page - 1)
        return self._peaks

    def _peak_with(self, extend_tokens: int, left_tokens: int) -> int:
        """The peak if one more is admitted, which holds ``extend_tokens`` now."""
        ends, running, peaks = self._demand()
        base = extend_tokens - self._now + self._page - 1
        end = self._now + left_tokens
        # Those that end no later find it beside them; it finds those that end no earlier.
        beside = ends <= end
        most = int(np.where(beside, peaks + base + ends, peaks).max(initial=0))
        later = int(np.searchsorted(-ends, -end, side="right"))
        own = base + end
        if later:
            at_last = ends[later - 1]
            own += int(peaks[later - 1] - running[later - 1] * (at_last - end))
        return max(most, own)


def _paged(tokens: _Int64, page: int) -> _Int64:
    return tokens if page == 1 else -(-tokens // page) * page


def _not_negative(**lengths: Any) -> None:
    for name, length in lengths.items():
        if length < 0:
            raise ValueError(f"{name}={length}: the least is 0")
