"""The requests that decode, as sums, and their steps, many at a time.

Decode steps in which nothing can change are jumped over:

    step      |----|----|----|----|----|        the batch is the same, its context grows by one
    until       the first of: a finish, a step end at or after an event (an arrival that can be
                admitted, a copy), a reservation that is due, memory that runs short

A request knows the step at which it joined, and with it how long its answer is by now:

    joined   step                               answer = that when it joined + (step - joined)
      |--------|                                private slots likewise

What it felt between is asked of :mod:`kvshare_eval.simulator.gaps` when it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush

from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.felt import Felt
from kvshare_eval.simulator.gaps import LargestSince
from kvshare_eval.simulator.holdings import Holdings
from kvshare_eval.simulator.kv_cache import KvCache
from kvshare_eval.simulator.reservation import Reservation


class DecodeBatch:
    """Who decodes.

    Attributes:
        size: requests.
        context_tokens: of all of them, before the next step.
        left_tokens: that they may generate yet, by their bounds.
        full: no prefill is looked for; SGLang's ``batch_is_full``. Whoever finds no room for
            another sets it, and whatever gives room back unsets it.
    """

    def __init__(
        self,
        holdings: Holdings,
        reservation: Reservation,
        cache: KvCache,
        costs: Costs,
        felt: Felt,
    ) -> None:
        self._holdings = holdings
        self._reservation = reservation
        self._cache = cache
        self._decode_ps = costs.decode_ps
        self._felt = felt
        self.size = 0
        self.context_tokens = 0
        self.left_tokens = 0
        self.full = False
        self._step = 0
        self._step_end_ps = 0
        #: Step after which each was there; steps at which they end; when those that have not
        #: decoded yet got their last token.
        self._joined: dict[int, int] = {}
        self._finishes: list[tuple[int, int]] = []
        self._fresh: dict[int, int] = {}
        self._shared = LargestSince()

    # --- coming and going ----------------------------------------------------------------------

    def first_token(self, i: int, now_ps: int) -> None:
        """The token that a prefill yields: the first, or the next of one that resumes. Then it
        decodes, or has ended."""
        felt, held = self._felt, self._holdings
        out = held.out_tokens[i]
        if out == 0:
            felt.first_ps[i] = now_ps
        else:
            felt.note_gap(i, now_ps - felt.end_ps[i])
        felt.end_ps[i] = now_ps
        felt.tokens += 1
        out += 1
        held.out_tokens[i] = out
        if out >= held.output_tokens[i]:
            self.end(i)
            return
        self._joined[i] = self._step
        heappush(self._finishes, (self._step + held.output_tokens[i] - out, i))
        self._fresh[i] = now_ps
        self.size += 1
        self.context_tokens += held.prompt_tokens[i] + out - 1
        self.left_tokens += held.max_new_tokens[i] - out

    def leave(self, i: int) -> None:
        """Off the sums; what it felt since it joined is asked now."""
        felt, held = self._felt, self._holdings
        felt.end_ps[i] = self._fresh.pop(i, self._step_end_ps)
        step = self._joined.pop(i)
        # Its first step it felt alone; from the second on it shared the gaps of the others.
        largest = self._shared.since(step + 2)
        if largest > felt.gap_ps[i]:
            felt.gap_ps[i] = largest
        held.grow(i, self._step - step)
        out = held.out_tokens[i]
        self.size -= 1
        self.context_tokens -= held.prompt_tokens[i] + out - 1
        self.left_tokens -= held.max_new_tokens[i] - out
        self.full = False

    def end(self, i: int) -> None:
        """One that does not decode (any more) has all of its answer, or gets no more."""
        self._reservation.ended(i, self._holdings.end(i))
        self.full = False

    # --- asking --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        return iter(self._joined)

    def grown_tokens(self, i: int) -> int:
        """What it has generated since it joined; 0 for a prompt between two chunks."""
        joined = self._joined.get(i)
        return 0 if joined is None else self._step - joined

    def out_tokens(self, i: int) -> int:
        """Its answer so far."""
        return self._holdings.out_tokens[i] + self.grown_tokens(i)

    def check(self) -> None:
        """
        Raises:
            AssertionError: a sum is not that of its requests.
        """
        held = self._holdings
        context = sum(held.prompt_tokens[i] + self.out_tokens(i) - 1 for i in self._joined)
        left = sum(held.max_new_tokens[i] - self.out_tokens(i) for i in self._joined)
        assert self.size == len(self._joined)
        assert self.context_tokens == context
        assert self.left_tokens == left

    # --- steps ---------------------------------------------------------------------------------

    def decode(self, now_ps: int, event_ps: int | None, *, jumps: bool) -> tuple[int, int]:
        """Take a step, or as many as nothing can happen in. Memory is there for one.

        Args:
            event_ps: the step that ends then, or first after it, is the last of them; ``None``
                for no event.
            jumps: whether there may be more than one.

        Returns:
            How many were taken, and when the last one ends.
        """
        felt, size = self._felt, self.size
        floor, request, context = self._decode_ps
        # The first step, and by how much each takes longer than the one before.
        first = floor + request * size + context * (self.context_tokens + size)
        rise = context * size
        steps = self._steps(None if event_ps is None else event_ps - now_ps, first, rise, jumps)
        then = now_ps + steps_ps(steps, first, rise)
        grown = steps * size
        self._cache.take(grown)
        self._first_gaps(now_ps + first)
        if steps > 1:
            felt.gaps.add_run(first + rise, rise, steps - 1, size)
            self._shared.add(self._step + steps, first + rise * (steps - 1))
        self._step_end_ps = then
        self._step += steps
        self.context_tokens += grown
        self.left_tokens -= grown
        felt.steps += steps
        felt.tokens += grown
        return steps, then

    def _steps(self, span: int | None, first: int, rise: int, jumps: bool) -> int:
        if not jumps:
            return 1
        size, reservation = self.size, self._reservation
        need = size * reservation.lookahead_steps
        steps = min(self._next_finish() - self._step, (self._cache.available - need) // size + 1)
        due = reservation.steps_to_due()
        if due is not None:
            steps = min(steps, due)
        if span is not None:
            steps = steps_until(span, first, rise, steps)
        return max(1, steps)

    def end_finished(self) -> None:
        """Those whose last token the last step has brought."""
        finishes = self._finishes
        while finishes and finishes[0][0] <= self._step:
            at, i = heappop(finishes)
            if self._ends_at(i) == at:
                self.leave(i)
                self.end(i)

    def _first_gaps(self, end_ps: int) -> None:
        """Of the next step, whose requests got their last token at different times."""
        fresh = self._fresh
        for i, since in fresh.items():
            self._felt.note_gap(i, end_ps - since)
        others = self.size - len(fresh)
        if others:
            gap = end_ps - self._step_end_ps
            self._felt.gaps.add(gap, others)
            self._shared.add(self._step + 1, gap)
        fresh.clear()

    def _next_finish(self) -> int:
        """Step of the next one. The heap keeps entries of requests that left before they ended."""
        finishes = self._finishes
        while self._ends_at(finishes[0][1]) != finishes[0][0]:
            heappop(finishes)
        return finishes[0][0]

    def _ends_at(self, i: int) -> int:
        """Step at which a running request ends; -1 for one that does not run."""
        joined, held = self._joined.get(i), self._holdings
        return -1 if joined is None else joined + held.output_tokens[i] - held.out_tokens[i]


def steps_ps(steps: int, first: int, rise: int) -> int:
    """Time of so many steps, the first of which takes ``first`` and each other ``rise`` more."""
    return steps * first + rise * (steps * (steps - 1) // 2)


def steps_until(span: int, first: int, rise: int, most: int) -> int:
    """The fewest steps that take at least ``span``; ``most`` if these take less."""
    if steps_ps(most, first, rise) < span:
        return most
    if span <= first:
        return 1
    if rise:
        half = first - rise / 2
        guess = int((math.sqrt(half * half + 2 * rise * span) - half) / rise)
    else:
        guess = span // first
    steps = min(most, max(1, guess))
    # The root is rounded; whole numbers decide.
    while steps_ps(steps, first, rise) < span:
        steps += 1
    while steps > 1 and steps_ps(steps - 1, first, rise) >= span:
        steps -= 1
    return steps
