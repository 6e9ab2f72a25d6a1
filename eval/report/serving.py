"""A serving run, summarised: for each workload, rate and side; and sides next to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvshare_eval.errors import EvalError
from kvshare_eval.run_dir import Run
from kvshare_eval.serving.record import RequestRecord, WindowRecord
from kvshare_eval.stats import serving as stats
from kvshare_eval.stats.bootstrap import Interval

#: What others are held against, the first of these that a run has.
REFERENCE_SIDES = ("stock", "off")
_ORDER = ("stock", "off", "reuse")


@dataclass(frozen=True)
class Cell:
    """One workload at one rate on one side, all repeats."""

    workload: str
    rate: float | None
    side: str
    load: stats.Load

    @property
    def share(self) -> float | None:
        known = [w.reusable_share for w, _ in self.load.windows if w.reusable_share is not None]
        return float(np.mean(known)) if known else None

    @property
    def prompt_tokens(self) -> float:
        return float(np.median([window.prompt_tokens for window, _ in self.load.windows]))

    @property
    def repeats(self) -> dict[int, stats.Load]:
        return {pair[0].repeat: stats.Load((pair,)) for pair in self.load.windows}

    @property
    def kv_tokens_peak(self) -> int | None:
        known = [w.kv_tokens_peak for w, _ in self.load.windows if w.kv_tokens_peak is not None]
        return max(known, default=None)

    @property
    def kv_bytes_peak(self) -> int | None:
        known = [w.kv_bytes_peak for w, _ in self.load.windows if w.kv_bytes_peak is not None]
        return max(known, default=None)

    @property
    def family(self) -> str:
        """The workload without the option that sweeps the reusable share."""
        name, _, options = self.workload.partition(":")
        kept = [o for o in options.split(",") if o and o.partition("=")[0] != "share"]
        return f"{name}:{','.join(kept)}" if kept else name


Times = Callable[[stats.Load], tuple[list[float], list[stats.Block]]]


@dataclass(frozen=True)
class Measure:
    """A figure of one window or more.

    Attributes:
        name: with the percentile.
        of: computes it; ``None`` where it cannot be told.
        lower_is_better: else higher.
        times: what it is a percentile of; ``None`` for a figure of whole windows, which has no
            spread inside of one.
        q: the percentile, from 0 to 1.
    """

    name: str
    of: Callable[[stats.Load, stats.Slo | None], float | None]
    lower_is_better: bool
    times: Times | None = None
    q: float = 0.5


def _percentile(name: str, times: Times, q: float) -> Measure:
    def of(load: stats.Load, slo: stats.Slo | None) -> float | None:
        values, _ = times(load)
        return float(np.quantile(values, q)) if stats.tells_percentile(len(values), q) else None

    return Measure(f"{name} p{100 * q:.0f}", of, True, times, q)


#: Where no request was served (in time), a ratio takes this many, to stay finite and above 0.
_NO_REQUEST = 0.5


def _requests(load: stats.Load, slo: stats.Slo | None) -> float | None:
    return max(len(load.done), _NO_REQUEST) / load.seconds if load.seconds > 0 else None


def _goodput(load: stats.Load, slo: stats.Slo | None) -> float | None:
    if slo is None or load.seconds <= 0:
        return None
    return max(sum(map(slo.met, load.requests)), _NO_REQUEST) / load.seconds


MEASURES = (
    _percentile("TTFT", stats.ttft, 0.5),
    _percentile("TTFT", stats.ttft, 0.95),
    _percentile("TBT", stats.tbt, 0.5),
    _percentile("e2e", stats.e2e, 0.5),
    Measure("throughput", _requests, False),
    Measure("goodput", _goodput, False),
    Measure("CPU a request", lambda load, slo: stats.cpu_seconds_per_request(load), True),
)


@dataclass(frozen=True)
class Ratio:
    """A side's figure over the reference side's, paired by repeat."""

    workload: str
    rate: float | None
    side: str
    reference: str
    measure: Measure
    ratio: Interval


@dataclass(frozen=True)
class Saturation:
    """Up to which rate a side keeps its SLO, and up to which its throughput follows the load."""

    workload: str
    side: str
    slo: stats.Knee | None
    throughput: stats.Knee | None


@dataclass(frozen=True)
class Slos:
    """The objectives of a run: those of its settings, or one for each workload."""

    every: stats.Slo | None
    by_workload: Mapping[str, stats.Slo]

    def of(self, workload: str) -> stats.Slo | None:
        """``None`` where no bound is set."""
        return self.by_workload.get(workload, self.every)


def read_slos(run: Run) -> Slos:
    """Of the run's settings, and of its records where limits were found by measuring."""
    mine = [record for record in run.records if record.get("type") == "slo"]
    found = {record["workload"]: _slo(record) for record in mine}
    return Slos(
        _slo(run.settings.get("slo") or {}),
        {workload: slo for workload, slo in found.items() if slo is not None},
    )


