"""Costs of a running server: prefills and decode steps of many sizes, and a fit with its error.

Prefill: prompts of several lengths, alone, one token asked: the time to it. Decode: several at a
time with prompts of several lengths: the median gap while all of them decode. The fits are
non-negative least squares of relative errors, so that short forwards count as much as long ones.
What the client and the HTTP server take is part of both, as it is of what users feel.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from kvshare_eval.errors import EvalError
from kvshare_eval.serving.workloads import LoadRequest
from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.measuring import flush, server_info, together, unseen


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        prompts: lengths of prefills.
        batches: requests that decode at a time.
        contexts: lengths of their prompts.
        steps: decode steps that are measured.
        repeats: of each size; the median counts.
    """

    prompts: Sequence[int] = (16, 64, 128, 256, 512, 1024, 2048)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    contexts: Sequence[int] = (32, 512)
    steps: int = 12
    repeats: int = 3


@dataclass(frozen=True)
class Point:
    """One measured size: what the fit is over, and the median time."""

    kind: str
    sizes: tuple[float, ...]
    ms: float
    told_ms: float = float("nan")

    @property
    def error(self) -> float:
        return self.told_ms / self.ms - 1


@dataclass(frozen=True)
class Calibrated:
    costs: Costs
    points: tuple[Point, ...]

    def worst_error(self, kind: str) -> float:
        return max(abs(point.error) for point in self.points if point.kind == kind)


async def calibrate(
    url: str, start: Costs, plan: Plan, *, seed: int = 1, say: Callable[[str], None] = print
) -> Calibrated:
    """Measure the server at ``url``; what is not measured stays as in ``start``.

    Raises:
        EvalError: it cannot be reached, or a request fails.
    """
    info = await server_info(url)
    rng = random.Random(seed)
    await flush(url)
    await together(url, [LoadRequest(unseen(rng, 64), 4, 0)])
    limit = _chunk(info.get("chunked_prefill_size"))
    points = []
    for tokens in plan.prompts:
        if tokens > limit:
            say(f"prompts of {tokens} tokens are left out: the server computes them in chunks")
            continue
        ms = [
            await _ttft_ms(url, LoadRequest(unseen(rng, tokens), 1, 0)) for _ in range(plan.repeats)
        ]
        points.append(Point("prefill", (1.0, tokens, tokens**2), statistics.median(ms)))
        say(f"prefill of {tokens} tokens: {points[-1].ms:.1f} ms")
    for batch in plan.batches:
        for context in plan.contexts:
            ms = [await _gap_ms(url, rng, batch, context, plan.steps) for _ in range(plan.repeats)]
            sizes = (1.0, batch, batch * (context + plan.steps / 2))
            points.append(Point("decode", sizes, statistics.median(ms)))
            say(f"decode of {batch} behind {context} tokens: {points[-1].ms:.1f} ms")
    return _fitted(start, points)


def _fitted(start: Costs, points: Sequence[Point]) -> Calibrated:
    prefill = _fit([point for point in points if point.kind == "prefill"])
    decode = _fit([point for point in points if point.kind == "decode"])
    costs = replace(
        start,
        prefill_floor_ms=prefill[0],
        prefill_row_ms=prefill[1],
        prefill_pair_ms=prefill[2],
        prefill_least_ms=0.0,
        decode_floor_ms=decode[0],
        decode_request_ms=decode[1],
        decode_context_ms=decode[2],
        pass_ms=0.0,
    )
    told = {"prefill": prefill, "decode": decode}
    filled = tuple(
        replace(point, told_ms=float(np.dot(told[point.kind], point.sizes))) for point in points
    )
    return Calibrated(costs, filled)


def _fit(points: Sequence[Point]) -> list[float]:
    if len(points) < 3:
        raise EvalError(f"{len(points)} sizes were measured: a fit needs three at least")
    ms = np.array([point.ms for point in points])
    table = np.array([point.sizes for point in points]) / ms[:, None]
    # Columns of like size, or the solver would stop at the largest.
    scale = table.max(axis=0)
    solved, _ = nnls(table / scale, np.ones(len(points)))
    return [float(value) for value in solved / scale]


async def _ttft_ms(url: str, request: LoadRequest) -> float:
    (got,) = await together(url, [request])
    assert got.first is not None
    return (got.first - got.sent) * 1e3


async def _gap_ms(url: str, rng: random.Random, batch: int, context: int, steps: int) -> float:
    """Median gap while all of them decode."""
    # Those that came first wait for the prefills of the others: more steps than are measured.
    requests = [LoadRequest(unseen(rng, context), steps + batch + 2, 0) for _ in range(batch)]
    got = await together(url, requests)
    begin = max(one.first for one in got if one.first is not None)
    end = min(one.last for one in got if one.last is not None)
    gaps = []
    for one in got:
        assert one.first is not None
        moment = one.first
        for gap in one.gaps:
            if moment >= begin and moment + gap <= end:
                gaps.append(gap)
            moment += gap
    if not gaps:
        raise EvalError(f"{url}: no step in which all {batch} decoded")
    return statistics.median(gaps) * 1e3


def copy_bandwidth(size_bytes: int = 1 << 26, repeats: int = 5) -> float:
    """Bytes a millisecond of this machine's memory: what a swap takes where KV is in it."""
    source = np.zeros(size_bytes, dtype=np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append((time.perf_counter() - began) * 1e3)
    return size_bytes / statistics.median(times)


def _chunk(size: int | None) -> float:
    return float("inf") if size is None or size < 0 else size
