"""What each method says to the server: methods are settings of a request, so one server does all.

full            nothing from the cache: the truth that the others are measured against
no_context      the question without its context: the floor
exact_prefix    stock SGLang
none            reuse without repair
seams@0.2       reuse; the selector ``seams`` recomputes a share of 0.2
dhd@0.2:attention=check_layer,check_layers=1+4
                the same with further settings of a request; layers are joined by ``+``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvshare_eval.errors import EvalError
from sglang_kvshare.recompute.selectors import selector_named, selector_names

FULL = "full"
NO_CONTEXT = "no_context"
DEFAULT_RATIOS = (0.1, 0.2, 0.4)
_PLAIN: dict[str, dict[str, Any]] = {
    FULL: {"reuse": "off"},
    NO_CONTEXT: {"reuse": "off"},
    "exact_prefix": {"reuse": "exact_prefix"},
    # For every selector the ratio 0 recomputes none of the reused tokens.
    "none": {"reuse": "approximate", "recompute_ratio": 0},
}
#: Settings that a method may add, and how their text is read.
FURTHER: Mapping[str, Callable[[str], Any]] = {
    "attention": str,
    "check_layers": lambda text: text.replace("+", ","),
    "recompute_error": float,
    "max_deviation": float,
    "probe_tokens": int,
    "refresh_tokens": int,
}
#: What earlier requests say: they compute what the exact prefix does not give, and publish it.
HISTORY_SETTINGS: Mapping[str, Any] = {"reuse": "exact_prefix", "publish": True}


@dataclass(frozen=True)
class Method:
    """``settings`` go into ``custom_params.kvshare``, and never publish: every method of a case
    meets the same cache."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def default_methods() -> tuple[str, ...]:
    """The bounds, and every registered selector at some ratios."""
    # Those of a fixed ratio are bounds as well, and there already.
    names = [name for name in selector_names() if selector_named(name).fixed_ratio is None]
    selected = (f"{name}@{ratio}" for name in names for ratio in DEFAULT_RATIOS)
    return (*_PLAIN, *selected)


def parse_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """Read method names; ``full`` is always among them, and first.

    Raises:
        EvalError: a name that is no method.
    """
    # By name, which a ratio's other spellings share: seams@0.20 is seams@0.2.
    methods = {method.name: method for method in map(_method, (FULL, *names))}
    return tuple(methods.values())


def _method(name: str) -> Method:
    if name in _PLAIN:
        return Method(name, {**_PLAIN[name], "publish": False})
    head, _, more = name.partition(":")
    selector, at, ratio = head.partition("@")
    try:
        share = float(ratio)
    except ValueError:
        share = -1.0
    if not selector or not at or not 0 <= share <= 1:
        raise EvalError(
            f"unknown method {name!r}: allowed are {', '.join(_PLAIN)}, and SELECTOR@RATIO such "
            "as seams@0.2 with a ratio from 0 to 1"
        )
    settings = {"reuse": "approximate", "selector": selector, "recompute_ratio": share}
    plain = f"{selector}@{share:g}"
    return Method(
        f"{plain}:{more}" if more else plain, {**settings, **_further(name, more), "publish": False}
    )


def _further(name: str, text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in FURTHER or not equals:
            raise EvalError(
                f"method {name!r}: {part!r} is none of {', '.join(f'{key}=...' for key in FURTHER)}"
            )
        try:
            settings[key] = FURTHER[key](value)
        except ValueError as error:
            raise EvalError(f"method {name!r}: {part!r} is not a number") from error
    return settings
