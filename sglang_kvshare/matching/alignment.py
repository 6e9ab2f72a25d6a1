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

from rapidfuzz.distance import Levenshtein

from sglang_kvshare.plan import Int64Array


@dataclass(frozen=True)
class Block:
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
        blocks: maximal, in order, none of them empty.
        edits: tokens inserted, deleted or replaced (Levenshtein's distance).
    """

    blocks: tuple[Block, ...]
    edits: int

    @property
    def matched_tokens(self) -> int:
        return sum(block.length for block in self.blocks)

    def long_enough(self, shortest: int) -> tuple[Block, ...]:
        """The blocks of at least ``shortest`` tokens."""
        return tuple(block for block in self.blocks if block.length >= shortest)


def align(prompt: Int64Array, donor: Int64Array) -> Alignment:
    """Align two stretches of tokens.

    Time grows with the product of their lengths over 64 (bit-parallel), so both are to be short: a
    window and what stands around it.

    Args:
        prompt, donor: int64 ``[n]`` and ``[m]``.
    """
    steps = Levenshtein.opcodes(prompt.tolist(), donor.tolist())
    blocks, edits = [], 0
    for step in steps:
        if step.tag == "equal":
            blocks.append(Block(step.src_start, step.dest_start, step.src_end - step.src_start))
        else:
            edits += max(step.src_end - step.src_start, step.dest_end - step.dest_start)
    return Alignment(tuple(blocks), edits)
