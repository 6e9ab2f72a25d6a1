"""Does memory stay flat? Tens of thousands of requests of every kind through one scheduler.

    python -m kvshare_eval.serving.bench_memory [--requests 50000]

SGLang's own scheduler runs in this process over a model with random weights (nothing is
downloaded). Requests are short and of mixed kinds: new text, cached passages in other orders, the
same prompt again, follow-up turns; every reuse mode; a new cache salt for one in four; one in ten
is aborted; now and then the cache is flushed. The KV pool is full all the time.

Sampled every few hundred requests: resident memory, entries and namespaces of the run index, tree
nodes, live Python objects, and what is kept for requests. Memory is flat when

* the fitted growth of resident memory over the second half of the run, at the upper end of its 95 %
  confidence interval, stays below ``MAX_GROWTH`` bytes a request: far less than the smallest thing
  that could be kept for one (a ``Req`` takes some 5,000 bytes);
* the index holds no more namespaces than the pool has pages, and no more entries than twice the
  pool and its constant;
* when everything has ended and the cache is flushed, nothing is left of any request.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvshare_eval.machine import machine_facts
from sglang_kvshare.config import KVShareConfig

if TYPE_CHECKING:
    from kvshare_eval.live.scheduler import LiveScheduler

#: Bytes of resident memory a request: the criterion.
MAX_GROWTH = 200.0
POOL_TOKENS = 2048
PAGE_SIZE = 16
#: Requests in flight.
CONCURRENCY = 16
VOCABULARY = 256
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute_ratio": 0.0},
    {"recompute_ratio": 0.3},
    {"recompute_ratio": 1.0},
    {"reuse": "exact_prefix"},
    {"reuse": "off"},
)
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "float32",
}


COUNTED = {
    "finished": "requests that ended by themselves",
    "aborted": "requests that were aborted",
    "prefix": "tokens taken from the exact prefix",
    "reused": "tokens taken from elsewhere in the cache",
    "flushes": "flushes",
}


@dataclass(frozen=True)
class Sample:
    """One look at the process after ``requests`` have ended."""

    requests: int
    rss_bytes: int
    index_entries: int
    namespaces: int
    tree_nodes: int
    held: int
    objects: int


@dataclass(frozen=True)
class Growth:
    """Least-squares slope of resident memory, bytes a request, and its 95 % interval."""

    slope: float
    low: float
    high: float
    samples: int


def fitted_growth(requests: Sequence[int], rss_bytes: Sequence[int]) -> Growth:
    """The slope of a straight line through the samples.

    Samples of one process follow each other, so that their residuals are alike; the standard
    error is widened by the residuals' lag-1 correlation (an effective number of samples).
    """
    count = len(requests)
    if count < 8:
        raise ValueError(f"{count} samples are too few for a slope; run more requests")
    slope, intercept = statistics.linear_regression(requests, rss_bytes)
    residuals = [y - intercept - slope * x for x, y in zip(requests, rss_bytes, strict=True)]
    squares = sum(r * r for r in residuals)
    alike = 0.0
    if squares > 0:
        alike = sum(a * b for a, b in pairwise(residuals)) / squares
    alike = min(max(alike, 0.0), 0.95)
    effective = max(3.0, count * (1 - alike) / (1 + alike))
    center = statistics.fmean(requests)
    spread = sum((x - center) ** 2 for x in requests)
    error = math.sqrt(squares / (effective - 2) / spread * count / effective)
    # Student's t for a few degrees of freedom, without scipy: Cornish-Fisher about the normal.
    z, degrees = 1.959964, effective - 2
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return Growth(slope, slope - t * error, slope + t * error, count)


class Traffic:
    """Requests of every kind, the same ones in every run."""

    def __init__(self) -> None:
        self._rng = random.Random(5)
        self._passages = [self._text(self._rng.randint(20, 60)) for _ in range(24)]
        self._recent: list[list[int]] = [self._text(30)]
        self.number = 0

    def next(self) -> tuple[str, list[int], int, dict[str, Any]]:
        """(rid, prompt, output tokens, further arguments of ``submit``)."""
        rng = self._rng
        self.number += 1
        kind = rng.randrange(4)
        if kind == 0:
            prompt = self._text(rng.randint(4, 60))
        elif kind == 1:
            prompt = self._text(rng.randint(0, 4))
            for passage in rng.sample(self._passages, rng.randint(1, 3)):
                prompt = [*prompt, *passage, *self._text(1)]
        elif kind == 2:
            prompt = rng.choice(self._recent)
        else:
            prompt = [*rng.choice(self._recent), *self._text(rng.randint(1, 20))][:160]
        self._recent = [*self._recent[-20:], prompt]
        salt = f"tenant-{self.number}" if rng.random() < 0.25 else None
        extra = {"kvshare": rng.choice(MODES), "cache_salt": salt}
        return f"r{self.number:08d}", prompt, rng.randint(1, 4), extra

    def unlucky(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _text(self, length: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(length)]


def build(folder: Path) -> LiveScheduler:
    from kvshare_eval.live.scheduler import LiveScheduler

    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return LiveScheduler(
        folder,
        # A model of this size gains nothing, and the gate would say so.
        KVShareConfig(
            min_run_tokens=8, min_saved_tokens=1, seam_tokens=2, tail_tokens=2, gate="off"
        ),
        load_format="dummy",
        page_size=PAGE_SIZE,
        max_total_tokens=POOL_TOKENS,
        max_running_requests=CONCURRENCY,
        chunked_prefill_size=256,
    )


class Run:
    """Sends the requests and keeps the samples."""

    def __init__(self, live: LiveScheduler, requests: int, samples: int) -> None:
        self.live, self.requests = live, requests
        self.every = max(1, requests // samples)
        self.samples: list[Sample] = []
        self.counts = dict.fromkeys(COUNTED, 0)

    def drive(self, console: Console) -> None:
        traffic, flight, done = Traffic(), set[str](), 0
        while done < self.requests or flight:
            while len(flight) < CONCURRENCY and done + len(flight) < self.requests:
                rid, prompt, n_new, extra = traffic.next()
                self.live.submit(rid, prompt, n_new, **extra)
                flight.add(rid)
                if traffic.unlucky(0.1):
                    self.live.abort(rid)
            self.live.step()
            while self.live.finished:
                rid, finished = self.live.finished.popitem()
                flight.remove(rid)
                done += 1
                self._count(finished)
                if done % self.every == 0:
                    self._sample(done)
                    if len(self.samples) % 10 == 0:
                        console.print(self.samples[-1])
                if traffic.unlucky(1 / 2000):
                    # Refused while anything is in flight, so wait for what is.
                    self.live.drain()
                    self.counts["flushes"] += self.live.flush()

    def _count(self, finished: Any) -> None:
        self.counts["aborted" if finished.reason == "abort" else "finished"] += 1
        if finished.report is not None:
            self.counts["reused"] += finished.report["reused_tokens"]
            self.counts["prefix"] += finished.report["prefix_tokens"]

    def _sample(self, done: int) -> None:
        from sglang_kvshare.engine.state import RequestState

        gc.collect()
        objects = gc.get_objects()
        cache = self.live.cache
        self.samples.append(
            Sample(
                requests=done,
                rss_bytes=resident_bytes(),
                index_entries=cache.index.entries,
                namespaces=cache.index.namespaces,
                tree_nodes=len(cache.mirror._nodes),
                held=sum(isinstance(thing, RequestState) for thing in objects),
                objects=len(objects),
            )
        )


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def verdict(run: Run, growth: Growth, left: dict[str, int]) -> list[str]:
    """What is not flat; empty when all is well."""
    pages = POOL_TOKENS // PAGE_SIZE
    most = {
        "namespaces": pages,
        # Dead entries stay until they are half of all (`WindowTable.compact`).
        "index_entries": 2 * POOL_TOKENS + 1024,
        "tree_nodes": pages,
        # One for each request in flight, and a few that a batch still points at.
        "held": 4 * CONCURRENCY,
    }
    faults = [
        f"{name} rose to {worst}, more than {limit}"
        for name, limit in most.items()
        if (worst := max(getattr(sample, name) for sample in run.samples)) > limit
    ]
    if growth.high > MAX_GROWTH:
        faults.append(f"resident memory may grow by {growth.high:.0f} bytes a request")
    faults += [f"{count} {what} left at the end" for what, count in left.items() if count]
    if not run.counts["reused"] or not run.counts["prefix"]:
        faults.append("nothing was reused: the run did not do what it is for")
    return faults


def what_is_left(live: LiveScheduler) -> dict[str, int]:
    """After everything has ended and the cache was flushed."""
    from sglang_kvshare.engine.state import RequestState

    live.drain()
    assert live.flush()
    live.step(3)
    gc.collect()
    cache = live.cache
    return {
        "namespaces": cache.index.namespaces,
        "index entries": cache.index.entries,
        "tree nodes": len(cache.mirror._nodes),
        "donor locks": cache.held_donor_locks,
        "holders of donors": cache.donors.holders,
        "slots in use": live.allocator.size - live.allocator.available_size(),
        "outputs not sent": len(live._parts),
        # The last batch stays with the scheduler until the next one.
        "states of requests": max(
            0,
            sum(isinstance(thing, RequestState) for thing in gc.get_objects()) - CONCURRENCY,
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write all samples there")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        live = build(Path(folder))
        run = Run(live, args.requests, args.samples)
        began = time.monotonic()
        run.drive(console)
        seconds = time.monotonic() - began
        # The first half warms up: allocator, caches of SGLang and torch, the tree.
        late = run.samples[len(run.samples) // 2 :]
        growth = fitted_growth(
            [sample.requests for sample in late], [sample.rss_bytes for sample in late]
        )
        left = what_is_left(live)
        live.close()
    faults = verdict(run, growth, left)
    console.print(_table(run, growth, seconds))
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "machine": machine_facts(),
                    "growth": asdict(growth),
                    "left": left,
                    "counts": run.counts,
                    "samples": [asdict(sample) for sample in run.samples],
                },
                indent=1,
                default=str,
            )
        )
    console.print("\n".join(faults) or "flat")
    return 1 if faults else 0


def _table(run: Run, growth: Growth, seconds: float) -> Table:
    table = Table("figure", "value", "goal")
    first, last = run.samples[len(run.samples) // 2], run.samples[-1]

    def most(name: str) -> str:
        return str(max(getattr(sample, name) for sample in run.samples))

    table.add_row("requests", f"{run.requests} in {seconds:.0f} s, {run.requests / seconds:.0f}/s")
    for name, count in run.counts.items():
        table.add_row(COUNTED[name], str(count))
    table.add_row(
        "growth of resident memory, bytes a request",
        f"{growth.slope:.1f} [{growth.low:.1f}, {growth.high:.1f}], n={growth.samples}",
        f"upper end at most {MAX_GROWTH:.0f}",
    )
    table.add_row(
        "resident memory, half way and at the end",
        f"{first.rss_bytes / 2**20:.1f} and {last.rss_bytes / 2**20:.1f} MiB",
    )
    table.add_row("most namespaces", most("namespaces"), f"{POOL_TOKENS // PAGE_SIZE} pages")
    table.add_row("most index entries", most("index_entries"), str(2 * POOL_TOKENS + 1024))
    table.add_row("most states of requests", most("held"), str(4 * CONCURRENCY))
    table.add_row("live Python objects", f"{first.objects} and {last.objects}")
    return table


if __name__ == "__main__":
    sys.exit(main())
