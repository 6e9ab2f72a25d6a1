"""All that one run measures, and the checks of it before a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshare_eval.errors import EvalError
from kvshare_eval.serving.plan import Amount, Spec, Window, arrivals
from kvshare_eval.serving.sglang_client import why_not
from kvshare_eval.serving.tokens import Corpus

CLIENTS = ("auto", "own", "sglang")
#: The repeat's number in whose name calibration prompts are made.
CALIBRATION = -1


@dataclass(frozen=True)
class Slo:
    """Limits in ms: a number, ``auto``, or ``None`` for none."""

    ttft_ms: float | str | None
    tbt_ms: float | str | None

    @property
    def auto(self) -> bool:
        return "auto" in (self.ttft_ms, self.tbt_ms)


@dataclass(frozen=True)
class Sweep:
    """What is measured; see :mod:`kvshare_eval.serving.plan`.

    Attributes:
        rates: ``None``: found by measuring what the baseline serves one at a time.
        multiples: of that rate.
        client: one of :data:`CLIENTS`.
    """

    specs: tuple[Spec, ...]
    rates: tuple[float | None, ...] | None
    multiples: tuple[float, ...]
    repeats: int
    amount: Amount
    seed: int
    slo: Slo
    client: str


def baseline_of(sides: Sequence[str], sweep: Sweep) -> str | None:
    """The side that automatic rates and limits rest on; ``None`` where nothing is automatic."""
    if sweep.rates is not None and not sweep.slo.auto:
        return None
    for name in ("stock", "off"):
        if name in sides:
            return name
    raise EvalError("rates or limits that are 'auto' rest on the side stock or off: name one")


def clients_of(sweep: Sweep, model: str) -> dict[str, str]:
    """Workload -> ``own`` or ``sglang``; SGLang's wherever it can, unless another is asked for.

    Raises:
        EvalError: SGLang's is asked for and cannot.
    """
    chosen: dict[str, str] = {}
    for spec in sweep.specs:
        reason = why_not(spec.workload, model) if sweep.client != "own" else "not asked for"
        if reason and sweep.client == "sglang":
            raise EvalError(f"--client sglang: {reason}; --client own can")
        chosen[spec.text] = "own" if reason else "sglang"
    return chosen


def check_sweep(sweep: Sweep, sides: Sequence[str], corpus: Corpus) -> None:
    """Refuse what cannot be done before any server starts.

    Raises:
        EvalError: names the option and what is allowed.
    """
    baseline_of(sides, sweep)
    for spec in sweep.specs:
        arrivals(Window(spec, None, CALIBRATION), corpus, sweep.seed, sweep.amount)
