"""Prompts whose matches are known by construction.

Passages are random tokens below ``GLUE``. What stands between them is glue: donors and prompts use
different glue tokens, so that no run grows beyond a passage.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from reference import Match

GLUE = 900
DONOR_GLUE = range(900, 940)
PROMPT_GLUE = range(940, 1000)


@dataclass(frozen=True)
class Piece:
    """``donor[source : source + length]``, to be used as a passage of a prompt."""

    donor: tuple[int, ...]
    source: int
    length: int

    def tokens(self) -> list[int]:
        return list(self.donor[self.source : self.source + self.length])


@dataclass
class Book:
    """Makes passages, donors and prompts from one seed."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def passage(self, length: int) -> list[int]:
        return [self.rng.randrange(GLUE) for _ in range(length)]

    def donor(self, lengths: list[int], glue: int = 3) -> tuple[tuple[int, ...], list[Piece]]:
        """Passages of ``lengths`` with glue before, between and behind; and where each lies."""
        tokens = self._glue(DONOR_GLUE, glue)
        places = []
        for length in lengths:
            places.append((len(tokens), length))
            tokens += self.passage(length) + self._glue(DONOR_GLUE, glue)
        donor = tuple(tokens)
        return donor, [Piece(donor, source, length) for source, length in places]

    def prompt(
        self, pieces: list[Piece], glue: int = 2, question: int = 5
    ) -> tuple[list[int], list[Match]]:
        """The pieces in the order given, glue before and between, and a question at the end."""
        tokens: list[int] = []
        matches = []
        for piece in pieces:
            tokens += self._glue(PROMPT_GLUE, glue)
            matches.append(Match(len(tokens), piece.source, piece.length, piece.donor))
            tokens += piece.tokens()
        return tokens + self._glue(PROMPT_GLUE, question), matches

    def _glue(self, tokens: range, count: int) -> list[int]:
        return [self.rng.choice(tokens) for _ in range(count)]


def cached_part(matches: list[Match], page_size: int, min_run: int = 16) -> list[Match]:
    """What of the matches a cache in whole pages can serve."""
    found = []
    for match in matches:
        published = len(match.donor) // page_size * page_size
        length = min(match.length, published - match.source)
        if length >= min_run:
            found.append(Match(match.start, match.source, length, match.donor))
    return found
