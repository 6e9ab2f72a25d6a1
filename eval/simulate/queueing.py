"""What the order of the queue gains by itself: a server that does nothing but prefills.

    python -m kvshare_eval.simulate.queueing [--load 0.9] [--batch-tokens 1024]

Requests come at random (Poisson), prompts are log-normal, four in ten find nothing cached and the
others a share that is drawn. A batch is filled in the order's order up to a number of tokens to
compute, and takes a time in proportion to them. There is no decoding, no pool and no eviction: the
orders alone differ, each fed the same requests. For the whole server see ``kvshare eval simulate``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sglang_kvshare.scheduling.jobs import Waiting
from sglang_kvshare.scheduling.order import Order, Windowed, miss_share, order_named
from sglang_kvshare.scheduling.parts import ScheduleSettings

MS_PER_TOKEN = 0.1
MS_PER_BATCH = 5.0
#: Larger than any number of requests: no window.
UNBOUNDED = 10**9


@dataclass(frozen=True)
class Waits:
    """Milliseconds from arrival to the end of the prefill.

    Attributes:
        mean_ms, p99_ms, worst_ms: over all requests.
        overtaken: most younger requests that went ahead of any one.
    """

    mean_ms: float
    p99_ms: float
    worst_ms: float
    overtaken: int


def arrivals(count: int, load: float, seed: int) -> list[Waiting]:
    """Requests whose prefills alone keep the server busy for a share ``load`` of the time."""
    draw = random.Random(seed)
    requests: list[Waiting] = []
    for number in range(count):
        prompt = min(8000, max(20, round(draw.lognormvariate(6.5, 0.9))))
        share = 0.0 if draw.random() < 0.4 else draw.betavariate(2, 1)
        prefix = int(prompt * share)
        cost_ms = (prompt - prefix) * MS_PER_TOKEN
        requests.append(Waiting(f"r{number}", number, 0.0, prompt, prefix, effective_ms=cost_ms))
    mean_ms = statistics.mean(one.effective_ms for one in requests)
    now_ms = 0.0
    for one in requests:
        now_ms += draw.expovariate(load / mean_ms)
        one.arrived_ms = now_ms
    return requests


def served(requests: list[Waiting], order: Order, batch_tokens: int) -> Waits:
    """Every request once, in batches."""
    queue: list[Waiting] = []
    waits: list[float] = []
    ahead: dict[int, int] = {}
    now_ms, came = 0.0, 0
    while len(waits) < len(requests):
        if not queue:
            now_ms = max(now_ms, requests[came].arrived_ms)
        while came < len(requests) and requests[came].arrived_ms <= now_ms:
            queue.append(requests[came])
            came += 1
        batch: list[Waiting] = []
        left = batch_tokens
        for index in order.order(queue, now_ms):
            left -= queue[index].prompt_tokens - queue[index].prefix_tokens
            if batch and left < 0:
                break
            batch.append(queue[index])
        now_ms += MS_PER_BATCH + sum(one.effective_ms for one in batch)
        waits += [now_ms - one.arrived_ms for one in batch]
        gone = {one.number for one in batch}
        queue = [one for one in queue if one.number not in gone]
        for one in queue:
            younger = sum(number > one.number for number in gone)
            ahead[one.number] = ahead.get(one.number, 0) + younger
    ranked = sorted(waits)
    p99_ms = ranked[int(0.99 * len(ranked))]
    return Waits(statistics.mean(ranked), p99_ms, ranked[-1], max(ahead.values(), default=0))


#: Each is given the size of the window.
ORDERS: dict[str, Callable[[int], Order]] = {
    "fcfs": lambda window: order_named("fcfs"),
    "lpm, as SGLang": lambda window: order_named("lpm"),
    "hit-rate": lambda window: order_named("hit-rate", window),
    "hit-rate, costs not grouped": lambda window: Windowed(
        "ungrouped", miss_share, window, grouped=False
    ),
    "hit-rate, no window": lambda window: order_named("hit-rate", UNBOUNDED),
    "effective-cost": lambda window: order_named("effective-cost", window),
    "effective-cost, no window": lambda window: order_named("effective-cost", UNBOUNDED),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most-bypasses", type=int, default=ScheduleSettings().most_bypasses)
    args = parser.parse_args()
    table = Table(title=f"load {args.load:g}, batches of {args.batch_tokens:,} tokens")
    table.add_column("order")
    for column in ("mean, ms", "p99", "worst", "overtaken by"):
        table.add_column(column, justify="right")
    for name, make in ORDERS.items():
        runs = [
            served(
                arrivals(args.requests, args.load, seed),
                make(args.most_bypasses),
                args.batch_tokens,
            )
            for seed in range(args.seeds)
        ]
        mean, p99, worst = (
            statistics.mean(getattr(run, figure) for run in runs)
            for figure in ("mean_ms", "p99_ms", "worst_ms")
        )
        overtaken = max(run.overtaken for run in runs)
        table.add_row(name, f"{mean:,.0f}", f"{p99:,.0f}", f"{worst:,.0f}", f"{overtaken:,}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
