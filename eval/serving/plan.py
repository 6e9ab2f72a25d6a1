"""What a sweep measures: workloads with their options, rates, repeats, and the order of it all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare_eval.errors import EvalError
from kvshare_eval.serving.load import poisson_arrivals
from kvshare_eval.serving.tokens import Corpus, Tokens
from kvshare_eval.serving.workloads import Load, Workload, find_workload

#: How ``--rates auto`` and ``closed`` are written.
AUTO, CLOSED = "auto", "closed"


@dataclass(frozen=True)
class Spec:
    """A workload with its options.

    Attributes:
        workload: which one.
        options: those that are set.
        text: both, as records write them; ``find_workload`` reads it.
    """

    workload: Workload
    options: dict[str, Any]

    @property
    def text(self) -> str:
        set_here = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.workload.name}:{set_here}" if set_here else self.workload.name


@dataclass(frozen=True)
class Amount:
    """How much one window sends: a number of requests, or all that arrive in a time.

    Windows that have no rate, one request at a time, send ``closed`` requests.
    """

    requests: int | None
    seconds: float | None
    closed: int


@dataclass(frozen=True)
class Window:
    """One window, the same for every side.

    Attributes:
        spec: what is sent.
        rate: mean arrivals a second; ``None``: one at a time, or the trace's own times.
        repeat: which repetition.
    """

    spec: Spec
    rate: float | None
    repeat: int

    @property
    def rate_text(self) -> str:
        if self.spec.workload.arrivals:
            return "trace"
        return CLOSED if self.rate is None else f"{self.rate:g}"

    def key(self, side: str) -> str:
        return f"{self.spec.text}/{side}/{self.rate_text}/{self.repeat}"

    def name(self, seed: int) -> str:
        """Seeds prompts and arrivals: the same for all sides, another one for every window."""
        return f"{seed}/{self.spec.text}/{self.rate_text}/{self.repeat}"


@dataclass(frozen=True)
class Arrivals:
    """A window's requests, and when each is due; ``None``: one at a time."""

    load: Load
    due_s: tuple[float, ...] | None
    rate: float | None


def arrivals(window: Window, corpus: Corpus, seed: int, amount: Amount) -> Arrivals:
    """Make a window's prompts and times: a pure function of its arguments."""
    name = window.name(seed)
    tokens = Tokens(corpus, name)
    workload, options = window.spec.workload, dict(window.spec.options)
    options = {**workload.defaults(), **options}
    if workload.arrivals:
        if amount.seconds is not None:
            options["seconds"] = amount.seconds
        load = workload.make(tokens, amount.requests or 10**9, **options)
        due = tuple(one.due_s or 0.0 for one in load.requests)
        return Arrivals(load, due, round(len(due) / due[-1], 4) if due[-1] > 0 else None)
    if window.rate is None:
        return Arrivals(workload.make(tokens, amount.closed, **options), None, None)
    due = poisson_arrivals(name, window.rate, requests=amount.requests, seconds=amount.seconds)
    return Arrivals(workload.make(tokens, len(due), **options), due, window.rate)


def make_specs(
    names: Sequence[str], shares: Sequence[float], prompt_tokens: Sequence[int]
) -> tuple[Spec, ...]:
    """Every workload with every swept value of the options that it has.

    Raises:
        EvalError: a sweep that none of the workloads takes, or the same workload twice.
    """
    sweeps: dict[str, Sequence[Any]] = {"share": shares, "prompt_tokens": prompt_tokens}
    found = [find_workload(name) for name in names]
    for option, values in sweeps.items():
        if values and not any(option in workload.defaults() for workload, _ in found):
            raise EvalError(f"a sweep of {option}: no workload of this run has that option")
    specs: list[Spec] = []
    for workload, options in found:
        combinations = [options]
        for option, values in sweeps.items():
            if values and option in workload.defaults():
                combinations = [{**one, option: value} for one in combinations for value in values]
        specs += [Spec(workload, one) for one in combinations]
    texts = [spec.text for spec in specs]
    for text in texts:
        if texts.count(text) > 1:
            raise EvalError(f"workload {text} is given twice")
    return tuple(specs)


def read_rates(text: str) -> tuple[float | None, ...] | None:
    """Read ``auto`` (``None``) or a list of rates, of which ``closed`` is one at a time."""
    if text == AUTO:
        return None
    rates: list[float | None] = []
    for item in text.split(","):
        try:
            rate = None if item.strip() == CLOSED else float(item)
        except ValueError:
            rate = -1.0
        if rate is not None and not 0 < rate < float("inf"):
            raise EvalError(
                f"--rates {text}: {item!r} is no rate; allowed are {AUTO}, or requests a second "
                f"and {CLOSED}, separated by commas"
            )
        rates.append(rate)
    if len(set(rates)) < len(rates):
        raise EvalError(f"--rates {text}: name each rate once")
    return tuple(rates)


def auto_rates(service_rate: float, multiples: Sequence[float]) -> tuple[float | None, ...]:
    """One at a time, and multiples of what stock serves one at a time; three digits."""
    return (None, *(float(f"{service_rate * multiple:.3g}") for multiple in multiples))


def windows_of(spec: Spec, rates: Sequence[float | None], repeats: int) -> Iterator[Window]:
    """The windows of one workload; a trace has one rate, its own."""
    for repeat in range(repeats):
        for rate in (None,) if spec.workload.arrivals else rates:
            yield Window(spec, rate, repeat)


def rotated(sides: Sequence[str], repeat: int) -> tuple[str, ...]:
    """The order of the sides in a repeat: over as many repeats as sides, each is first once."""
    shift = repeat % len(sides)
    return (*sides[shift:], *sides[:shift])
