"""How the tokens to recompute of one request are chosen, and when that can be known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_kvshare.recompute.selectors import Need, SelectionSettings, Selector, selector_named


def probe_layers(layers: int) -> range:
    """The layers whose attention counts in a probe pass; it ends with the last of them.

    The first half looks at what stands near, the last sixth ranks no better than those between
    (docs/decisions/0012).
    """
    return range(layers // 2, math.ceil(layers * 5 / 6))


@dataclass(frozen=True)
class Choice:
    """What a request asked for, fitted to the model.

    Attributes:
        check_layers: those that run for every row before the choice; empty when none is needed.
        probes: the prompt's last rows run first, through the layers up to :func:`probe_layers`.
        probe_tokens: so many rows at most are looked with.
        max_deviation: see :class:`sglang_kvshare.config.KVShareConfig`.
    """

    selector: Selector
    settings: SelectionSettings
    check_layers: tuple[int, ...] = ()
    probes: bool = False
    max_deviation: float = math.inf
    probe_tokens: int = 32

    @property
    def waits(self) -> bool:
        """The choice cannot be made before the forward has begun."""
        return bool(self.check_layers) or self.probes

    @property
    def dense_layers(self) -> int:
        """Layers that run for every row; of the last check layer little more than keys and values
        does."""
        return self.check_layers[-1] if self.check_layers else 0


def fitted(
    name: str,
    settings: SelectionSettings,
    *,
    attention: str,
    check_layers: tuple[int, ...],
    max_deviation: float,
    probe_tokens: int,
    layers: int,
) -> Choice:
    """The choice for a model of ``layers`` decoder layers.

    Check layers after which nothing is left to spare are left out. A selector that needs one and
    has none left gives way to ``seams``.
    """
    selector = selector_named(name)
    plain = Choice(selector, settings)
    if not selector.measures or not settings.recomputes or not settings.spares:
        return plain
    probes = Need.PROBE_ATTENTION in selector.needs or (
        Need.ATTENTION in selector.needs and attention == "probe_pass"
    )
    checks = selector.uses_check_layer or (Need.ATTENTION in selector.needs and not probes)
    usable = tuple(layer for layer in check_layers if layer < layers - 1) if checks else ()
    if checks and not usable:
        return Choice(selector_named("seams"), settings)
    return Choice(selector, settings, usable, probes, max_deviation, probe_tokens)
