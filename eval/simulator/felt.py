"""What happened in a run, to each request and to the server."""

from __future__ import annotations

from dataclasses import dataclass

from kvshare_eval.simulator.gaps import GapHistogram


@dataclass
class Felt:
    """What happened to each request, and to the server; times in picoseconds.

    Attributes:
        first_ps: when its first token came; -1 for one that was refused.
        end_ps: when its last one came.
        gap_ps: the largest gap between its tokens.
        admitted_ps: when its prefill was first chosen.
        preemptions: how often it left.
        prefix, reused: prompt tokens that its first prefill found, and took from elsewhere.
        gaps: of all tokens of all requests.
        refused: requests that could never fit.
        swaps, recomputes: preemptions by the way that was taken.
        aborted: ended for want of memory, as SGLang ends the last one.
        rows: that ran in prefills.
        prefills, steps: forwards.
        tokens: that were generated.
        idle_ps: of the server's time.
        end_of_all_ps: when nothing was left to do.
        stalled_ps: that decoding waited for copies.
        peak_tokens: most slots that were locked or private.
        passes: of the scheduler.
    """

    first_ps: list[int]
    end_ps: list[int]
    gap_ps: list[int]
    admitted_ps: list[int]
    preemptions: list[int]
    prefix: list[int]
    reused: list[int]
    gaps: GapHistogram
    refused: int = 0
    swaps: int = 0
    recomputes: int = 0
    aborted: int = 0
    rows: int = 0
    prefills: int = 0
    steps: int = 0
    tokens: int = 0
    idle_ps: int = 0
    end_of_all_ps: int = 0
    stalled_ps: int = 0
    peak_tokens: int = 0
    passes: int = 0

    @classmethod
    def of(cls, count: int) -> Felt:
        """Of so many requests, before anything has happened."""
        return cls(
            first_ps=[-1] * count,
            end_ps=[-1] * count,
            gap_ps=[0] * count,
            admitted_ps=[-1] * count,
            preemptions=[0] * count,
            prefix=[0] * count,
            reused=[0] * count,
            gaps=GapHistogram(),
        )

    def note_gap(self, i: int, gap_ps: int) -> None:
        """One request alone felt it."""
        self.gaps.add(gap_ps, 1)
        if gap_ps > self.gap_ps[i]:
            self.gap_ps[i] = gap_ps

    def note_held(self, tokens: int) -> None:
        """So many slots are locked or private now."""
        if tokens > self.peak_tokens:
            self.peak_tokens = tokens
