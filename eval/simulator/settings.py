"""What a simulated server is started with: SGLang's flags, and each part of KVShare on or off."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from kvshare_eval.errors import EvalError
from kvshare_eval.simulator.costs import Costs
from sglang_kvshare.scheduling.order import orders


@dataclass(frozen=True)
class Flags:
    """SGLang's own settings, the same for every side.

    Attributes:
        pool_tokens: KV slots.
        chunked_prefill_tokens: rows of one prefill pass (``--chunked-prefill-size``); 0: no chunks.
        max_prefill_tokens: prompts of one pass beyond which no further one is added.
        max_running: requests that decode at a time.
        conservativeness: ``--schedule-conservativeness``.
    """

    pool_tokens: int
    chunked_prefill_tokens: int
    max_prefill_tokens: int
    max_running: int
    conservativeness: float = 1.0

    @classmethod
    def of(cls, costs: Costs, **changed: Any) -> Flags:
        """The preset's defaults, with what is not ``None`` in ``changed``."""
        own = cls(
            costs.pool_tokens,
            costs.chunked_prefill_tokens,
            costs.max_prefill_tokens,
            costs.max_running,
        )
        return replace(own, **{name: value for name, value in changed.items() if value is not None})


@dataclass(frozen=True)
class Side:
    """One way to schedule. The defaults are stock SGLang.

    Attributes:
        name: of the side.
        order: of the waiting queue, as ``order_named`` knows it.
        most_bypasses: younger requests that may overtake one.
        hold_ms: how long a request may wait for a donor that is being computed; 0: never.
        reserve: ``stock`` (new-token ratio) or ``estimate`` (length estimates in the ledger).
        lookahead_steps, length_confidence, length_confidence_slope: of the ledger.
        victims: ``stock`` or ``slo``.
        preempt: ``stock`` and ``recompute`` (the same here), ``swap`` or ``auto``.
        most_preemptions: from then on a request is the last resort.
        host_pool_tokens: room for what is swapped out.
        budget: whether a prefill pass beside decoding requests takes no longer than their TBT SLO
            allows.
        decode_between: with it, whether a decode step follows every prefill pass, as with SGLang's
            ``--prefill-decode-interval 1``; else the next prefill may come first.
        reuse: blocks at any place of the namespace are reused; else exact prefixes only.
        recompute_ratio: of the rows of reused blocks so many are computed all the same.
        apart: whether tenants are told apart by the order and by length estimates, as a server
            does; off shows what that costs. Their KV is not shared in any case.
    """

    name: str = "stock"
    order: str = "stock-fcfs"
    most_bypasses: int = 256
    hold_ms: float = 0.0
    reserve: str = "stock"
    lookahead_steps: int = 2
    length_confidence: float = 0.7
    length_confidence_slope: float = 0.001
    victims: str = "stock"
    preempt: str = "stock"
    most_preemptions: int = 3
    host_pool_tokens: int = 0
    budget: bool = False
    decode_between: bool = True
    reuse: bool = False
    recompute_ratio: float = 0.15
    apart: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("order", orders()),
            ("reserve", ("stock", "estimate")),
            ("victims", ("stock", "slo")),
            ("preempt", ("stock", "recompute", "swap", "auto")),
        ):
            if getattr(self, name) not in allowed:
                raise EvalError(
                    f"side {self.name}: {name}={getattr(self, name)!r}: "
                    f"allowed are {', '.join(allowed)}"
                )

    @property
    def own_order(self) -> bool:
        """KVShare's queue, in which a request keeps its place when it is preempted."""
        return self.order not in ("stock-fcfs", "lpm")


#: Parts of KVShare's scheduling, and what each changes of stock's.
PARTS: dict[str, dict[str, Any]] = {
    "order": {"order": "hit-rate"},
    "reserve": {"reserve": "estimate"},
    "victims": {"victims": "slo"},
    "preempt": {"preempt": "auto", "host_pool_tokens": -1},
    "budget": {"budget": True},
    "hold": {"hold_ms": 1000.0},
}

STOCK = Side()


def side_named(text: str) -> Side:
    """``stock``, ``lpm``, ``kvshare``, ``kvshare-PART``, ``stock+PART``, each with
    ``:key=value,...`` that overrides single settings.

    Raises:
        EvalError: an unknown side, part, key or value.
    """
    name, _, options = text.partition(":")
    side = replace(_base(name), name=text)
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        side = replace(side, **{key: _read(text, key, value)})
    return side


def _base(name: str) -> Side:
    if name == "stock":
        return STOCK
    if name == "lpm":
        return replace(STOCK, order="lpm")
    for sign, start in (("+", "stock"), ("-", "kvshare")):
        first, *parts = name.split(sign)
        if first != start or not all(part in PARTS for part in parts):
            continue
        chosen = parts if sign == "+" else [part for part in PARTS if part not in parts]
        side = STOCK
        for part in chosen:
            side = replace(side, **PARTS[part])
        return side
    raise EvalError(
        f"unknown side {name!r}: allowed are stock, lpm, kvshare, kvshare-PART and stock+PART; "
        f"parts are {', '.join(PARTS)}"
    )


def _read(text: str, key: str, value: str) -> Any:
    kinds = {field.name: type(getattr(STOCK, field.name)) for field in fields(Side)}
    if key not in kinds or key == "name":
        raise EvalError(f"side {text}: unknown {key!r}; known are {', '.join(kinds)}")
    try:
        if kinds[key] is bool:
            return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
        return kinds[key](value)
    except (ValueError, KeyError):
        raise EvalError(f"side {text}: {key}={value!r} is no {kinds[key].__name__}") from None
