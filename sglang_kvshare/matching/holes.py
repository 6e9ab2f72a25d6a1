"""Which cells of the arena are free."""

from __future__ import annotations

from bisect import bisect_left, insort


class Holes:
    """Free stretches of ``[0, cells)``; stretches that touch are one.

    A request is served from the smallest stretch that holds it, or else from the largest ones, so
    that no token has to move for another one and what is stored lies in as few pieces as can be.
    """

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self.clear()

    def clear(self) -> None:
        """Everything is free."""
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        if self._cells:
            self._add(0, self._cells)

    def take(self, count: int) -> list[tuple[int, int]]:
        """``count`` cells as ``(start, length)`` pieces.

        Raises:
            ValueError: fewer are free.
        """
        pieces: list[tuple[int, int]] = []
        while count:
            if not self._by_size:
                for start, length in pieces:
                    self.give(start, length)
                raise ValueError(f"the run index is full: {count} more cells are needed")
            at = bisect_left(self._by_size, (count, -1))
            length, start = self._by_size[min(at, len(self._by_size) - 1)]
            self._drop(start, length)
            used = min(length, count)
            if used < length:
                self._add(start + used, length - used)
            pieces.append((start, used))
            count -= used
        return pieces

    def give(self, start: int, length: int) -> None:
        """Free a stretch that was taken."""
        before = self._start_before.get(start)
        if before is not None:
            self._drop(before, start - before)
            start, length = before, length + start - before
        after = self._length_at.get(start + length)
        if after is not None:
            self._drop(start + length, after)
            length += after
        self._add(start, length)

    def stretches(self) -> list[tuple[int, int]]:
        """``(start, length)`` of every free stretch, in order."""
        return sorted(self._length_at.items())

    def _add(self, start: int, length: int) -> None:
        insort(self._by_size, (length, start))
        self._length_at[start] = length
        self._start_before[start + length] = start

    def _drop(self, start: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, start))]
        del self._length_at[start], self._start_before[start + length]
