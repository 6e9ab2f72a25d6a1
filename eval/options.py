"""Registries of functions, and how command lines choose from them: ``name:option=value,...``.

The options are the keyword-only parameters of the registered function; their types are those of the
defaults: int, float, str or bool.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from kvshare_eval.errors import EvalError


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function and what they are when nobody sets them."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name, registered by the modules of one folder.

    Args:
        what: an entry, as errors call it.
        package, path: ``__name__`` and ``__path__`` of the folder, whose modules are imported when
            the entries are first asked for.
        function: the function of an entry, whose keyword-only parameters are its options.
    """

    def __init__(
        self,
        what: str,
        package: str,
        path: Iterable[str],
        function: Callable[[T], Callable[..., Any]],
    ) -> None:
        self._what = what
        self._package = package
        self._path = path
        self._function = function
        self._entries: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, entry: T) -> None:
        """Register an entry; a name that is taken is a mistake of the code."""
        if name in self._entries:
            raise ValueError(f"{self._what} {name!r} is registered already")
        self._entries[name] = entry

    def all(self) -> dict[str, T]:
        """All entries, by name, in the order of their names."""
        if not self._loaded:
            self._loaded = True
            for module in pkgutil.iter_modules(self._path):
                importlib.import_module(f"{self._package}.{module.name}")
        return dict(sorted(self._entries.items()))

    def find(self, text: str) -> tuple[T, dict[str, Any]]:
        """See :func:`choose`."""
        return choose(self._what, text, self.all(), self._function)


def first_line_of_doc(function: Callable[..., Any]) -> str:
    """What a registered function says of itself."""
    return (function.__doc__ or "").strip().partition("\n")[0]


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
