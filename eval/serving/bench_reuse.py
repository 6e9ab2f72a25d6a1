"""Time to first token with and without reuse, and what an unused KVShare costs.

    python -m kvshare_eval.serving.bench_reuse --model DIR

Four questions, each answered by a ratio of interleaved measurements on one machine:

* **gain**: prompts of which most tokens lie in cached passages that come in another order; one
  server, reuse on against reuse off (stock attention) and against ``recompute_ratio`` 1 (every
  row runs through KVShare's own attention: the same kernel on both sides);
* **idle cost**: prompts that share nothing; a KVShare server against a stock server without the
  plug-in, both newly started and up, one request at a time, turn by turn; and once more after
  both have served a history of prompts that KVShare reuses;
* **short prompts**: dozens of tokens of which most are cached elsewhere; reuse as the gate decides
  it against ``exact_prefix`` on the same server: where reuse cannot gain it must not lose;
* **placement**: the server's own clock around copying and rotating, as a share of the TTFT.

The client's clock runs from sending the token ids to the first token, so that a TTFT contains
HTTP, queueing, matching, copying and the forward.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.table import Table

from kvshare_eval.machine import machine_facts
from kvshare_eval.passages import load_passages
from kvshare_eval.servers import Server

PASSAGE_TOKENS = 200
#: Word-like part of the vocabulary; new text is drawn from it so that nothing can be cached.
NEW_TOKEN_IDS = range(1_000, 40_000)
WARM_UPS = 1
#: Sizes of short prompts, in tokens; three quarters of each lie in a cached passage.
SHORT_TOKENS = (24, 48, 96, 192)
HISTORY_PROMPTS = 10


@dataclass(frozen=True)
class Measurement:
    """One request: client TTFT and the server's report."""

    what: str
    turn: int
    ttft_ms: float
    report: dict[str, Any]


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, their quartiles, and how many pairs."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}], n={self.pairs}"


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Ratios of measurements that were taken one after the other."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ratios), low, high, len(ratios))


class Prompts:
    """Token ids: passages of the repository between stretches that nobody has ever sent.

    Args:
        tokenize: text to token ids.
        reusable_tokens: tokens in passages, a multiple of ``PASSAGE_TOKENS``.
        new_tokens: tokens in new stretches, spread around the passages.
    """

    def __init__(self, tokenize: Any, reusable_tokens: int, new_tokens: int, seed: int) -> None:
        self._random = random.Random(seed)
        texts = [tokenize(passage.text)[:PASSAGE_TOKENS] for passage in load_passages()]
        whole = [ids for ids in texts if len(ids) == PASSAGE_TOKENS]
        count = reusable_tokens // PASSAGE_TOKENS
        if count > len(whole):
            raise ValueError(
                f"only {len(whole)} passages of {PASSAGE_TOKENS} tokens; {count} asked"
            )
        self._passages = whole[:count]
        self._new_tokens = new_tokens

    def fresh(self, tokens: int) -> list[int]:
        return [self._random.choice(NEW_TOKEN_IDS) for _ in range(tokens)]

    def short(self, tokens: int) -> list[int]:
        """A piece of the first passage between new tokens."""
        piece = self._passages[0][: tokens * 3 // 4]
        gap = (tokens - len(piece)) // 2
        return [*self.fresh(gap), *piece, *self.fresh(tokens - len(piece) - gap)]

    def shuffled(self) -> list[int]:
        """The passages in a random order, each behind new tokens, and new tokens at the end."""
        order = self._random.sample(self._passages, len(self._passages))
        gap = self._new_tokens // (len(order) + 2)
        prompt: list[int] = []
        for passage in order:
            prompt += self.fresh(gap) + passage
        return prompt + self.fresh(self._new_tokens - gap * len(order))


def ask(url: str, ids: list[int], what: str, turn: int, **settings: Any) -> Measurement:
    """One request for one token; the answer arrives with the first token."""
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1}
    if settings:
        params["custom_params"] = {"kvshare": settings}
    begin = time.perf_counter()
    response = requests.post(
        f"{url}/generate", json={"input_ids": ids, "sampling_params": params}, timeout=600
    )
    ttft_ms = (time.perf_counter() - begin) * 1e3
    response.raise_for_status()
    details = response.json()["meta_info"].get("cached_tokens_details") or {}
    print(f"turn {turn:3d}  {what:10s} {ttft_ms:8.0f} ms", file=sys.stderr, flush=True)
    return Measurement(what, turn, ttft_ms, details.get("kvshare", {}))


def measure_gain(url: str, prompts: Prompts, repeats: int) -> list[Measurement]:
    """Each turn: empty cache, one prompt that fills it, then the three ways, in changing order."""
    ways: list[tuple[str, dict[str, Any]]] = [
        ("reuse", {}),
        ("off", {"reuse": "off"}),
        ("all rows", {"recompute_ratio": 1}),
    ]
    found: list[Measurement] = []
    for turn in range(-WARM_UPS, repeats):
        requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
        ask(url, prompts.shuffled(), "donor", turn)
        for shift in range(len(ways)):
            what, settings = ways[(turn + shift) % len(ways)]
            found.append(ask(url, prompts.shuffled(), what, turn, **settings))
    return [one for one in found if one.turn >= 0]


def measure_idle_cost(
    urls: dict[str, str], prompts: Prompts, tokens: int, repeats: int
) -> list[Measurement]:
    """Prompts that share nothing, the servers in turn and in alternating order."""
    found: list[Measurement] = []
    for turn in range(-WARM_UPS, repeats):
        order = sorted(urls, reverse=turn % 2 == 1)
        for name in order:
            found.append(ask(urls[name], prompts.fresh(tokens), name, turn))
        for url in urls.values():
            requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    return [one for one in found if one.turn >= 0]


