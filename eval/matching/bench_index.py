"""What matching costs as the index grows, and what keeping the index costs.

    python -m kvshare_eval.matching.bench_index

For each size: a cache of that many tokens (see ``workload``) is filled, and a third of it replaced,
so that the index has holes and dead entries. Then prompts of which nothing, half and nearly
everything is cached are planned, each one once and in changing order, on one thread.

* **time**: median and 99th percentile of ``plan_reuse``, and the slope of the median over the
  size, both as logarithms. A time that grew as the logarithm of the size would have the slope that
  is printed beside it.
* **memory**: every array of the index by the pool's slots, at its fullest.
* **upkeep**: time for a token that is inserted, split off and removed, as a share of the time in
  which it is served at a given rate; the longest single change.
* **worst cases**: one token repeated, a thousand copies, a very long prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvshare_eval.machine import machine_facts
from kvshare_eval.matching.workload import Cache
from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.plan import Int64Array

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 4_000_000)
SHARES = (0.0, 0.5, 0.95)
LIMIT = KVShareConfig().max_donors_per_window
#: Part of the cache that is replaced before anything is measured.
CHURNED = 1 / 3


@dataclass(frozen=True)
class Matching:
    """Times of one size and one share, in milliseconds."""

    indexed_tokens: int
    shared: float
    matched_tokens: float
    median_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Keeping:
    """Memory and upkeep at one size."""

    indexed_tokens: int
    bytes_per_slot: float
    upkeep_us_per_token: float
    worst_ms: dict[str, float]
    fragments_per_node: float


def planned(cache: RunIndex, prompts: list[tuple[bytes, Int64Array]]) -> tuple[list[float], float]:
    """Milliseconds of each plan, and the mean of matched tokens."""
    times, matched = [], 0
    for tenant, tokens in prompts:
        begin = time.perf_counter()
        plan = plan_reuse(cache, tokens, 0, tenant, LIMIT)
        times.append((time.perf_counter() - begin) * 1e3)
        matched += plan.matched_tokens
    return times, matched / len(prompts)


def measure(size: int, prompt_tokens: int, prompts: int) -> tuple[list[Matching], Keeping]:
    cache = Cache(size)
    cache.fill()
    cache.churn(int(size * CHURNED))
    index, upkeep = cache.index, cache.upkeep
    nodes = index.nodes_of(np.arange(index.slots))
    keeping = Keeping(
        indexed_tokens=index.live_tokens,
        bytes_per_slot=index.nbytes / index.slots,
        upkeep_us_per_token=upkeep.us_per_token,
        worst_ms=upkeep.worst_ms,
        fragments_per_node=index.fragments / np.unique(nodes[nodes >= 0]).shape[0],
    )
    times: dict[float, list[float]] = {shared: [] for shared in SHARES}
    matched: dict[float, list[float]] = {shared: [] for shared in SHARES}
    for turn in range(prompts + 1):
        for shared in SHARES:
            one, tokens = planned(index, [cache.prompt(prompt_tokens, shared)])
            if turn:  # the first one warms up
                times[shared] += one
                matched[shared].append(tokens)
    return [
        Matching(
            index.live_tokens,
            shared,
            statistics.mean(matched[shared]),
            statistics.median(times[shared]),
            float(np.percentile(times[shared], 99)),
        )
        for shared in SHARES
    ], keeping


def slope(sizes: list[int], values: list[float]) -> float:
    """Least squares of the logarithm of ``values`` over that of ``sizes``."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def repeated(tokens: int = 1_000_000) -> tuple[RunIndex, Int64Array]:
    """A prompt of one token against a cache full of it."""
    index = RunIndex(tokens, KVShareConfig().min_run_tokens)
    for node, begin in enumerate(range(0, tokens, 4_000)):
        slots = np.arange(begin, min(begin + 4_000, tokens))
        index.insert(node, b"", np.full(slots.shape[0], 7), slots, -1)
    return index, np.full(4_000, 7)


def copies(count: int = 1_000) -> tuple[RunIndex, Int64Array]:
    """One passage of 500 tokens, at another place in each of ``count`` sequences."""
    random = np.random.default_rng(2)
    passage = random.integers(0, 50_000, 500)
    index = RunIndex(1_000 * count, KVShareConfig().min_run_tokens)
    used = 0
    for node in range(count):
        own = [random.integers(0, 50_000, random.integers(1, 250)) for _ in range(2)]
        tokens = np.concatenate([own[0], passage, own[1]])
        index.insert(node, b"", tokens, np.arange(used, used + tokens.shape[0]), -1)
        used += tokens.shape[0]
    own = [random.integers(0, 50_000, 300) for _ in range(5)]
    return index, np.concatenate([part for one in own for part in (one, passage)])


