"""Short runs beside and between runs of the same donor, which the run index cannot see.

    prompt   == run ==|x ~~~ y z|== run ==| v ~~~~ w ...
    donor    == run ==|u ~~~ t  |== run ==| ~~~~ s ...
                       aligned             aligned, for as long as most tokens are equal

An edit cuts a passage into runs, and what is shorter than ``min_run_tokens`` has no window of its
own in the run index. Where a longer run of the same passage was found, its donor is known, and what
lies between and beyond is aligned with it. A block of equal tokens counts where such blocks cover
most of the way to the run that it belongs to: fragments of another context cost quality.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.matching.alignment import Block, align
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.surroundings import Stretch
from sglang_kvshare.plan import Int64Array, Span

#: Tokens of the prompt that are aligned at once; of the donor half as many more. A gap between two
#: runs is aligned whole up to twice as many.
_STEP_TOKENS = 64


@dataclass(frozen=True)
class GapSettings:
    """What counts.

    Attributes:
        min_run_tokens: shorter blocks are not reused.
        min_coverage: share of the tokens from a run to the end of a block that must be in blocks.
        max_depth: tokens of a larger depth do not serve.
    """

    min_run_tokens: int = 4
    min_coverage: float = 0.5
    max_depth: int = 0


def fill_gaps(
    index: RunIndex,
    tokens: Int64Array,
    first: int,
    spans: Sequence[Span],
    settings: GapSettings,
    beside: Container[int] | None = None,
) -> list[Span]:
    """What the donors of ``spans`` hold of the tokens that these leave free. Changes nothing.

    Args:
        tokens: int64 ``[n]``, the whole prompt up to where it may be matched.
        first: position from which on it may be.
        spans: runs of it, in order and without overlap.
        beside: gaps are looked at where a span on either side begins at one of these positions;
            ``None``: all are.

    Returns:
        Semantic spans, in order, that overlap neither each other nor ``spans``. Their similarity
        is the share of equal tokens on the way to the run that they belong to.
    """
    told: list[Span] = []
    least = settings.min_run_tokens
    for number in range(len(spans) + 1):
        before = spans[number - 1] if number else None
        behind = spans[number] if number < len(spans) else None
        low = first if before is None else before.end
        high = tokens.shape[0] if behind is None else behind.start
        if high - low < least:
            continue
        sides = [span.start for span in (before, behind) if span is not None]
        if beside is not None and not any(start in beside for start in sides):
            continue
        if before is not None and behind is not None:
            between = _between(index, before, behind)
            if between is not None:
                told += _filled(tokens, low, high, between, settings)
                continue
        if before is not None:
            onwards = _onwards(index, tokens, before, high, settings)
            told += onwards
            low = onwards[-1].end if onwards else low
        if behind is not None and high - low >= least:
            told += reversed(_backwards(index, tokens, behind, low, settings))
    return told


def _between(index: RunIndex, before: Span, behind: Span) -> Stretch | None:
    """The donor's tokens between two runs, if both are on one path and not far apart."""
    most = 2 * _STEP_TOKENS
    missing = behind.source - before.source - before.length
    if not 0 <= missing <= most or behind.start - before.end > most:
        return None
    found = index.around(int(behind.slots[0]), missing + 1, 0)
    if found.slots.shape[0] != missing + 2 or int(found.slots[0]) != int(before.slots[-1]):
        return None
    return found.part(1, missing + 1)


def _filled(
    tokens: Int64Array, low: int, high: int, donor: Stretch, settings: GapSettings
) -> Iterable[Span]:
    """Runs stand on both sides, so that a gap up to twice a step needs no more than they give."""
    if donor.depth > settings.max_depth or donor.slots.shape[0] < settings.min_run_tokens:
        return []
    blocks = align(tokens[low:high], donor.tokens, settings.min_run_tokens).blocks
    matched = sum(block.length for block in blocks)
    around = 2 * min(_STEP_TOKENS // 2, high - low)
    share = (matched + around) / (high - low + around)
    if share < settings.min_coverage:
        return []
    return [_span(block, low, donor, share) for block in blocks]


def _onwards(
    index: RunIndex, tokens: Int64Array, run: Span, high: int, settings: GapSettings
) -> list[Span]:
    """Behind ``run``, up to ``high``."""
    told: list[Span] = []
    low, slot = run.end, int(run.slots[-1])
    while high - low >= settings.min_run_tokens:
        part = tokens[low : min(high, low + _STEP_TOKENS)]
        donor = index.around(slot, 0, _STEP_TOKENS + _STEP_TOKENS // 2).part(1, None)
        found = _chained(part, donor, settings)
        if not found:
            break
        told += [_span(block, low, donor, share) for block, share in found]
        low, slot = told[-1].end, int(told[-1].slots[-1])
    return told


def _backwards(
    index: RunIndex, tokens: Int64Array, run: Span, low: int, settings: GapSettings
) -> list[Span]:
    """Before ``run``, down to ``low``; the nearest first."""
    told: list[Span] = []
    high, slot = run.start, int(run.slots[0])
    while high - low >= settings.min_run_tokens:
        begin = max(low, high - _STEP_TOKENS)
        part = tokens[begin:high]
        donor = index.around(slot, _STEP_TOKENS + _STEP_TOKENS // 2, 0).part(0, -1)
        mirrored = donor._replace(tokens=donor.tokens[::-1])
        found = _chained(part[::-1], mirrored, settings)
        if not found:
            break
        size, its = part.shape[0], donor.tokens.shape[0]
        told += [
            _span(
                Block(size - block.end, its - block.source - block.length, block.length),
                begin,
                donor,
                share,
            )
            for block, share in found
        ]
        high, slot = told[-1].start, int(told[-1].slots[0])
    return told


def _chained(part: Int64Array, donor: Stretch, settings: GapSettings) -> list[tuple[Block, float]]:
    """Blocks from the beginning on, each with the share of equal tokens up to its end."""
    if donor.depth > settings.max_depth or donor.slots.shape[0] < settings.min_run_tokens:
        return []
    told: list[tuple[Block, float]] = []
    matched = 0
    for block in align(part, donor.tokens, settings.min_run_tokens).blocks:
        matched += block.length
        share = matched / max(block.end, block.source + block.length)
        if share < settings.min_coverage:
            break
        told.append((block, share))
    return told


def _span(block: Block, begin: int, donor: Stretch, similarity: float) -> Span:
    return Span(
        start=begin + block.start,
        source=donor.position + block.source,
        slots=donor.slots[block.source : block.source + block.length].astype(np.int64),
        kind="semantic",
        depth=donor.depth,
        similarity=similarity,
    )
