"""What do the eviction weight of donors and the reuse edges bring, and what do they cost?

Requests are led through KVShare's tree cache over SGLang's allocators, without a model
(:mod:`kvshare_eval.simulate.tree_driver`). The first third of each run fills the cache and is not
counted. Shares are of prompt tokens: from the exact prefix, from approximate branches, and matched
by plans; evicted tokens are told in the same unit. Every seed is one load, the same for all
weights, and differences to weight 0 are paired by it.

    passages   shuffled passages and follow-ups
    mixed      half of the requests are turns of chats, which have nothing to reuse but prefixes
    turned     passages, and then chats alone, which is what is counted

    python -m kvshare_eval.simulate.eviction [--pool 40000] [--requests 900] [--seeds 6]
    python -m kvshare_eval.simulate.eviction --edges
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from kvshare_eval.simulate.tree_driver import Driver, Served, share
from kvshare_eval.simulate.tree_load import Load, Shape
from kvshare_eval.stats.bootstrap import Interval, Sample, bootstrap_ci, mean
from kvshare_eval.stats.paired import paired_difference
from sglang_kvshare.config import KVShareConfig

WEIGHTS = (0.0, 0.5, 1.0, 2.0)
POLICIES = ("lru", "lfu")
TAKEN = ("exact", "branch", "matched")


@dataclass(frozen=True)
class Size:
    """``requests`` of one run; ``working_set``: see :class:`Shape`, in pools."""

    pool_tokens: int
    requests: int
    working_set: float


def loads(size: Size) -> dict[str, Shape]:
    """The loads that weights are compared on."""
    working = round(size.working_set * size.pool_tokens)
    return {
        "passages": Shape(working),
        "mixed": Shape(working, chats=0.5),
        "turned": Shape(working, chats_from=0.5),
    }


def edge_loads(size: Size) -> dict[str, Shape]:
    """The loads that edges are tried on: drawn anew, or sets behind a header of equal length."""
    working = round(size.working_set * size.pool_tokens)
    sets = max(1, working // 3000)
    return {
        "passages": Shape(working),
        "passages behind headers": Shape(working, header_tokens=24),
        "sets behind headers": Shape(working, header_tokens=24, sets=sets),
    }


def counted(served: Sequence[Served], shape: Shape) -> list[Served]:
    """Without what fills the cache, and without what comes before the load turns."""
    begin = len(served) // 3 if shape.chats_from >= 1 else round(shape.chats_from * len(served))
    return list(served[begin:])


def run(size: Size, shape: Shape, seed: int, policy: str, weight: float) -> list[Served]:
    config = KVShareConfig(selector="seams", donor_weight=weight)
    driver = Driver(size.pool_tokens, policy, config)
    return counted(driver.serve(Load(shape, seed).requests(size.requests)), shape)


def taken(served: Sequence[Served], kind: str | None = None) -> float:
    """Share of the prompts' tokens that did not have to be computed as new."""
    return sum(share(served, of, kind) for of in TAKEN)


def weigh(name: str, size: Size, policy: str, seeds: int) -> None:
    """Print the rows of one load and policy."""
    shape = loads(size)[name]
    kinds = ("passages", "chat") if name == "mixed" else (None,)
    base: dict[str | None, list[float]] = {}
    for weight in WEIGHTS:
        runs = [run(size, shape, seed, policy, weight) for seed in range(seeds)]
        parts = [np.mean([share(served, of) for served in runs]) for of in (*TAKEN, "evicted")]
        cells = [name, policy, f"{weight:g}", *(f"{part:.3f}" for part in parts)]
        for kind in kinds:
            figures = [taken(served, kind) for served in runs]
            all_of = bootstrap_ci(Sample.of(figures, range(seeds)), mean)
            text = shown(all_of)
            if kind in base:
                difference = paired_difference(figures, base[kind], range(seeds))
                text += f"; {shown(difference, sign='+')}"
            base.setdefault(kind, figures)
            cells.append(text if kind is None else f"{kind} {text}")
        print("| " + " | ".join(cells) + " |", flush=True)


def shown(figure: Interval, sign: str = "") -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.value:{sign}.3f}"
    return f"{figure.value:{sign}.3f} [{figure.low:{sign}.3f}, {figure.high:{sign}.3f}]"


def try_edges(size: Size, seeds: int, per_node: int = 16) -> None:
    """Print what edges knew, what they changed and what a plan took."""
    for name, shape in edge_loads(size).items():
        told: dict[int, list[list[Served]]] = {}
        for most in (0, per_node):
            config = KVShareConfig(selector="seams", reuse_edges_per_node=most)
            told[most] = []
            for seed in range(seeds):
                driver = Driver(size.pool_tokens, "lru", config, times=most > 0)
                served = driver.serve(Load(shape, seed).requests(size.requests))
                told[most].append(counted(served, shape))
        plans = [one for served in told[per_node] for one in served if one.times is not None]
        times = [one.times for one in plans if one.times is not None]
        known = [one.times for one in plans if one.times is not None and one.known]
        planned = sum(one.planned for one in plans)
        print(f"{name}: {len(plans)} plans, {len(known)} of them with edges")
        print(f"  matched tokens that edges knew: {sum(o.known for o in plans) / planned:.3f}")
        without = sum(one.without_tokens for one in times)
        unlike = sum(one.with_tokens != one.without_tokens for one in times)
        print(
            f"  matched in the same tree, with / without: {planned / without:.5f}, "
            f"unlike in {unlike} plans"
        )
        for what, these in (("all plans", times), ("plans with edges", known)):
            if these:
                medians = [1e3 * np.median([o.with_s for o in these])]
                medians.append(1e3 * np.median([o.without_s for o in these]))
                ratio = np.median([o.with_s / o.without_s for o in these])
                print(
                    f"  ms of {what}, median: {medians[0]:.2f} with, {medians[1]:.2f} without, "
                    f"median of ratios {ratio:.3f}"
                )
        sides = [[taken(served) for served in told[most]] for most in (per_node, 0)]
        difference = paired_difference(*sides, range(seeds))
        print(f"  taken: {np.mean(sides[0]):.3f}, without edges by {shown(difference, '+')} unlike")


def main(
    pool: Annotated[int, typer.Option(min=20_000, help="KV slots.")] = 40_000,
    requests: Annotated[int, typer.Option(min=30)] = 900,
    working_set: Annotated[float, typer.Option(min=0.1, help="In pools.")] = 3.0,
    seeds: Annotated[int, typer.Option(min=1, help="From 6 on there are intervals.")] = 6,
    load: Annotated[list[str] | None, typer.Option(help="passages, mixed, turned.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="--radix-eviction-policy.")] = None,
    edges: Annotated[bool, typer.Option("--edges", help="Try edges instead of weights.")] = False,
) -> None:
    """Measure, and print shares with their intervals over seeds."""
    size = Size(pool, requests, working_set)
    if unknown := set(load or ()) - set(loads(size)):
        raise typer.BadParameter(
            f"--load {', '.join(unknown)}: allowed are {', '.join(loads(size))}"
        )
    if edges:
        try_edges(size, seeds)
        return
    print("| load | policy | weight | exact | branch | matched | evicted | taken; to weight 0 |")
    print("|---|---|---|---|---|---|---|---|")
    for name in load or loads(size):
        for one in policy or POLICIES:
            weigh(name, size, one, seeds)


if __name__ == "__main__":
    typer.run(main)