def _slo(raw: Mapping[str, Any]) -> stats.Slo | None:
    if raw.get("ttft_ms") is None and raw.get("tbt_ms") is None:
        return None
    return stats.Slo(raw.get("ttft_ms"), raw.get("tbt_ms"), raw.get("tbt_of", "mean"))


def cells(run: Run) -> list[Cell]:
    """All cells in order of workload, rate and side.

    Raises:
        EvalError: a record that is none of a serving run.
    """
    windows: dict[str, WindowRecord] = {}
    requests: dict[str, list[RequestRecord]] = {}
    for raw in run.records:
        if raw.get("type") in _ABOUT_THE_RUN:
            continue
        record = _read(run, raw)
        if isinstance(record, WindowRecord):
            windows[record.key] = record
        else:
            requests.setdefault(record.window, []).append(record)
    found: dict[tuple[str, float | None, str], list[Any]] = {}
    for key, window in windows.items():
        arrived = tuple(sorted(requests.get(key, ()), key=lambda request: request.number))
        found.setdefault((window.workload, window.rate, window.side), []).append((window, arrived))
    return [
        Cell(workload, rate, side, stats.Load(tuple(pairs)))
        for (workload, rate, side), pairs in sorted(
            found.items(), key=lambda item: (item[0][0], item[0][1] or 0.0, _place(item[0][2]))
        )
    ]


#: Records about servers, and what was found out before the windows.
_ABOUT_THE_RUN = ("server", "calibration", "slo")


def _place(side: str) -> tuple[int, str]:
    return (_ORDER.index(side) if side in _ORDER else len(_ORDER), side)


def _read(run: Run, raw: dict[str, Any]) -> WindowRecord | RequestRecord:
    values = dict(raw)
    kind = values.pop("type", None)
    try:
        if kind == "window":
            return WindowRecord(**values)
        if kind == "request":
            return RequestRecord(**{**values, "tbt_ms": tuple(values["tbt_ms"])})
    except (KeyError, TypeError) as error:
        raise EvalError(f"{run.name}: record {raw.get('key')!r} cannot be read: {error}") from None
    raise EvalError(f"{run.name}: record {raw.get('key')!r}: type={kind!r} is not known")


def reference_side(found: list[Cell]) -> str | None:
    sides = {cell.side for cell in found}
    return next((side for side in REFERENCE_SIDES if side in sides), None)


def ratios(found: list[Cell], slos: Slos) -> list[Ratio]:
    """Every other side against the reference side, wherever both were measured."""
    reference = reference_side(found)
    base = {(cell.workload, cell.rate): cell for cell in found if cell.side == reference}
    return [
        Ratio(cell.workload, cell.rate, cell.side, str(reference), measure, ratio)
        for cell in found
        if cell.side != reference and (cell.workload, cell.rate) in base
        for measure in MEASURES
        if (ratio := by_repeat(cell, base[(cell.workload, cell.rate)], measure, slos)) is not None
    ]


def by_repeat(new: Cell, base: Cell, measure: Measure, slos: Slos) -> Interval | None:
    """Ratio over the repeats in which both have the figure, and it is above 0."""
    pairs = []
    slo = slos.of(new.workload)
    ours, theirs = new.repeats, base.repeats
    for repeat in sorted(ours.keys() & theirs.keys()):
        pair = (measure.of(ours[repeat], slo), measure.of(theirs[repeat], slo))
        if pair[0] and pair[1]:
            pairs.append((pair[0], pair[1]))
    return stats.paired_ratio([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None


def saturation(found: list[Cell], slos: Slos) -> list[Saturation]:
    """One row for every workload and side with at least two rates."""
    sweeps: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        if cell.rate is not None and cell.load.requests:
            sweeps.setdefault((cell.workload, cell.side), []).append(cell)
    return [
        Saturation(
            workload,
            side,
            _slo_knee(sweep, slos.of(workload)),
            _knee(sweep, _followed, stats.FOLLOWED),
        )
        for (workload, side), sweep in sweeps.items()
        if len(sweep) > 1
    ]


def _slo_knee(sweep: list[Cell], slo: stats.Slo | None) -> stats.Knee | None:
    return None if slo is None else _knee(sweep, lambda cell: stats.attainment(cell.load, slo))


def _followed(cell: Cell) -> float | None:
    done = stats.throughput(cell.load)
    return None if done is None or not cell.rate else done.requests / cell.rate


def _knee(
    sweep: list[Cell], figure: Callable[[Cell], float | None], threshold: float = stats.ATTAINED
) -> stats.Knee | None:
    known = [(cell.rate, value) for cell in sweep if (value := figure(cell)) is not None]
    return stats.knee([rate or 0.0 for rate, _ in known], [value for _, value in known], threshold)
