"""The registry of selectors: which of the reused tokens are recomputed all the same.

A selector gives every matched token a score; the tokens that count most are recomputed. It is a
function in a file of its own with one decorator (``docs/selectors.md`` shows how). What it looks at
is measured by the engine and handed to it as :class:`Signals`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_kvshare.plan import ReusePlan

FloatArray = npt.NDArray[np.float64]


class Need(Enum):
    """What a selector looks at. A check layer runs for every row before tokens are chosen."""

    #: Attention from the rows that are not reused: of the probe pass or of the check layer, as the
    #: setting ``attention`` says.
    ATTENTION = "attention"
    #: Attention of the prompt's last rows over many layers, from a pass of these rows alone.
    PROBE_ATTENTION = "probe_attention"
    #: Deviations of the values and keys at the check layer.
    DEVIATION = "deviation"
    #: First-order change of the attention output at the check layer.
    INFLUENCE = "influence"


@dataclass(frozen=True)
class Signals:
    """What was measured of the matched tokens, each float64 ``[m]`` in order of position.

    Attributes:
        attention: attention mass that the token receives, summed over rows (and layers, of the
            probe pass) and averaged over heads.
        contribution: of the probe pass alone, attention times the L1 norm of the donor's value, for
            each layer and key head.
        value_l1: L1 distance between the donor's value and a fresh one, over heads and dimensions.
        value_l2: squared L2 distance of the same.
        key_l2: squared L2 distance of the keys, both at the token's new position.
        value_size: L1 norm of the fresh value.
        influence: see :func:`sglang_kvshare.attention.attention_mass.influence`.
    """

    attention: FloatArray | None = None
    contribution: FloatArray | None = None
    value_l1: FloatArray | None = None
    value_l2: FloatArray | None = None
    key_l2: FloatArray | None = None
    value_size: FloatArray | None = None
    influence: FloatArray | None = None


class Score(Protocol):
    """How much each matched token is worth recomputing: float64 ``[plan.matched_tokens]``, at least
    0. A token of score 0 is not recomputed but as a seam or in the tail."""

    def __call__(self, plan: ReusePlan, signals: Signals) -> FloatArray: ...


@dataclass(frozen=True)
class Selector:
    """A registered selector.

    Attributes:
        source: the paper or the code that it comes from.
        needs: what must be measured; nothing for one that decides by the plan alone.
        fixed_ratio: replaces the share of tokens that was asked for.
        per_span: the share is taken of every span rather than of all matched tokens together.
    """

    name: str
    score: Score
    source: str
    needs: frozenset[Need]
    fixed_ratio: float | None
    per_span: bool

    @property
    def uses_check_layer(self) -> bool:
        """Whatever the setting ``attention`` says."""
        return bool(self.needs & {Need.DEVIATION, Need.INFLUENCE})

    @property
    def measures(self) -> bool:
        """It cannot choose before the forward has begun."""
        return bool(self.needs)


_SELECTORS: dict[str, Selector] = {}


def register_selector(
    name: str,
    *,
    source: str,
    needs: frozenset[Need] | set[Need] = frozenset(),
    fixed_ratio: float | None = None,
    per_span: bool = False,
) -> Callable[[Score], Score]:
    """Add a score under ``name``, the value that requests and the configuration use.

    Raises:
        ValueError: the name is taken.
    """

    def add(score: Score) -> Score:
        if name in _SELECTORS:
            raise ValueError(f"selector {name!r} is registered already")
        _SELECTORS[name] = Selector(name, score, source, frozenset(needs), fixed_ratio, per_span)
        return score

    return add


def selector_names() -> tuple[str, ...]:
    return tuple(sorted(_SELECTORS))


def selector_named(name: str) -> Selector:
    """
    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in _SELECTORS:
        raise ValueError(f"selector {name!r}: allowed are {', '.join(selector_names())}")
    return _SELECTORS[name]
