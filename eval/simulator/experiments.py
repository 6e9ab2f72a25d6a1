"""Experiments: sides against each other, each part off and alone, the loads that a side stands.

A repeat is a seed: other arrivals and lengths of a synthetic workload, other starts of a trace's
copies. All sides meet the same requests in each, so that they are compared repeat by repeat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.machine import Machine
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.results import Outcome, outcome
from kvshare_eval.simulator.settings import PARTS, Flags, side_named
from kvshare_eval.simulator.workloads import make_workload
from kvshare_eval.stats.bootstrap import Interval
from kvshare_eval.stats.serving import paired_ratio

#: Attainment of a load that is served.
SERVED = 0.9
#: Bisections of a range of rates: to within 2 % of a factor of 4.
_BISECTIONS = 6


@dataclass(frozen=True)
class Setup:
    """What stays the same for all sides of an experiment.

    Attributes:
        workload: as :func:`make_workload` reads it.
        count: requests of a run.
        data: folder of the traces.
        costs, flags: the machine.
        ttft_slo_ms, tbt_slo_ms: of all requests; ``None`` for none.
    """

    workload: str
    count: int
    data: Path | None
    costs: Costs
    flags: Flags
    ttft_slo_ms: float | None = None
    tbt_slo_ms: float | None = None


@dataclass(frozen=True)
class Run:
    """One simulation to do: a side at a mean rate (0: the workload's own), with a seed."""

    setup: Setup
    side: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.setup.workload}/{self.side}/{self.rate:g}/{self.seed}"


def simulate(run: Run) -> Outcome:
    setup = run.setup
    requests = _requests(setup.workload, setup.count, run.seed, setup.data)
    if run.rate:
        requests = requests.at_rate(run.rate)
    requests = requests.with_slo(setup.ttft_slo_ms, setup.tbt_slo_ms)
    machine = Machine(requests, setup.costs, setup.flags, side_named(run.side))
    return outcome(requests, machine.run(), setup.flags.pool_tokens)


@lru_cache(maxsize=2)
def _requests(workload: str, count: int, seed: int, data: Path | None) -> Requests:
    """A trace is read once for all rates and sides that meet it."""
    return make_workload(workload, count, seed, data)


@dataclass
class Laboratory:
    """Does runs, each once, on some processes.

    Attributes:
        jobs: processes.
        known: outcomes by key, of this or an earlier session.
        done: called with each run that was simulated.
    """

    jobs: int = 1
    known: dict[str, Outcome] = field(default_factory=dict)
    done: Callable[[Run, Outcome], None] = lambda run, result: None

    def all(self, runs: Sequence[Run]) -> list[Outcome]:
        """Outcomes in the order of ``runs``."""
        new = list({run.key: run for run in runs if run.key not in self.known}.values())
        for run, result in zip(new, self._map(new), strict=True):
            self.known[run.key] = result
            self.done(run, result)
        return [self.known[run.key] for run in runs]

    def _map(self, runs: Sequence[Run]) -> Iterator[Outcome]:
        if self.jobs == 1 or len(runs) < 2:
            yield from map(simulate, runs)
            return
        with ProcessPoolExecutor(self.jobs) as pool:
            yield from pool.map(simulate, runs)

    def mean(self, setup: Setup, side: str, rate: float, seeds: Sequence[int], of: str) -> float:
        outcomes = self.all([Run(setup, side, rate, seed) for seed in seeds])
        return statistics.fmean(getattr(each, of) for each in outcomes)


def ablation_sides() -> list[str]:
    """Stock, all of KVShare's parts, each of them off, and each alone."""
    return [
        "stock",
        "kvshare",
        *(f"kvshare-{part}" for part in PARTS),
        *(f"stock+{part}" for part in PARTS),
    ]


def rate_at(
    share: Callable[[float], float], wanted: float, first: float, *, most: float = 1e3
) -> float:
    """The rate at which an attainment falls to ``wanted``, to within 2 %.

    Attainment falls with the rate but for noise. From ``first`` on the rate is doubled or halved
    until the two sides of the border are known, then the border is bisected on a log scale. A
    border further off than a factor ``most`` is not found; the last rate tried stands for it.
    """
    low = high = first
    if share(first) >= wanted:
        while high < first * most and share(high) >= wanted:
            low, high = high, high * 2
    else:
        while low > first / most and share(low) < wanted:
            low, high = low / 2, low
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        if share(middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Against:
    """A side against a base at the same load, repeat by repeat.

    Attributes:
        ratios: base over side, of times: above 1 the side is better.
        gains: side less base, of shares, in points: the mean over repeats.
    """

    side: str
    ratios: Mapping[str, Interval]
    gains: Mapping[str, float]


#: Times that are compared, and shares.
TIMES = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tbt_p99_ms", "mean_tbt_p99_ms")
SHARES = ("ttft_slo", "tbt_slo", "slo")


def against(side: str, ours: Sequence[Outcome], base: Sequence[Outcome]) -> Against:
    ratios = {}
    for name in TIMES:
        pairs = [(getattr(b, name), getattr(a, name)) for a, b in zip(ours, base, strict=True)]
        if all(0 < value < math.inf for pair in pairs for value in pair):
            ratios[name] = paired_ratio([top for top, _ in pairs], [low for _, low in pairs])
    gains = {
        name: 100
        * statistics.fmean(
            getattr(a, name) - getattr(b, name) for a, b in zip(ours, base, strict=True)
        )
        for name in SHARES
    }
    return Against(side, ratios, gains)


@dataclass(frozen=True)
class Sweep:
    """What a load sweep found.

    Attributes:
        half_rate: requests a second at which stock's attainment falls to half.
        served_rates: the highest with 90 % attainment, by side.
        at_half: outcomes of each side at ``half_rate``, by repeat.
    """

    half_rate: float
    served_rates: Mapping[str, float]
    at_half: Mapping[str, Sequence[Outcome]]


def sweep(
    laboratory: Laboratory,
    setup: Setup,
    sides: Sequence[str],
    seeds: Sequence[int],
    first_rate: float,
    *,
    base: str = "stock",
    of: str = "slo",
) -> Sweep:
    """Find the two loads, and compare the sides at the first. The search takes the first seed."""

    def share(side: str) -> Callable[[float], float]:
        return lambda rate: laboratory.mean(setup, side, rate, seeds[:1], of)

    half = _round(rate_at(share(base), 0.5, first_rate))
    served = {side: _round(rate_at(share(side), SERVED, half)) for side in sides}
    at_half = {
        side: laboratory.all([Run(setup, side, half, seed) for seed in seeds]) for side in sides
    }
    return Sweep(half, served, at_half)


def _round(rate: float) -> float:
    """Three digits: rates go into keys and tables."""
    return float(f"{rate:.3g}")


def to_record(run: Run, result: Outcome) -> dict[str, Any]:
    return {
        "key": run.key,
        "workload": run.setup.workload,
        "side": run.side,
        "rate": run.rate,
        "seed": run.seed,
        **result.to_record(),
    }
