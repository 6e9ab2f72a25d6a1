"""The same requests to a server and to the simulator: how near does it come?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvshare_eval.serving.load import Sender, open_loop
from kvshare_eval.serving.workloads import LoadRequest
from kvshare_eval.simulator.costs import Costs
from kvshare_eval.simulator.machine import Machine
from kvshare_eval.simulator.measuring import flags_of, flush, server_info, unseen
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.results import outcome
from kvshare_eval.simulator.settings import Flags, Side

#: Figures that are compared.
FIGURES = ("ttft_p50_ms", "ttft_p95_ms", "tbt_p50_ms", "tbt_p95_ms")
#: How near the simulator has to come.
WITHIN = 0.15


@dataclass(frozen=True)
class Compared:
    """One figure of both."""

    name: str
    measured_ms: float
    simulated_ms: float

    @property
    def ratio(self) -> float:
        return self.simulated_ms / self.measured_ms

    @property
    def near(self) -> bool:
        return abs(self.ratio - 1) <= WITHIN


async def validate(
    url: str, requests: Requests, costs: Costs, side: Side, *, seed: int = 1
) -> tuple[list[Compared], Flags]:
    """Send ``requests`` (lengths and arrivals; the text is random) and simulate them.

    Every answer has the length asked (``ignore_eos``), on both.

    Raises:
        EvalError: the server cannot be reached.
        RuntimeError: a request failed.
    """
    flags = flags_of(await server_info(url), costs)
    await flush(url)
    rng = random.Random(seed)
    sent = [
        LoadRequest(prompt, output, 0)
        for prompt, output in zip(_prompts(rng, requests), requests.output.tolist(), strict=True)
    ]
    due_s = [float(at) for at in requests.arrived_ps / 1e12]
    measured = await open_loop(Sender(url, "validate", None, 3600.0), sent, due_s)
    failed = [record.error for record in measured.records if record.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    felt = Machine(requests, costs, flags, side).run()
    told = outcome(requests, felt, flags.pool_tokens)
    ttft = [record.ttft_ms for record in measured.records if record.ttft_ms is not None]
    gaps = [gap for record in measured.records for gap in record.tbt_ms]
    real = {
        "ttft_p50_ms": _quantile(ttft, 0.5),
        "ttft_p95_ms": _quantile(ttft, 0.95),
        "tbt_p50_ms": _quantile(gaps, 0.5),
        "tbt_p95_ms": _quantile(gaps, 0.95),
    }
    return [Compared(name, real[name], getattr(told, name)) for name in FIGURES], flags


def _prompts(rng: random.Random, requests: Requests) -> list[tuple[int, ...]]:
    """Equal content numbers give equal tokens."""
    if not requests.blocks:
        return [unseen(rng, tokens) for tokens in requests.prompt.tolist()]
    salt = rng.random()
    prompts = []
    for blocks, tokens in zip(requests.blocks, requests.prompt.tolist(), strict=True):
        ids: list[int] = []
        for block in blocks:
            ids += unseen(random.Random(f"{salt} {block}"), requests.block_tokens)
        prompts.append(tuple(ids[:tokens]))
    return prompts


def _quantile(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else float("nan")
