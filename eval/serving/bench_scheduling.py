"""What scheduling costs a step: the policies alone, driven as a scheduler drives them.

    python -m kvshare_eval.serving.bench_scheduling [--waiting 1000] [--running 256]

The queue and the batch are kept at their size: what ends is made up for by what is admitted, and
that by what arrives. Each step does everything that a step can do; a real one rarely has to order
a queue, renew reservations, admit, and choose victims all at once. Answers are of any length, so
that a few end in each step. Requests and answers are drawn; measured is the processor time of the
one thread, so that what else runs on the machine counts for little.

Not in it: matching (``kvshare_eval.matching.bench_index``), and what the engine does itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvshare_eval.machine import machine_facts
from sglang_kvshare.scheduling.jobs import Running, Waiting
from sglang_kvshare.scheduling.length_estimate import Asked, LengthEstimate
from sglang_kvshare.scheduling.parts import ScheduleSettings, SchedulingParts, build_parts
from sglang_kvshare.scheduling.preemption import victims

#: A step is to take less.
LIMIT_MS = 1.0
#: Decode time between two steps, on the clock of the policies.
STEP_MS = 20.0
POOL_TOKENS = 400_000
MOST_NEW_TOKENS = 2048
#: Document that a tenth of the requests ask about, as a key of the holder.
DOCUMENT = "document"
_ALL = "all together"


@dataclass(frozen=True)
class Cost:
    """Milliseconds that one part takes in a step."""

    part: str
    median_ms: float
    p99_ms: float
    worst_ms: float

    @classmethod
    def of(cls, part: str, times: list[float]) -> Cost:
        median, p99, worst = np.percentile(times, (50, 99, 100))
        return cls(part, float(median), float(p99), float(worst))


@dataclass
class Answer:
    """One that is being decoded."""

    asked: Asked
    estimate: LengthEstimate
    job: Running
    length: int


class Bench:
    """A scheduler without an engine."""

    def __init__(self, waiting: int, running: int, schedule: str, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        settings = ScheduleSettings(schedule=schedule, host_pool_tokens=POOL_TOKENS)
        self.parts: SchedulingParts = build_parts(settings, pool_tokens=POOL_TOKENS)
        self.size = waiting
        self.most_running = running
        self.queue: list[Waiting] = []
        self.answers: dict[str, Answer] = {}
        self.came = 0
        self.now_ms = 0.0
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._learn()
        self._arrive()
        while len(self.answers) < running:
            self._admit(self.queue.pop(0))
        self._arrive()

    # --- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """One pass: decode, renew, order, admit; then the work of a retraction."""
        self.spent.clear()
        self.now_ms += STEP_MS
        self._decode()
        self._renew()
        self._admit_those_that_fit()
        self._choose_victims()
        for part, seconds in self.spent.items():
            self.times[part].append(seconds * 1e3)
        self.times[_ALL].append(sum(self.spent.values()) * 1e3)
        self._arrive()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.spent[part] += time.thread_time() - begin

    def _decode(self) -> None:
        ledger, reserve = self.parts.ledger, self.parts.reserve
        assert ledger is not None
        assert reserve is not None
        with self.timed("ledger: step and look-ahead"):
            ledger.step()
            ledger.short_tokens(2, POOL_TOKENS)
        for answer in self.answers.values():
            answer.job.output_tokens += 1
            answer.job.private_tokens += 1
        for rid in [
            rid for rid, one in self.answers.items() if one.job.output_tokens >= one.length
        ]:
            answer = self.answers.pop(rid)
            with self.timed("answers that end"):
                ledger.close(rid)
                self.parts.lengths.observe(answer.asked, answer.estimate, answer.length)
                reserve.observe(answer.length - answer.estimate.upper_tokens)

    def _renew(self) -> None:
        ledger = self.parts.ledger
        assert ledger is not None
        with self.timed("ledger: renewals"):
            for rid in ledger.due():
                answer = self.answers[rid]
                done = answer.job.output_tokens
                ledger.renew(rid, self.parts.lengths.longer(answer.asked, done, 0.95) - done)

    def _admit_those_that_fit(self) -> None:
        parts = self.parts
        assert None not in (parts.order, parts.holder, parts.ledger, parts.reserve)
        with self.timed("order of the queue"):
            ordered = parts.order.order(self.queue, self.now_ms)  # type: ignore[union-attr]
        taken = set()
        for index in ordered:
            one = self.queue[index]
            if len(self.answers) == self.most_running:
                break
            keys = [DOCUMENT if one.number % 10 == 0 else one.number]
            with self.timed("holding"):
                held = parts.holder.held(one, keys, 5.0, self.now_ms)  # type: ignore[union-attr]
            if held:
                continue
            estimate = self._estimated(one)
            with self.timed("ledger: what fits"):
                fits = parts.ledger.fits(  # type: ignore[union-attr]
                    one.prompt_tokens - one.prefix_tokens,
                    estimate.upper_tokens,
                    POOL_TOKENS - parts.ledger.held_tokens,  # type: ignore[union-attr]
                    parts.reserve.tokens(len(self.answers)),  # type: ignore[union-attr]
                )
            if not fits:
                break
            self._admit(one, estimate)
            parts.holder.begins(one.rid, keys)  # type: ignore[union-attr]
            taken.add(index)
        for index in taken:
            parts.holder.ended(self.queue[index].rid)  # type: ignore[union-attr]
        self.queue = [one for index, one in enumerate(self.queue) if index not in taken]

    def _choose_victims(self) -> None:
        jobs = [answer.job for answer in self.answers.values()]
        with self.timed("victims"):
            victims(jobs, 4 * self.most_running, self.parts.victim_order, 3)

    # --- requests ----------------------------------------------------------------------------

    def _asked(self, one: Waiting) -> Asked:
        return Asked(f"tenant {one.number % 8}", one.prompt_tokens, MOST_NEW_TOKENS)

    def _length(self) -> int:
        return min(MOST_NEW_TOKENS, max(1, round(self.draw.lognormvariate(5, 0.8))))

    def _learn(self) -> None:
        """As a server that has been running for a while."""
        for _ in range(2000):
            one = self._drawn()
            asked = self._asked(one)
            estimate = self.parts.lengths.estimate(asked, 0.95)
            self.parts.lengths.observe(asked, estimate, self._length())

    def _drawn(self) -> Waiting:
        self.came += 1
        prompt = self.draw.randrange(50, 4000)
        prefix = int(prompt * self.draw.random())
        return Waiting(
            rid=f"r{self.came}",
            number=self.came,
            arrived_ms=self.now_ms,
            prompt_tokens=prompt,
            prefix_tokens=prefix,
            effective_ms=(prompt - prefix) / 10,
            ttft_slo_ms=self.draw.choice((None, 1000.0, 10_000.0)),
        )

    def _arrive(self) -> None:
        while len(self.queue) < self.size:
            self.queue.append(self._drawn())

    def _estimated(self, one: Waiting) -> LengthEstimate:
        with self.timed("estimates of lengths"):
            return self.parts.lengths.estimate(self._asked(one), 0.95)

    def _admit(self, one: Waiting, estimate: LengthEstimate | None = None) -> None:
        estimate = estimate or self._estimated(one)
        private = one.prompt_tokens - one.prefix_tokens
        assert self.parts.ledger is not None
        with self.timed("ledger: what fits"):
            self.parts.ledger.open(one.rid, private, estimate.upper_tokens)
        self.answers[one.rid] = Answer(
            self._asked(one),
            estimate,
            Running(
                one.rid,
                one.number,
                one.prompt_tokens,
                0,
                MOST_NEW_TOKENS,
                private,
                estimate.predicted_tokens,
                tbt_slo_ms=self.draw.choice((None, 50.0, 200.0)),
                preempt_ms=private / 10,
            ),
            self._length(),
        )


def measure(waiting: int, running: int, steps: int, schedule: str = "hit-rate") -> list[Cost]:
    """Costs of each part, all together last."""
    bench = Bench(waiting, running, schedule)
    for _ in range(steps):
        bench.step()
    bench.times[_ALL] = bench.times.pop(_ALL)  # to the end
    # The first tenth warms up.
    return [Cost.of(part, times[len(times) // 10 :]) for part, times in bench.times.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--schedule", default="hit-rate")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    args = parser.parse_args()
    costs = measure(args.waiting, args.running, args.steps, args.schedule)
    command = " ".join(["python -m kvshare_eval.serving.bench_scheduling", *sys.argv[1:]])
    facts = {"command": command, "load": f"{os.getloadavg()[0]:.1f}", **machine_facts()}
    report(costs, args.waiting, args.running, facts)
    if args.out:
        figures = {"facts": facts, "costs": [asdict(one) for one in costs]}
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if costs[-1].median_ms < LIMIT_MS else 1


def report(costs: list[Cost], waiting: int, running: int, facts: dict[str, str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(title=f"{waiting:,} waiting, {running:,} running: milliseconds a step")
    table.add_column("part")
    for column in ("median", "99th percentile", "worst"):
        table.add_column(column, justify="right")
    for one in costs:
        if one is costs[-1]:
            table.add_section()
        figures = (one.median_ms, one.p99_ms, one.worst_ms)
        table.add_row(one.part, *(f"{ms:.3f}" for ms in figures))
    console.print(table)
    for key, value in facts.items():
        console.print(f"{key}: {value}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
