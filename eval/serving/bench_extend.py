"""What the patch ``extend-without-padding`` gains stock SGLang on plain PyTorch.

    .venv/bin/python tests/engine/patched_site.py build/patched
    python -m kvshare_eval.serving.bench_extend --model DIR --patched build/patched/patched

First the attention call of one layer alone, at several lengths of what is cached and what is new;
then two servers without KVShare, one of them patched, both up, one request at a time, turn by turn.
Every figure is a ratio of measurements that were taken one after the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvshare_eval.machine import machine_facts
from kvshare_eval.servers import Server
from kvshare_eval.serving.bench_reuse import NEW_TOKEN_IDS, Ratio, paired_ratio

MODULE = Path("sglang/srt/layers/attention/torch_native_backend.py")
#: (cached, new) tokens of one extend.
LENGTHS = (
    (0, 512),
    (128, 512),
    (512, 512),
    (2048, 512),
    (2048, 32),
    (4096, 1),
    (4096, 64),
    (4096, 512),
    (1024, 3072),
)
#: Heads of SmolLM2-135M.
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
CHUNK = 512
#: What is asked of the servers: (cached, new) tokens.
REQUESTS = {
    "one chunk, nothing cached": (0, 256),
    "64 tokens behind 1500 cached": (1500, 64),
    "1500 tokens in three chunks, nothing cached": (0, 1500),
}


def alternate(sides: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Measure all sides ``turns`` times; who begins changes from turn to turn."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        names = list(sides)
        for name in names if turn % 2 else names[::-1]:
            found[name].append(sides[name]())
    return found


def attention_calls(sites: dict[str, Path], turns: int) -> list[dict[str, Any]]:
    """CPU times of ``_run_sdpa_forward_extend``, one request, fp32, one thread: what else the
    machine does lengthens them little."""
    import torch

    torch.set_num_threads(1)
    backends = {name: _backend(name, site / MODULE) for name, site in sites.items()}
    rows = []
    for cached, new in LENGTHS:
        tokens = cached + new
        query = torch.randn(new, HEADS, HEAD_DIM)
        keys, values = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
        lengths = (torch.tensor([n]) for n in (tokens, cached, new))
        rest = (keys, values, torch.arange(tokens)[None], torch.tensor([0]), *lengths)
        outputs = {name: torch.empty_like(query) for name in backends}

        def call(name: str, query: Any = query, outputs: Any = outputs, rest: Any = rest) -> float:
            begin = time.process_time()
            backends[name]._run_sdpa_forward_extend(
                query, outputs[name], *rest, enable_gqa=True, causal=True
            )
            return (time.process_time() - begin) * 1e3

        alternate({name: lambda name=name: call(name) for name in backends}, 1)
        times = alternate({name: lambda name=name: call(name) for name in backends}, turns)
        difference = (outputs["stock"] - outputs["patched"]).abs().max().item()
        rows.append({**_row(times), "cached": cached, "new": new, "largest_difference": difference})
    return rows


def _backend(name: str, path: Path) -> Any:
    """The backend class of a file, whichever SGLang this process imports otherwise."""
    spec = importlib.util.spec_from_file_location(f"torch_native_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return object.__new__(module.TorchNativeAttnBackend)


def servers(model: Path, sites: dict[str, Path], turns: int) -> list[dict[str, Any]]:
    """What a request for one token takes of the CPU in a stock and in a patched server, each with
    one thread: unlike its TTFT, that hardly depends on what else the machine does."""
    import psutil

    rows = []
    args = ("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {
            name: stack.enter_context(
                Server(
                    model,
                    mode="stock",
                    args=args,
                    log=folder / f"{name}.log",
                    env={"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
                )
            )
            for name, site in sites.items()
        }
        mine = psutil.Process().children()
        trees = {
            name: [each, *each.children(recursive=True)]
            for name, each in zip(running, mine, strict=True)
        }

        def cpu_ms(name: str) -> float:
            return 1e3 * sum(sum(each.cpu_times()[:2]) for each in trees[name])

        draw = random.Random(7)
        for what, (cached, new) in REQUESTS.items():
            prompts: dict[str, list[list[int]]] = {name: [] for name in running}
            for _ in range(turns + 1):
                prompt = draw.choices(NEW_TOKEN_IDS, k=cached + new)
                for name in running:
                    prompts[name].append(prompt)

            def ask(name: str, prompts: Any = prompts, cached: int = cached) -> float:
                server, prompt = running[name], prompts[name].pop()
                server.flush_cache()
                if cached:
                    server.generate(prompt[:cached], max_new_tokens=1)
                before = cpu_ms(name)
                answer = server.generate(prompt, max_new_tokens=1)
                assert answer.cached_tokens == cached
                return cpu_ms(name) - before

            sides = {name: lambda name=name, ask=ask: ask(name) for name in running}
            alternate(sides, 1)
            rows.append({"what": what, **_row(alternate(sides, turns))})
    return rows


def _row(times: dict[str, list[float]]) -> dict[str, Any]:
    ratio: Ratio = paired_ratio(times["stock"], times["patched"])
    medians = {f"{name}_ms": statistics.median(each) for name, each in times.items()}
    return {**medians, "stock/patched": str(ratio)}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """As the documents show it."""
    lines = ["| extend | stock, ms | patched, ms | stock / patched |", "|---|---|---|---|"]
    for row in rows:
        what = row.get("what") or "{new} new, {cached} cached".format(**row)
        times = f"{row['stock_ms']:.2f} | {row['patched_ms']:.2f}"
        lines.append(f"| {what} | {times} | {row['stock/patched']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="without it only the attention call")
    parser.add_argument("--patched", type=Path, required=True, help="holds the patched sglang")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, help="also write JSON")
    args = parser.parse_args()
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    sites = {"stock": Path(spec.origin).parents[1], "patched": args.patched.resolve()}
    os.environ.setdefault("SGLANG_PLATFORM", "kvshare_cpu")
    found: dict[str, Any] = {"machine": machine_facts()}
    found["attention"] = attention_calls(sites, args.turns)
    print(table(found["attention"]), flush=True)
    if args.model:
        found["servers"] = servers(args.model, sites, args.turns)
        print(table(found["servers"]))
    print(json.dumps(found["machine"]), file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
