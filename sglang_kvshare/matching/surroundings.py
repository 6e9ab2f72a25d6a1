"""What stands around a cached token on its path.

path     ... parent extent ---|--- extent of the token ---|  (children begin here)
                |<- before ---------- slot ----- after ->|
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_kvshare.matching.arena import Arena
from sglang_kvshare.plan import Int64Array


@dataclass(frozen=True)
class Stretch:
    """Cached tokens that follow each other.

    Attributes:
        tokens, slots: int64 ``[m]``.
        position: of the first in its own sequence.
        depth: the largest provenance depth among them.
    """

    tokens: Int64Array = field(compare=False, repr=False)
    slots: Int64Array = field(compare=False, repr=False)
    position: int
    depth: int

    def part(self, begin: int, end: int | None) -> Stretch:
        """Of its tokens ``[begin, end)``, as a slice says; ``begin`` is 0 or above."""
        cut = slice(begin, end)
        return Stretch(self.tokens[cut], self.slots[cut], self.position + begin, self.depth)


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
    pieces = [
        (extent, max(start, start + offset - before), min(length, offset + 1 + after) + start)
    ]
    missing = before - offset
    parent = int(ext.parent[extent])
    if missing > 0 and parent >= 0:
        pieces += arena.upwards(parent, missing)
    pieces.reverse()
    first, low, _ = pieces[0]
    return Stretch(
        tokens=np.concatenate([arena.token[a:b] for _, a, b in pieces]).astype(np.int64),
        slots=np.concatenate([arena.slot[a:b] for _, a, b in pieces]).astype(np.int64),
        position=int(ext.position[first]) + low - int(ext.start[first]),
        depth=max(int(ext.depth[piece]) for piece, _, _ in pieces),
    )