def measure_short(url: str, prompts: Prompts, repeats: int) -> list[Measurement]:
    """Short prompts with reuse and without, in changing order, all passages cached."""
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    ask(url, prompts.shuffled(), "donor", 0)
    found: list[Measurement] = []
    for turn in range(-WARM_UPS, repeats):
        for tokens in SHORT_TOKENS:
            ways: list[tuple[str, dict[str, Any]]] = [
                (f"reuse {tokens}", {}),
                (f"exact {tokens}", {"reuse": "exact_prefix"}),
            ]
            for what, settings in ways if turn % 2 else reversed(ways):
                found.append(ask(url, prompts.short(tokens), what, turn, **settings))
    return [one for one in found if one.turn >= 0]


def placements_ms(log: Path) -> list[float]:
    """The server's clock around each placement of at least one token."""
    pattern = re.compile(r"KVShare placed ([1-9]\d*) tokens in ([\d.]+) ms")
    return [float(ms) for _, ms in pattern.findall(log.read_text(errors="replace"))]


def of(found: list[Measurement], what: str) -> list[float]:
    return [one.ttft_ms for one in found if one.what == what]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder or hub name of the model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--idle-repeats", type=int, default=8, help="for each order of starting")
    parser.add_argument("--short-repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2_500)
    parser.add_argument("--reusable", type=float, default=0.8, help="share of the prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSONL of every request")
    args = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    reusable = int(args.tokens * args.reusable) // PASSAGE_TOKENS * PASSAGE_TOKENS
    prompts = Prompts(tokenizer.encode, reusable, args.tokens - reusable, args.seed)
    flags = ["--log-level", "debug", "--log-level-http", "warning"]
    with (
        tempfile.TemporaryDirectory() as logs,
        Server(args.model, log=Path(logs) / "kvshare.log", args=flags) as kvshare,
    ):
        gain = measure_gain(kvshare.url, prompts, args.repeats)
        placed = placements_ms(kvshare.log)
        short = measure_short(kvshare.url, prompts, args.short_repeats)
    idle: dict[str, list[Measurement]] = {}
    # Which of two servers was started first, and what it did before, is worth several percent on
    # a CPU. So both are new, and each is the first one once.
    rounds = ((("kvshare", "stock"), 0), (("stock", "kvshare"), 0), (("kvshare", "stock"), 1))
    for modes, history in rounds:
        with tempfile.TemporaryDirectory() as logs, ExitStack() as running:
            urls = {
                mode: running.enter_context(
                    Server(args.model, mode=mode, log=Path(logs) / f"{mode}.log", args=flags)
                ).url
                for mode in modes
            }
            for _ in range(HISTORY_PROMPTS * history):
                ids = prompts.shuffled()
                for mode, url in urls.items():
                    ask(url, ids, f"history {mode}", -1)
            name = "after a history" if history else f"new, {modes[0]} started 1st"
            idle[name] = measure_idle_cost(urls, prompts, args.tokens, args.idle_repeats)
    command = " ".join(["python -m kvshare_eval.serving.bench_reuse", *sys.argv[1:]])
    facts = {"command": command, **machine_facts()}
    report(gain, idle, short, placed, facts, args.tokens)
    if args.out:
        with args.out.open("w", encoding="utf-8") as out:
            for line in [facts, *(asdict(one) for one in sum(idle.values(), gain + short))]:
                out.write(json.dumps(line) + "\n")
    return 0


def report(
    gain: list[Measurement],
    idle: dict[str, list[Measurement]],
    short: list[Measurement],
    placed: list[float],
    facts: dict[str, str],
    tokens: int,
) -> None:
    """Print the ratios; seconds of a shared machine say little and are left in the JSONL."""
    sample = next(one.report for one in gain if one.what == "reuse")
    computed = sample["recomputed_tokens"] + sample["new_tokens"]
    share = computed / tokens
    speedup = paired_ratio(of(gain, "off"), of(gain, "reuse"))
    same_kernel = paired_ratio(of(gain, "all rows"), of(gain, "reuse"))
    costs = {
        name: paired_ratio(of(found, "kvshare"), of(found, "stock")) for name, found in idle.items()
    }
    new = [ratio.median for name, ratio in costs.items() if name.startswith("new")]
    placement = statistics.median(placed) / statistics.median(of(gain, "reuse"))
    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(title=f"{tokens}-token prompts, {sample['reused_tokens']} tokens reused")
    for column in ("figure", "median [quartiles]", "goal"):
        table.add_column(column)
    table.add_row("TTFT, reuse off / reuse", str(speedup), "at least 3")
    table.add_row("the same, KVShare's kernel on both sides", str(same_kernel), "")
    table.add_row("computed share of the rows", f"{share:.3f}", "")
    table.add_row(
        "speed-up / (1 / share)",
        f"{speedup.median * share:.3f}; same kernel {same_kernel.median * share:.3f}",
        "at least 0.75",
    )
    for name, ratio in costs.items():
        table.add_row(f"no reuse: KVShare / stock, {name}", str(ratio), "at most 1.02")
    table.add_row("the same, new, geometric mean", f"{statistics.geometric_mean(new):.3f}", "")
    for tokens in SHORT_TOKENS:
        reuse = f"reuse {tokens}"
        ratio = paired_ratio(of(short, reuse), of(short, f"exact {tokens}"))
        reused = sum(one.report["decision"] == "reuse" for one in short if one.what == reuse)
        what = f"{tokens}-token prompts: reuse / exact_prefix ({reused} reused)"
        table.add_row(what, str(ratio), "at most 1.02")
    table.add_row("copy and rotate / TTFT", f"{placement:.4f}", "below 0.03")
    console.print(table)
    for key, value in facts.items():
        console.print(f"{key}: {value}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
