"""Whether reuse pays, judged by what forwards on this machine were measured to take.

    full forward of n rows over c tokens        full(n, n c)
    narrowed forward of k kept rows             narrowed(k, k c)
    a plan that spares s of n rows gains        full(n, n c) - narrowed(n - s, (n - s) c) - copy * s

A gate that is closed measures no narrowed forwards, and what it knows of them may be of a bad
moment. So one in many plans that it would turn away is carried out.
"""

from __future__ import annotations

from collections.abc import Collection

from sglang_kvshare.scheduling.forward_cost import ForwardCost, Load, Recent

#: Of so many plans turned away one is carried out, to learn whether the verdict still holds.
RETRY_EVERY = 64


class BenefitGates:
    """A gate for each of those that must learn nothing of each other.

    What one has measured tells whether it reused anything, so that no other's verdict may rest on
    it. Bounded by the tenants file, which names all that may ask.
    """

    def __init__(self) -> None:
        self._gates: dict[str, BenefitGate] = {}

    def of(self, domains: Collection[str]) -> BenefitGate | None:
        """The gate of a forward of all ``domains``; ``None`` for more than one, whose time is
        nobody's own."""
        if len(domains) != 1:
            return None
        return self._gates.setdefault(next(iter(domains)), BenefitGate())


class BenefitGate:
    """Lets a plan through when it is predicted to save time; learns from every forward."""

    def __init__(self) -> None:
        self.cost = ForwardCost()
        self._copy_ms_per_token = Recent()
        self._match_ms_per_token = Recent()
        self._turned_away = 0
        self._retry = False

    def observe_full(self, load: Load, ms: float) -> None:
        """A forward in which every row ran."""
        self.cost.observe(load, ms, narrowed=False)

    def observe_narrowed(self, load: Load, ms: float) -> None:
        """A forward in which the rows of ``load`` were kept, without the copy before it."""
        self.cost.observe(load, ms, narrowed=True)

    def observe_copy(self, tokens: int, ms: float) -> None:
        if tokens > 0 and ms >= 0:
            self._copy_ms_per_token.add(ms / tokens)

    def observe_match(self, tokens: int, ms: float) -> None:
        """Planning for ``tokens`` prompt tokens beyond the prefix."""
        if tokens > 0 and ms >= 0:
            self._match_ms_per_token.add(ms / tokens)

    @property
    def known(self) -> bool:
        """Enough has been measured to judge plans; until then every plan passes."""
        return self.cost.known and self._copy_ms_per_token.known

    def saved_ms(self, rows: int, spared_rows: int, context_tokens: int) -> float:
        """Predicted gain of a plan that spares ``spared_rows`` of the last ``rows`` of a prompt of
        ``context_tokens``; may be negative."""
        full = self.cost.ms(Load.of(rows, context_tokens), narrowed=False)
        kept = self.cost.ms(Load.of(rows - spared_rows, context_tokens), narrowed=True)
        return full - kept - self._copy_ms_per_token.median * spared_rows

    def pays(self, rows: int, spared_rows: int, context_tokens: int) -> bool:
        """Whether a plan at hand is to be carried out."""
        if not self.known or self.saved_ms(rows, spared_rows, context_tokens) > 0:
            return True
        passes = self._retry or self._its_turn()
        self._retry = False
        return passes

    def worth_a_look(self, rows: int, context_tokens: int) -> bool:
        """Whether the best plan there can be would pay for the search as well."""
        if not self.known or rows < 2:
            return True
        search = self._match_ms_per_token.median * rows if len(self._match_ms_per_token) else 0.0
        if self.saved_ms(rows, rows - 1, context_tokens) > search:
            return True
        if not self._its_turn():
            return False
        # Whatever plan is found next passes as well, or nothing would be learnt.
        self._retry = True
        return True

    def _its_turn(self) -> bool:
        self._turned_away += 1
        if self._turned_away < RETRY_EVERY:
            return False
        self._turned_away = 0
        return True
