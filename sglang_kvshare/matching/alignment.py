"""Which tokens of a prompt's stretch stand in a donor's too, in the same order.

    prompt   the | second | of June was cold  | and
    donor    the | third  | of June was cold  | , wet and
              =    edit     = = block = = = =   edit

Tokens in blocks are unchanged and can be reused; inserted and replaced ones are new. A block that
is long enough counts only where the alignment covers most of the stretch: fragments out of another
context cost quality (docs/decisions/0012).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein

from sglang_kvshare.plan import IntArray


class Block(NamedTuple):
    """Prompt tokens ``[start, start + length)`` equal the donor's from ``source`` on."""

    start: int
    source: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Alignment:
    """One of the alignments of fewest edits.

    Attributes:
        blocks: maximal, in order, none of them empty or shorter than was asked for.
        edits: tokens inserted, deleted or replaced (Levenshtein's distance).
    """

    blocks: tuple[Block, ...]
    edits: int


def align(prompt: IntArray, donor: IntArray, shortest: int = 1) -> Alignment:
    """Align two stretches of tokens.

    Time grows with the product of their lengths over 64 (bit-parallel), so both are to be short: a
    window and what stands around it.

    Args:
        prompt, donor: int ``[n]`` and ``[m]``.
        shortest: blocks of fewer tokens are left out.
    """
    steps = Levenshtein.editops(prompt.tolist(), donor.tolist())
    # The last of them is empty and stands at the end.
    blocks = tuple(Block(*block) for block in steps.as_matching_blocks() if block.size >= shortest)
    return Alignment(blocks, len(steps))
