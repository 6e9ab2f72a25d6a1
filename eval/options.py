"""``name:option=value,...``: how command lines choose tasks and workloads and set their options.

The options are the keyword-only parameters of the registered function; their types are those of the
defaults: int, float, str or bool.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvshare_eval.errors import EvalError


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function and what they are when nobody sets them."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


T = TypeVar("T")


def choose(
    what: str, text: str, known: Mapping[str, T], function: Callable[[T], Callable[..., Any]]
) -> tuple[T, dict[str, Any]]:
    """Read one choice.

    Args:
        what: what is chosen, as errors call it.
        text: ``name`` or ``name:option=value,...``.
        known: what can be chosen, by name.
        function: the function of a choice, whose options are set.

    Returns:
        The choice, and the options that were given.

    Raises:
        EvalError: unknown name or option, or a value of the wrong type; names what is allowed.
    """
    name, _, settings = text.partition(":")
    if name not in known:
        raise EvalError(unknown(what, name, list(known)))
    defaults = defaults_of(function(known[name]))
    options: dict[str, Any] = {}
    for item in filter(None, settings.split(",")):
        key, equals, value = item.partition("=")
        place = f"option {key} of {what} {name}"
        if key not in defaults:
            raise EvalError(unknown(f"option of {what} {name}", key, list(defaults)))
        if not equals:
            raise EvalError(f"{place}: write {key}=VALUE")
        options[key] = _typed(place, value, defaults[key])
    return known[name], options


def unknown(what: str, name: str, known: list[str]) -> str:
    """The sentence about a name that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {what} {name!r}: {hint}Allowed are {', '.join(known) or 'none'}"


def _typed(place: str, value: str, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return kind(value)
    except (KeyError, ValueError):
        wanted = f"{kind.__name__} (default: {default!r})"
        raise EvalError(f"{place}: {value!r} is no {wanted}") from None