def long_prompt() -> tuple[RunIndex, Int64Array]:
    """100,000 tokens, half of them cached, against a million."""
    cache = Cache(1_000_000)
    cache.fill()
    while True:
        tenant, tokens = cache.prompt(100_000, 0.5)
        if tenant == b"tenant-a":
            break
    # One namespace, so that all worst cases are asked for in the same way.
    index = RunIndex(cache.pool, KVShareConfig().min_run_tokens)
    used = 0
    for number, one in enumerate(cache.cached(tenant)):
        index.insert(number, b"", one, np.arange(used, used + one.shape[0]), -1)
        used += one.shape[0]
    return index, tokens


WORST: dict[str, Callable[[], tuple[RunIndex, Int64Array]]] = {
    "4,000 times one token, 1,000,000 of it cached": repeated,
    "4,000 tokens, 5 times a passage with 1,000 copies": copies,
    "100,000 tokens, half of them cached": long_prompt,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="TOKENS")
    parser.add_argument("--prompt-tokens", type=int, default=4_000)
    parser.add_argument("--prompts", type=int, default=200, help="for each size and share")
    parser.add_argument(
        "--rate", type=float, default=20_000, help="new tokens served in a second, for the upkeep"
    )
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    args = parser.parse_args()
    matchings: list[Matching] = []
    keepings: list[Keeping] = []
    for size in args.sizes:
        print(f"{size:,} tokens ...", file=sys.stderr, flush=True)
        some, keeping = measure(size, args.prompt_tokens, args.prompts)
        matchings += some
        keepings.append(keeping)
    worst = {}
    for name, make in WORST.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        index, tokens = make()
        worst[name] = statistics.median(planned(index, [(b"", tokens)] * 9)[0])
    command = " ".join(["python -m kvshare_eval.matching.bench_index", *sys.argv[1:]])
    facts = {"command": command, "load": f"{os.getloadavg()[0]:.1f}", **machine_facts()}
    report(matchings, keepings, worst, args.rate, facts)
    if args.out:
        figures = {
            "facts": facts,
            "matching": [asdict(one) for one in matchings],
            "keeping": [asdict(one) for one in keepings],
            "worst_ms": worst,
        }
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def report(
    matchings: list[Matching],
    keepings: list[Keeping],
    worst: dict[str, float],
    rate: float,
    facts: dict[str, str],
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(title="plan_reuse: median (99th percentile) in ms")
    table.add_column("indexed tokens", justify="right")
    for shared in SHARES:
        table.add_column(f"{shared:.0%} cached", justify="right")
    for keeping in keepings:
        row = [one for one in matchings if one.indexed_tokens == keeping.indexed_tokens]
        cells = [f"{one.median_ms:.2f} ({one.p99_ms:.2f})" for one in row]
        table.add_row(f"{keeping.indexed_tokens:,}", *cells)
    sizes = [keeping.indexed_tokens for keeping in keepings]
    if len(sizes) > 1:
        slopes = [
            slope(sizes, [one.median_ms for one in matchings if one.shared == shared])
            for shared in SHARES
        ]
        logarithm = slope(sizes, [math.log(size) for size in sizes])
        table.add_section()
        table.add_row(f"slope (of log: {logarithm:.3f})", *(f"{one:.3f}" for one in slopes))
    console.print(table)

    table = Table(title=f"memory and upkeep, served at {rate:,.0f} new tokens/s")
    columns = ("indexed tokens", "bytes a slot", "upkeep, µs a token", "of serving time")
    for column in (*columns, "longest insert, split, remove in ms", "extents a node"):
        table.add_column(column, justify="right")
    for keeping in keepings:
        table.add_row(
            f"{keeping.indexed_tokens:,}",
            f"{keeping.bytes_per_slot:.2f}",
            f"{keeping.upkeep_us_per_token:.2f}",
            f"{keeping.upkeep_us_per_token * 1e-6 * rate:.2%}",
            ", ".join(f"{ms:.1f}" for ms in keeping.worst_ms.values()),
            f"{keeping.fragments_per_node:.2f}",
        )
    console.print(table)

    table = Table(title="worst cases: median of plan_reuse in ms")
    table.add_column("prompt")
    table.add_column("ms", justify="right")
    for name, ms in worst.items():
        table.add_row(name, f"{ms:.1f}")
    console.print(table)
    for key, value in facts.items():
        console.print(f"{key}: {value}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
