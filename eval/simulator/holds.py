"""Waiting requests that are held back for a passage that is being computed right now."""

from __future__ import annotations

from itertools import takewhile

from kvshare_eval.simulator.contents import Contents
from kvshare_eval.simulator.costs import PS_PER_MS, Costs
from sglang_kvshare.scheduling.holding import Holder
from sglang_kvshare.scheduling.jobs import Waiting


class Holds:
    """What KVShare's holder is asked and told."""

    def __init__(self, holder: Holder, contents: Contents, costs: Costs) -> None:
        self._holder = holder
        self._contents = contents
        self._costs = costs

    def holds(self, one: Waiting, prompt: int, known: int, prefix: int, now_ps: int) -> bool:
        """Whether it should wait.

        Args:
            prompt: tokens of its prompt.
            known: blocks of it that are cached as a prefix.
            prefix: tokens of these.
        """
        holder, contents = self._holder, self._contents
        if not len(holder):
            return False
        keys = contents.keys(one.number, known)
        # What is computed now: at any place where that can be taken, else in a common prefix.
        wanted = (
            [key for key in keys if key in holder]
            if contents.elsewhere
            else [*takewhile(holder.__contains__, keys)]
        )
        if not wanted:
            return False
        costs = self._costs
        rows = prompt - prefix
        later = max(1, rows - len(wanted) * contents.block_tokens)
        gain_ms = costs.prefill_ms(rows, rows * prompt) - costs.prefill_ms(later, later * prompt)
        return holder.held(one, wanted, gain_ms, now_ps / PS_PER_MS)

    def begins(self, i: int, known: int) -> None:
        """Its prefill was chosen, and computes what lies behind its ``known`` first blocks."""
        self._holder.begins(str(i), self._contents.keys(i, known))

    def ended(self, i: int) -> None:
        """Its prefill is done, and can be taken."""
        self._holder.ended(str(i))
