"""Figures of a serving run: latency, throughput, goodput, saturation, hits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvshare_eval.serving.record import RequestRecord, WindowRecord
from kvshare_eval.stats.bootstrap import Interval, Sample, bootstrap_ci, mean, quantile

#: Share of requests within their SLO up to which a server is not saturated.
ATTAINED = 0.9
#: Completed over offered requests down to which throughput follows the load.
FOLLOWED = 0.9
KINDS = ("prefix", "reused", "recomputed", "new")
#: A window's key and a number: requests that were served one after the other.
Block = tuple[str, int]


@dataclass(frozen=True)
class Slo:
    """A service-level objective, in milliseconds; ``None`` sets no bound.

    ``tbt_of``: what of a request's gaps between tokens is held against ``tbt_ms``.
    """

    ttft_ms: float | None
    tbt_ms: float | None
    tbt_of: Literal["mean", "p99"] = "mean"

    def met(self, request: RequestRecord) -> bool:
        """A failed request meets none; one that has a single token has no gaps to be slow in."""
        if not completed(request):
            return False
        assert request.ttft_ms is not None
        if self.ttft_ms is not None and request.ttft_ms > self.ttft_ms:
            return False
        if self.tbt_ms is None or not request.tbt_ms:
            return True
        gaps = np.asarray(request.tbt_ms)
        slow = gaps.mean() if self.tbt_of == "mean" else np.quantile(gaps, 0.99)
        return bool(slow <= self.tbt_ms)


@dataclass(frozen=True)
class Load:
    """Windows of the same load on the same side, with their requests in order of arrival."""

    windows: tuple[tuple[WindowRecord, tuple[RequestRecord, ...]], ...]

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        return tuple(request for _, requests in self.windows for request in requests)

    @property
    def seconds(self) -> float:
        return sum(window.seconds for window, _ in self.windows)

    @property
    def done(self) -> tuple[RequestRecord, ...]:
        return tuple(filter(completed, self.requests))


@dataclass(frozen=True)
class Throughput:
    """Completed work a second."""

    requests: float
    prompt_tokens: float
    output_tokens: float


def completed(request: RequestRecord) -> bool:
    return request.error is None and request.ttft_ms is not None


def ttft(load: Load) -> tuple[list[float], list[Block]]:
    """Times to the first token in ms, and the block that each belongs to (see :func:`blocks`)."""
    return _times(load, lambda request: [request.ttft_ms])


def e2e(load: Load) -> tuple[list[float], list[Block]]:
    return _times(load, lambda request: [request.e2e_ms])


def tbt(load: Load) -> tuple[list[float], list[Block]]:
    """All gaps between tokens, of all requests."""
    return _times(load, lambda request: request.tbt_ms)


def _in_blocks(load: Load) -> Iterable[tuple[RequestRecord, Block]]:
    """All requests with their block.

    Requests that follow each other wait in the same queue, so a block of some ``sqrt(n)`` of them
    is what is resampled, not a request.
    """
    for window, requests in load.windows:
        size = max(1, round(math.sqrt(len(requests))))
        for index, request in enumerate(requests):
            yield request, (window.key, index // size)


def _times(
    load: Load, of: Callable[[RequestRecord], Sequence[float | None]]
) -> tuple[list[float], list[Block]]:
    """Times of completed requests."""
    rows = [
        (time, block)
        for request, block in _in_blocks(load)
        if completed(request)
        for time in of(request)
        if time is not None
    ]
    return [time for time, _ in rows], [block for _, block in rows]


def tells_percentile(count: int, q: float) -> bool:
    """With fewer than ``1 / (1 - q)`` values that high a percentile is but the largest."""
    return count > 0 and count * (1 - q) >= 1 - 1e-9


def percentile(values: Sequence[float], blocks: Sequence[Block], q: float) -> Interval | None:
    """``None`` where there are too few values (see :func:`tells_percentile`)."""
    if not tells_percentile(len(values), q):
        return None
    return bootstrap_ci(Sample.of(values, blocks), quantile(q))


def attainment(load: Load, slo: Slo) -> float | None:
    """Share of all requests, failed ones included, that meet the SLO."""
    requests = load.requests
    return sum(map(slo.met, requests)) / len(requests) if requests else None


def attainment_interval(load: Load, slo: Slo) -> Interval | None:
    """The same with its interval over blocks."""
    rows = [(float(slo.met(request)), block) for request, block in _in_blocks(load)]
    if not rows:
        return None
    return bootstrap_ci(Sample.of([met for met, _ in rows], [block for _, block in rows]), mean)


def goodput(load: Load, slo: Slo) -> float | None:
    """Requests a second that meet the SLO."""
    return sum(map(slo.met, load.requests)) / load.seconds if load.seconds > 0 else None


def throughput(load: Load) -> Throughput | None:
    if load.seconds <= 0:
        return None
    done = load.done
    return Throughput(
        requests=len(done) / load.seconds,
        prompt_tokens=sum(r.prompt_tokens for r in done) / load.seconds,
        output_tokens=sum(r.output_tokens for r in done) / load.seconds,
    )


def hit_shares(load: Load) -> dict[str, float] | None:
    """Share of all prompt tokens by kind; a stock server tells its exact prefix only."""
    totals = dict.fromkeys(KINDS, 0)
    for request in load.done:
        if request.report:
            for kind in KINDS:
                totals[kind] += int(request.report.get(f"{kind}_tokens", 0))
        else:
            totals["prefix"] += request.cached_tokens
            totals["new"] += request.prompt_tokens - request.cached_tokens
    whole = sum(totals.values())
    return {kind: count / whole for kind, count in totals.items()} if whole else None


def cpu_seconds_per_request(load: Load) -> float | None:
    """Of the scheduler process; ``None`` unless every window knows its CPU time."""
    times = [window.scheduler_cpu_s for window, _ in load.windows]
    known = [time for time in times if time is not None]
    done = len(load.done)
    return sum(known) / done if done and len(known) == len(times) else None


def paired_ratio(new: Sequence[float], base: Sequence[float]) -> Interval:
    """Geometric mean of ``new / base`` over repeats, with Student's t on the logarithms.

    Repeats are few and the differences between them (what else the machine does) are larger than
    those inside of one: the repeat is the unit, and t is honest with two of them.

    Raises:
        ValueError: no repeats, or a figure that is not above 0.
    """
    from scipy import special

    if not new or min(*new, *base) <= 0:
        raise ValueError("ratios need at least one repeat and figures above 0")
    logs = np.log(new) - np.log(base)
    n, center = len(logs), float(logs.mean())
    if n < 2:
        return Interval(math.exp(center), None, None, n, n)
    spread = float(special.stdtrit(n - 1, 0.975)) * float(logs.std(ddof=1)) / math.sqrt(n)
    return Interval(math.exp(center), math.exp(center - spread), math.exp(center + spread), n, n)


@dataclass(frozen=True)
class Knee:
    """The highest load that is still served, in requests a second.

    ``at_least``: the sweep ended before it; ``below``: its lowest rate was too much already, and
    ``rate`` is that rate.
    """

    rate: float
    at_least: bool = False
    below: bool = False


def knee(rates: Sequence[float], figures: Sequence[float], threshold: float) -> Knee | None:
    """The highest rate at which a figure is at least ``threshold``, interpolated.

    Give attainment to get the knee by SLO, or completed over offered requests to learn up to where
    throughput follows the load. ``None`` without rates.
    """
    points = sorted(zip(rates, figures, strict=True))
    if not points:
        return None
    good = [index for index, (_, figure) in enumerate(points) if figure >= threshold]
    if not good:
        return Knee(points[0][0], below=True)
    rate, figure = points[good[-1]]
    if good[-1] == len(points) - 1:
        return Knee(rate, at_least=True)
    next_rate, next_figure = points[good[-1] + 1]
    part = (figure - threshold) / (figure - next_figure)
    return Knee(rate + part * (next_rate - rate))
