"""What stands around a cached token on its path.

path     ... parent extent ---|--- extent of the token ---|  (children begin here)
                |<- before ---------- slot ----- after ->|
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_kvshare.matching.arena import Arena
from sglang_kvshare.plan import Int32Array


class Stretch(NamedTuple):
    """Cached tokens that follow each other.

    Attributes:
        tokens, slots: int32 ``[m]``; they may be views of the index, good until it changes.
        position: of the first in its own sequence.
        depth: the largest provenance depth among them.
    """

    tokens: Int32Array
    slots: Int32Array
    position: int
    depth: int

    def part(self, begin: int, end: int | None) -> Stretch:
        """Of its tokens ``[begin, end)``, as a slice says; ``begin`` is 0 or above."""
        return Stretch(
            self.tokens[begin:end], self.slots[begin:end], self.position + begin, self.depth
        )


def around(arena: Arena, slot: int, before: int, after: int) -> Stretch:
    """The token in ``slot`` with up to ``before`` tokens before it and ``after`` behind it.

    Those behind end with the extent, since its children differ. Time grows with the length of the
    extent.

    Raises:
        KeyError: ``slot`` is not in the index.
    """
    extent = int(arena.extent_of[slot])
    if extent < 0:
        raise KeyError(slot)
    ext = arena.extents
    start, length = int(ext.start[extent]), int(ext.length[extent])
    offset = int((arena.slot[start : start + length] == slot).argmax())
    low, high = start + max(0, offset - before), start + min(length, offset + 1 + after)
    parent = int(ext.parent[extent])
    if before <= offset or parent < 0:
        position = int(ext.position[extent]) + low - start
        return Stretch(
            arena.token[low:high], arena.slot[low:high], position, int(ext.depth[extent])
        )
    pieces = [(extent, low, high), *arena.upwards(parent, before - offset)]
    pieces.reverse()
    first, low, _ = pieces[0]
    return Stretch(
        tokens=np.concatenate([arena.token[a:b] for _, a, b in pieces]),
        slots=np.concatenate([arena.slot[a:b] for _, a, b in pieces]),
        position=int(ext.position[first]) + low - int(ext.start[first]),
        depth=max(int(ext.depth[piece]) for piece, _, _ in pieces),
    )
