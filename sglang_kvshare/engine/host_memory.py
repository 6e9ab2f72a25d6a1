"""Host memory for the keys and values of requests that were swapped out.

    segment      plane of layer 0's keys     |..........|  one row of bytes a token
                 plane of layer 0's values   |..........|
                 ...                               ^ extent: the same tokens of every plane

A request takes as few extents as there is room for, since each costs an operation a plane, but any
free tokens will do: what fits the pool's accounting always finds room. Segments are allocated when
their first token is written, and stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

#: Bounds of a segment. A larger one makes larger extents, and pins more memory at once.
_LEAST_BYTES, _MOST_BYTES = 64 << 20, 1 << 30
#: Segments that a pool is divided into, within these bounds.
_SEGMENTS = 16


@dataclass(frozen=True)
class Extent:
    """Tokens ``[start, stop)`` of one segment."""

    segment: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class HostMemory:
    """Takes and gives back extents on the scheduler's thread; planes may be used on any.

    Args:
        row_bytes: of one token in each plane.
        capacity_tokens: as much as will be taken at once.
        pinned: locked into memory, so that a device copies to and from it on its own.
    """

    def __init__(self, row_bytes: Sequence[int], capacity_tokens: int, *, pinned: bool) -> None:
        self._row_bytes = list(row_bytes)
        self._pinned = pinned
        self.bytes_per_token = sum(row_bytes)
        wanted = min(
            max(capacity_tokens * self.bytes_per_token // _SEGMENTS, _LEAST_BYTES), _MOST_BYTES
        )
        size = max(1, min(capacity_tokens, wanted // self.bytes_per_token))
        starts = range(0, capacity_tokens, size)
        self._sizes = [min(size, capacity_tokens - start) for start in starts]
        self._segments: list[list[torch.Tensor] | None] = [None] * len(self._sizes)
        #: Free extents of each segment, in order, no two of them side by side.
        self._free = [[Extent(number, 0, size)] for number, size in enumerate(self._sizes)]

    @property
    def free_tokens(self) -> int:
        return sum(extent.tokens for extent in self._all_free())

    @property
    def allocated_bytes(self) -> int:
        return sum(
            size * self.bytes_per_token
            for size, planes in zip(self._sizes, self._segments, strict=True)
            if planes is not None
        )

    def take(self, tokens: int) -> list[Extent]:
        """Room for ``tokens``: the smallest extent that holds them all, or the largest ones.

        Raises:
            MemoryError: so many are not free; nothing is taken.
        """
        if tokens > self.free_tokens:
            raise MemoryError(
                f"{tokens} tokens of host memory, of which {self.free_tokens} are free"
            )
        taken = []
        while tokens:
            free = list(self._all_free())
            fitting = [extent for extent in free if extent.tokens >= tokens]
            if fitting:
                chosen = min(fitting, key=lambda extent: extent.tokens)
            else:
                chosen = max(free, key=lambda extent: extent.tokens)
            part = Extent(chosen.segment, chosen.start, min(chosen.stop, chosen.start + tokens))
            rest = Extent(chosen.segment, part.stop, chosen.stop)
            own = self._free[chosen.segment]
            at = own.index(chosen)
            own[at : at + 1] = [rest] if rest.tokens else []
            taken.append(part)
            tokens -= part.tokens
        return taken

    def give(self, extents: Sequence[Extent]) -> None:
        """What :meth:`take` gave, once."""
        for extent in extents:
            own = sorted([*self._free[extent.segment], extent], key=lambda one: one.start)
            joined: list[Extent] = []
            for one in own:
                if joined and joined[-1].stop > one.start:
                    raise ValueError(f"{one} is free already")
                if joined and joined[-1].stop == one.start:
                    one = Extent(one.segment, joined.pop().start, one.stop)
                joined.append(one)
            self._free[extent.segment] = joined

    def planes(self, extent: Extent) -> list[torch.Tensor]:
        """uint8 ``[tokens, row bytes]`` of each plane, in the order of ``row_bytes``."""
        planes = self._segments[extent.segment]
        if planes is None:
            planes = self._segments[extent.segment] = self._allocate(self._sizes[extent.segment])
        return [plane[extent.start : extent.stop] for plane in planes]

    def zero(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            for plane in self.planes(extent):
                plane.zero_()

    def _allocate(self, tokens: int) -> list[torch.Tensor]:
        whole = torch.empty(
            tokens * self.bytes_per_token, dtype=torch.uint8, pin_memory=self._pinned
        )
        parts = whole.split([tokens * row for row in self._row_bytes])
        return [part.view(tokens, row) for part, row in zip(parts, self._row_bytes, strict=True)]

    def _all_free(self) -> Iterator[Extent]:
        for extents in self._free:
            yield from extents
