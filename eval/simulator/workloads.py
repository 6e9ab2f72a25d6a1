"""Workloads of the simulator: traces, repeated as often as needed, and synthetic ones.

For more requests than a trace has it is gone through again, in copies:

    start      each copy begins at another request, drawn by the seed, and goes round to it
    arrival    gaps between arrivals are those of the trace; its mean gap where a copy wraps or ends
    lengths    those of the trace
    blocks     of Mooncake, other ones in every copy: none hits what an earlier copy left

Then all gaps are divided by one factor, which sets the mean rate: bursts stay as they are in the
trace, relative to the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.traces import BLOCK_TOKENS, TraceRequest, load_trace
from kvshare_eval.options import choose, defaults_of, first_line_of_doc
from kvshare_eval.simulator.requests import Requests

_PS_PER_S = 1e12

#: ``make(count, seed, data, **options)``.
Make = Callable[..., Requests]


def azure(
    count: int, seed: int, data: Path | None, *, kind: str = "conv", max_new: int = 1024
) -> Requests:
    """Azure's trace of 2023, kind conv or code: lengths and arrivals; nothing is shared."""
    return _replayed(f"azure_llm_2023_{kind}", count, seed, data, max_new)


def mooncake(count: int, seed: int, data: Path | None, *, max_new: int = 2048) -> Requests:
    """Mooncake's conversation trace: long prompts whose prefixes are shared."""
    return _replayed("mooncake_conversation_trace", count, seed, data, max_new)


def rag(
    count: int,
    seed: int,
    data: Path | None,
    *,
    passages: int = 8,
    least_passages: int = 2,
    passage_tokens: int = 256,
    question_tokens: int = 64,
    pool: int = 2000,
    zipf: float = 1.0,
    cold: float = 0.0,
    tenants: int = 1,
    output: int = 64,
    output_sigma: float = 0.5,
    max_new: int = 256,
) -> Requests:
    """Passages of a common pool in random order, popular ones more often, a question behind them.

    A prompt has ``least_passages`` to ``passages`` different ones, drawn with weights
    1 / rank^``zipf``, then shuffled; a share ``cold`` of the prompts has passages of its own, that
    nobody asks about again. Answers are log-normal around ``output``.

    Each request is that of one of ``tenants``, all alike. Every tenant has a pool of its own, the
    same number of passages with the same popularity, so that nobody finds what another has cached:

        tenant     0             1                 2
        content    1 ... pool    ... 2 * pool      ... 3 * pool     then what is asked only once

    With the same seed requests differ in nothing else from those of one tenant.

    Raises:
        EvalError: fewer than one tenant.
    """
    if tenants < 1:
        raise EvalError(f"tenants={tenants}: the least is 1")
    rng = np.random.default_rng(seed)
    # A stream of its own: what else is drawn does not depend on how many tenants there are.
    whose = np.random.default_rng((seed, 1)).integers(tenants, size=count).tolist()
    weights = 1 / np.arange(1, pool + 1) ** zipf
    edges = np.cumsum(weights / weights.sum())
    many = rng.integers(least_passages, passages + 1, size=count)
    blocks: list[tuple[int, ...]] = []
    unique = tenants * pool + 1
    for tenant, wanted in zip(whose, many.tolist(), strict=True):
        if rng.random() < cold:
            blocks.append(tuple(range(unique, unique + wanted + 1)))
            unique += wanted + 1
            continue
        drawn: dict[int, None] = {}
        while len(drawn) < wanted:
            drawn[int(np.searchsorted(edges, rng.random(), side="right"))] = None
        order = rng.permutation(list(drawn)).tolist()
        blocks.append((*(tenant * pool + one + 1 for one in order), unique))
        unique += 1
    outputs = _lognormal(rng, output, output_sigma, count, max_new)
    return Requests(
        name="rag",
        arrived_ps=_poisson(rng, count),
        prompt=many * passage_tokens + question_tokens,
        output=outputs,
        max_new=np.full(count, max_new, dtype=np.int64),
        blocks=blocks,
        block_tokens=passage_tokens,
        chained=False,
        namespaces=[f"tenant-{one}" for one in whose] if tenants > 1 else (),
    )


