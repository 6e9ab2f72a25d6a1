"""Spans and reuse plans: the types that matching, recomputing and the engine speak in.

    prompt    |-- prefix --|-- new --|==== span ====|-- new --|== span ==|- new -|
    position  0            P         start        end                            n
                                       ^ each span position is served by one donor slot

A plan is a pure function of the prompt's tokens and of the index; it holds no reference to the
cache, so that it stays valid as a value when its donors do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = Int32Array | Int64Array
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """A run of prompt positions ``[start, start + length)`` matched to cached tokens.

    Attributes:
        start: first prompt position of the run.
        source: position of the first donor token in the donor's own sequence.
        slots: int64 ``[length]``, KV slot of each donor token, in order.
        kind: ``exact_run`` (found by the run index) or ``semantic`` (inside similar windows); the
            tokens are equal in both.
        depth: approximations that rest on each other in the donor's values; 0 for exact ones.
        similarity: of the windows around a semantic span, a cosine; 1 for an exact run.
        continues: the span before it came from the same place of the same donor, and only a short
            edit lies between: what stands before it is nearly what stood before its donor.
    """

    start: int
    source: int
    slots: Int64Array
    kind: str = "exact_run"
    depth: int = 0
    similarity: float = 1.0
    continues: bool = False

    @property
    def length(self) -> int:
        return len(self.slots)

    @property
    def end(self) -> int:
        return self.start + len(self.slots)

    def part(self, begin: int, end: int, start: int) -> Span:
        """Its tokens ``[begin, end)``; the first is at position ``start`` of the prompt."""
        return Span(
            start,
            self.source + begin,
            self.slots[begin:end],
            self.kind,
            self.depth,
            self.similarity,
        )

    def continuing(self) -> Span:
        """The same, marked as continuing the span before it."""
        return Span(
            self.start, self.source, self.slots, self.kind, self.depth, self.similarity, True
        )


@dataclass(frozen=True)
class ReusePlan:
    """What the cache offers to one prompt.

    Attributes:
        prompt_tokens: length ``n`` of the prompt.
        prefix_tokens: length ``P`` of the prefix that the radix tree serves.
        spans: in order of position, without overlap, all within ``[P, n - scored_tokens)``.
        scored_tokens: rows at the end whose logits are asked for, at least the last one. They are
            always computed; more than one only for log-probabilities of prompt tokens.
        edge_tokens: matched tokens that reuse edges knew, for which nothing was looked up.
    """

    prompt_tokens: int
    prefix_tokens: int
    spans: tuple[Span, ...] = ()
    scored_tokens: int = 1
    edge_tokens: int = 0

    def __post_init__(self) -> None:
        edge = self.prefix_tokens
        for span in self.spans:
            if span.start < edge or span.length == 0:
                raise ValueError(f"span at {span.start} overlaps what ends at {edge}, or is empty")
            edge = span.end
        if self.spans and edge > self.scored_from:
            raise ValueError(f"a span ends at {edge}; logits are wanted from {self.scored_from}")

    @property
    def scored_from(self) -> int:
        """First position whose logits are asked for."""
        return self.prompt_tokens - self.scored_tokens

    @property
    def matched_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def depth(self) -> int:
        """The largest depth of a span's donor; 0 when there is none."""
        return max((span.depth for span in self.spans), default=0)

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.prefix_tokens - self.matched_tokens

    def after(self, position: int) -> ReusePlan:
        """What is left of the plan when the prompt is computed up to ``position``."""
        spans = []
        for span in self.spans:
            done = max(0, position - span.start)
            if done < span.length:
                slots = span.slots[done:]
                spans.append(
                    replace(span, start=span.start + done, source=span.source + done, slots=slots)
                )
        start = max(position, self.prefix_tokens)
        return replace(self, prefix_tokens=start, spans=tuple(spans))

    def positions(self) -> Int64Array:
        """int64 ``[matched_tokens]``: the matched prompt positions, ascending."""
        return _concat([np.arange(span.start, span.end, dtype=np.int64) for span in self.spans])

    def sources(self) -> Int64Array:
        """int64 ``[matched_tokens]``: the position each donor token had in its own sequence."""
        return _concat(
            [
                np.arange(span.source, span.source + span.length, dtype=np.int64)
                for span in self.spans
            ]
        )

    def slots(self) -> Int64Array:
        """int64 ``[matched_tokens]``: the KV slot of each donor token."""
        return _concat([span.slots for span in self.spans])


def _concat(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Placement:
    """A plan after selection: which donor values are placed and which rows run.

    Arrays are aligned with each other; ``n`` is the number of spared (not recomputed) tokens.

    Attributes:
        positions: int64 ``[n]``, ascending prompt positions whose rows are spared.
        sources: int64 ``[n]``, donor positions (keys are rotated from there).
        slots: int64 ``[n]``, donor slots.
        recomputed_tokens: matched tokens that are computed all the same.
    """

    positions: Int64Array
    sources: Int64Array
    slots: Int64Array
    recomputed_tokens: int

    @property
    def reused_tokens(self) -> int:
        return int(self.positions.shape[0])

    @property
    def exact_until(self) -> int | None:
        """First position whose KV is not exact; ``None`` when nothing is spared.

        A row before it attends to computed rows alone. Every row from it on attends to placed
        values, and so rests on an approximation.
        """
        return int(self.positions[0]) if self.reused_tokens else None

    def indices(self, start: int, end: int) -> slice:
        """Of the tokens in ``[start, end)``."""
        low, high = np.searchsorted(self.positions, (start, end))
        return slice(int(low), int(high))

    def within(self, start: int, end: int) -> Placement:
        """The part in ``[start, end)``, for one chunk of a chunked prefill."""
        part = self.indices(start, end)
        return Placement(
            self.positions[part], self.sources[part], self.slots[part], self.recomputed_tokens
        )

    def without(self, recompute: BoolArray) -> Placement:
        """The tokens that ``recompute`` (bool ``[n]``) does not mark; those it marks are counted
        as recomputed."""
        spared = ~recompute
        return Placement(
            self.positions[spared],
            self.sources[spared],
            self.slots[spared],
            self.recomputed_tokens + int(recompute.sum()),
        )


def place(plan: ReusePlan, recompute: BoolArray) -> Placement:
    """Split a plan's matched tokens by ``recompute`` (bool ``[matched_tokens]``)."""
    if recompute.shape != (plan.matched_tokens,):
        raise ValueError(
            f"recompute has shape {recompute.shape}, expected ({plan.matched_tokens},)"
        )
    return everything(plan).without(recompute)


def everything(plan: ReusePlan) -> Placement:
    """All matched tokens, of which none is chosen to be recomputed yet."""
    return Placement(plan.positions(), plan.sources(), plan.slots(), 0)
