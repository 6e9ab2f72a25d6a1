"""What similar donors cost and find, in a cache of a million tokens.

    python -m kvshare_eval.matching.bench_similar [--tokens 1000000]

A cache (see ``workload``) is filled and a third of it replaced. Then prompts are planned that
consist of cached passages in an order of their own, of whose tokens a share was replaced, inserted
or dropped; once with the run index alone and once with similar donors, in turn, on one thread.

* **found**: matched tokens by the passages' tokens that were left as they are.
* **time**: median and 99th percentile of ``plan_reuse``.
* **memory**: bytes of the sketches and of what goes with them, by cached tokens.
* **upkeep**: time for a token that comes and goes; the longest single change.

Tokens follow Zipf's law and their embeddings are random: how well meanings are found is measured by
``kvshare_eval.matching.sketches``.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvshare_eval.machine import machine_facts
from kvshare_eval.matching.sketches import edited
from kvshare_eval.matching.workload import VOCABULARY, Cache
from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.matching.gaps import GapSettings
from sglang_kvshare.matching.planner import plan_reuse
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex, SimilaritySettings
from sglang_kvshare.matching.sketch import Sketcher
from sglang_kvshare.plan import Int64Array

CONFIG = KVShareConfig()
CHURNED = 1 / 3


def index_of(runs: RunIndex) -> SemanticIndex:
    """With the default settings."""
    random = np.random.default_rng(3)
    embeddings = random.standard_normal((VOCABULARY, CONFIG.sketch_dims)).astype(np.float32)
    sketcher = Sketcher(embeddings, size_tokens=CONFIG.sketch_tokens, dims=CONFIG.sketch_dims)
    return SemanticIndex(runs, sketcher, SimilaritySettings.of(CONFIG, sketcher))


def prompt(cache: Cache, tokens: int, share: float) -> tuple[bytes, Int64Array, int]:
    """A tenant, a prompt of edited passages, and how many of its tokens are the passages' own."""
    tenant, parts = cache.parts(tokens, 1.0)
    told, kept = [], 0
    for shared, part in parts:
        changed = edited(part, share, cache.random) if shared else part
        told.append(changed)
        # Of three edits one drops a token and one replaces it.
        kept += round(part.shape[0] * (1 - share * 2 / 3)) if shared else 0
    whole = np.concatenate(told)
    return tenant, whole[:tokens], round(kept * min(1.0, tokens / whole.shape[0]))


def main(
    tokens: Annotated[int, typer.Option(min=10_000, help="Cached tokens.")] = 1_000_000,
    prompt_tokens: Annotated[int, typer.Option(min=100)] = 4_000,
    prompts: Annotated[int, typer.Option(min=3)] = 50,
    share: Annotated[float, typer.Option("--edited", min=0.0, max=0.9)] = 0.1,
    rate: Annotated[float, typer.Option(help="New tokens served in a second.")] = 20_000,
) -> None:
    """Measure, and print a table."""
    cache = Cache(tokens, similar=index_of)
    similar = cache.similar
    assert similar is not None
    cache.fill()
    growth_ms = max(cache.upkeep.sketches_s) * 1e3
    cache.churn(int(tokens * CHURNED))
    gaps = GapSettings(CONFIG.min_semantic_run_tokens, CONFIG.min_window_coverage)
    sides: dict[str, dict[str, Any]] = {
        "runs": {},
        "runs, carried on over edits": {"gaps": gaps},
        "and similar donors": {"gaps": gaps, "similar": similar},
        "runs and similar donors": {"similar": similar},
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(prompts + 1):
        tenant, asked, kept = prompt(cache, prompt_tokens, share)
        for side, options in sides.items():
            begin = time.perf_counter()
            plan = plan_reuse(
                cache.index, asked, 0, tenant, CONFIG.max_donors_per_window, **options
            )
            ms = (time.perf_counter() - begin) * 1e3
            if turn:  # the first one warms up
                times[side].append(ms)
                found[side].append(plan.matched_tokens / kept)
    table = Table(title=f"{prompt_tokens} tokens, {share:.0%} edited, {tokens:,} cached")
    for heading in ("side", "found", "median ms", "p99 ms"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for side, ms in times.items():
        table.add_row(
            side,
            f"{np.mean(found[side]):.3f}",
            f"{np.median(ms):.2f}",
            f"{np.percentile(ms, 99):.2f}",
        )
    console = Console()
    console.print(table)
    us, worst = cache.upkeep.sketches_us_per_token, max(cache.upkeep.sketches_s) * 1e3
    console.print(
        f"{similar.windows:,} windows; {similar.nbytes / cache.index.live_tokens:.1f} bytes a "
        f"cached token; upkeep {us:.2f} us a token, {us * rate / 1e6:.2%} at {rate:,.0f} tokens/s; "
        f"longest change {growth_ms:.0f} ms while filling, {worst:.0f} ms after"
    )
    console.print(", ".join(f"{name}: {fact}" for name, fact in machine_facts().items()))


if __name__ == "__main__":
    typer.run(main)