def plain(
    count: int,
    seed: int,
    data: Path | None,
    *,
    prompt: int = 512,
    prompt_sigma: float = 0.0,
    output: int = 128,
    output_sigma: float = 0.0,
    max_new: int = 0,
) -> Requests:
    """Poisson arrivals, log-normal lengths (all alike with sigma 0), nothing shared."""
    rng = np.random.default_rng(seed)
    arrived = _poisson(rng, count)
    outputs = _lognormal(rng, output, output_sigma, count, max_new or 4096)
    bound = np.full(count, max_new, dtype=np.int64) if max_new else outputs
    return Requests(
        name="plain",
        arrived_ps=arrived,
        prompt=_lognormal(rng, prompt, prompt_sigma, count, 1 << 20),
        output=outputs,
        max_new=bound,
        ignore_eos=not max_new,
    )


#: By name, as command lines call them.
WORKLOADS: dict[str, Make] = {
    "azure-conv": azure,
    "azure-code": partial(azure, kind="code", max_new=2048),
    "mooncake": mooncake,
    "rag": rag,
    "plain": plain,
}


def described() -> str:
    return "; ".join(f"{name}: {_doc(make)}" for name, make in WORKLOADS.items())


def make_workload(text: str, count: int, seed: int, data: Path | None) -> Requests:
    """``NAME`` or ``NAME:option=value,...``.

    Raises:
        EvalError: unknown name or option, a count below 1, or no data where it is needed.
    """
    if count < 1:
        raise EvalError(f"{count} requests: the least is 1")
    make, options = choose("workload", text, WORKLOADS, lambda made: made)
    made: Requests = make(count, seed, data, **options)
    return made


def _doc(make: Make) -> str:
    return first_line_of_doc(getattr(make, "func", make))


def _replayed(name: str, count: int, seed: int, data: Path | None, max_new: int) -> Requests:
    trace = list(load_trace(DataSource(folder=data), name))
    if len(trace) < 2:
        raise EvalError(f"trace {name}: {len(trace)} requests are no trace")
    rng = np.random.default_rng(seed)
    arrived = np.array([one.arrival_s for one in trace])
    mean = (arrived[-1] - arrived[0]) / (len(trace) - 1)
    # The gap before each request; before the first, which nobody knows, the mean.
    gap = np.r_[mean, np.maximum(np.diff(arrived), 0.0)]
    places = []
    for _ in range(math.ceil(count / len(trace))):
        start = int(rng.integers(len(trace)))
        places.append((np.arange(len(trace)) + start) % len(trace))
    place = np.concatenate(places)[:count]
    prompt = np.array([one.prompt_tokens for one in trace], dtype=np.int64)
    output = np.array([max(1, one.output_tokens) for one in trace], dtype=np.int64)
    times = np.cumsum(gap[place])
    return Requests(
        name=name,
        arrived_ps=np.rint((times - times[0]) * _PS_PER_S).astype(np.int64),
        prompt=np.maximum(1, prompt[place]),
        output=np.minimum(output[place], max_new),
        max_new=np.full(count, max_new, dtype=np.int64),
        blocks=_blocks(trace, place),
        block_tokens=BLOCK_TOKENS,
    )


def _blocks(trace: list[TraceRequest], place: np.ndarray) -> list[tuple[int, ...]]:
    """Content numbers, other ones in every copy; none where the trace has no hashes."""
    if not trace[0].block_hashes:
        return []
    most = 1 + max(max(one.block_hashes, default=0) for one in trace)
    blocks = []
    for number, which in enumerate(place.tolist()):
        one = trace[which]
        base = 1 + (number // len(trace)) * 2 * most
        hashes = [base + block for block in one.block_hashes]
        if one.prompt_tokens % BLOCK_TOKENS:
            # A block that is not full is another content than the full one of the same hash.
            hashes[-1] += most
        blocks.append(tuple(hashes))
    return blocks


def _poisson(rng: np.random.Generator, count: int) -> np.ndarray:
    """One a second on average, the first at 0."""
    times = np.cumsum(rng.exponential(size=count))
    return np.rint((times - times[0]) * _PS_PER_S).astype(np.int64)


def _lognormal(
    rng: np.random.Generator, median: int, sigma: float, count: int, most: int
) -> np.ndarray:
    drawn = median * np.exp(sigma * rng.standard_normal(count))
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def options_of(name: str) -> dict[str, Any]:
    return defaults_of(WORKLOADS[name])
