"""Serving workloads, each a file of its own in this folder, found by name.

A workload is a function that makes the prompts of one window::

    @register_workload("rag")
    def rag(tokens: Tokens, count: int, *, prompt_tokens: int = 1000, share: float = 0.8) -> Load:

Its keyword parameters are the workload's options, which a command line sets as
``rag:share=0.5,output_tokens=4``; their types are read from the defaults (int, float, str). Options
called ``prompt_tokens`` and ``share`` can be swept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvshare_eval.errors import EvalError
from kvshare_eval.options import Registry, defaults_of, first_line_of_doc


@dataclass(frozen=True)
class LoadRequest:
    """One request of a window.

    Attributes:
        prompt: token ids.
        output_tokens: how many are generated; no request ends earlier.
        reusable_tokens: tokens of the prompt that stand in an earlier prompt of the window or of
            its warm-up, as the workload made them.
        due_s: when it arrives, from the window's start; ``None``: the rate decides.
    """

    prompt: tuple[int, ...]
    output_tokens: int
    reusable_tokens: int
    due_s: float | None = None


@dataclass(frozen=True)
class Load:
    """What one window sends.

    Attributes:
        warm_up: prompts that are sent one by one before the window and are not measured: the
            earlier requests that left their keys and values in the cache.
        requests: the measured ones, in order of arrival.
    """

    warm_up: tuple[tuple[int, ...], ...]
    requests: tuple[LoadRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Median length of a prompt."""
        return round(statistics.median(len(one.prompt) for one in self.requests))

    @property
    def reusable_share(self) -> float:
        prompts = sum(len(one.prompt) for one in self.requests)
        return sum(one.reusable_tokens for one in self.requests) / prompts


@dataclass(frozen=True)
class Workload:
    """A registered workload.

    Attributes:
        name: what command lines and records call it.
        make: the function that makes a window's prompts from its ``Tokens`` and how many there are.
        arrivals: whether it brings its own arrival times, so that no rate applies.
        doc: one line that says what is repeated, and where.
    """

    name: str
    make: Callable[..., Load]
    arrivals: bool
    doc: str

    def defaults(self) -> dict[str, Any]:
        """The options and what they are when nobody sets them."""
        return defaults_of(self.make)


_WORKLOADS: Registry[Workload] = Registry(
    "workload", __name__, __path__, lambda workload: workload.make
)


def register_workload(
    name: str, *, arrivals: bool = False
) -> Callable[[Callable[..., Load]], Callable[..., Load]]:
    """Add a workload. ``arrivals``: its requests have arrival times of their own."""

    def add(make: Callable[..., Load]) -> Callable[..., Load]:
        doc = first_line_of_doc(make)
        _WORKLOADS.add(name, Workload(name, make, arrivals, doc))
        return make

    return add


def workloads() -> dict[str, Workload]:
    """All workloads by name."""
    return _WORKLOADS.all()


def find_workload(text: str) -> tuple[Workload, dict[str, Any]]:
    """Read ``name`` or ``name:option=value,...``.

    Raises:
        EvalError: unknown workload or option, or a value of the wrong type; names what is allowed.
    """
    return _WORKLOADS.find(text)


def reusable(prompt_tokens: int, share: float) -> int:
    """Tokens of a prompt that are to be reusable.

    Raises:
        EvalError: a share outside of 0 up to below 1, or an empty prompt.
    """
    if prompt_tokens < 1:
        raise EvalError(f"prompt_tokens={prompt_tokens}: must be at least 1")
    # At 1 a prompt would have no new token, and few enough pieces to be asked twice.
    if not 0 <= share < 1:
        raise EvalError(f"share={share:g}: must be at least 0 and below 1")
    return round(prompt_tokens * share)


def at_least(low: float, **values: float) -> None:
    """Raise :class:`EvalError` that names the first of these options that is below ``low``."""
    for name, value in values.items():
        if value < low:
            raise EvalError(f"{name}={value:g}: must be at least {low:g}")
