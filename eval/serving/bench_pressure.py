"""A server that is short of KV: stock SGLang, and what scheduling alone changes.

    python -m kvshare_eval.serving.bench_pressure --model DIR

A mixed load, in the dialogue form of the model, whose answers end of themselves (at a stop string,
or where the model ends them), long before the ``max_new_tokens`` that clients ask for to be safe:
short questions about a passage, explanations, summaries of two passages. The KV pool holds about a
third of what would run together. Every side gets the same flags, prompts and arrival times; one
server is loaded at a time, in turn. KVShare's sides take exact prefixes only, so that all answers
must be equal: what differs is scheduling. TTFT counts from the moment a request was due; TBT are
the gaps between tokens.

Saturation is what stock's ``fcfs`` serves when everything comes at once; the load is given as
shares of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvshare_eval.loaders import DataSource
from kvshare_eval.machine import machine_facts
from kvshare_eval.passages import load_passages
from kvshare_eval.servers import Mode, Server
from kvshare_eval.serving.load import new_session, poisson_arrivals
from kvshare_eval.serving.stream import Streamed, stream
from kvshare_eval.serving.tokens import Corpus, load_corpus
from kvshare_eval.simulator.measuring import flush

FLAGS = (
    *("--dtype", "float32", "--mem-fraction-static", "0.5", "--sleep-on-idle"),
    *("--log-level", "warning", "--max-running-requests", "24"),
)
EXACT = ("--kvshare-reuse", "exact_prefix")
#: Name -> kind of server and its own flags.
SIDES: dict[str, tuple[Mode, tuple[str, ...]]] = {
    "fcfs": ("stock", ()),
    "lpm": ("stock", ("--schedule-policy", "lpm")),
    "kvshare": ("kvshare", EXACT),
    "kvshare+slo": ("kvshare", (*EXACT, "--kvshare-tbt-slo-ms", "250")),
    "reuse": ("kvshare", ()),
}
_TIMEOUT_S = 600.0
_BRIEF = "What is this about? Answer in a few words.\n\n{0}"
_SUMMARY = "{0}\n\n{1}\n\nSummarise both texts in one sentence."
_LONG = "Explain step by step how to {0}."
#: A sentence, or a paragraph. The small model goes on for ever where only an empty line ends it.
_STOPS = {"brief": (".", "\n"), "summary": (".", "\n"), "long": ("\n",)}
_TOPICS = (
    *("bake bread", "learn a language", "repair a bicycle", "plan a garden", "write a letter"),
    *("paint a room", "train for a race", "save money", "cook rice", "tie a knot"),
)


@dataclass(frozen=True)
class Asked:
    """One request: its kind, its prompt, and what ends its answer."""

    kind: str
    prompt: tuple[int, ...]
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """What one side did with one window; ``answers`` holds ids of texts, ``None`` for lost ones."""

    side: str
    load: float
    repeat: int
    ttft_ms: tuple[float, ...]
    tbt_ms: tuple[float, ...]
    seconds: float
    answers: tuple[str | None, ...]

    def figures(self) -> dict[str, float]:
        return {
            "ttft_p50_ms": _percentile(self.ttft_ms, 50),
            "ttft_p95_ms": _percentile(self.ttft_ms, 95),
            "tbt_p50_ms": _percentile(self.tbt_ms, 50),
            "tbt_p95_ms": _percentile(self.tbt_ms, 95),
            "tbt_p99_ms": _percentile(self.tbt_ms, 99),
            "requests_per_s": len(self.answers) / self.seconds,
            "tokens_per_s": (len(self.tbt_ms) + len(self.ttft_ms)) / self.seconds,
            "lost": sum(answer is None for answer in self.answers),
        }


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


def mixed(corpus: Corpus, name: str, count: int, chat: str) -> list[Asked]:
    """The same for the same name.

    Args:
        chat: the model's dialogue form, with ``{}`` for what the user says.
    """
    rng = random.Random(name)
    texts = [passage.text for passage in load_passages()]
    asked = []
    for _ in range(count):
        kind = rng.choice(("brief", "long", "summary"))
        if kind == "brief":
            said = _BRIEF.format(_cut(rng, texts, 90))
        elif kind == "summary":
            said = _SUMMARY.format(_cut(rng, texts, 110), _cut(rng, texts, 110))
        else:
            said = _LONG.format(rng.choice(_TOPICS))
        # Nobody asks exactly what somebody else has asked.
        said = f"Request {rng.randrange(10**6)}. {said}"
        asked.append(Asked(kind, tuple(corpus.encode(chat.format(said))), _STOPS[kind]))
    return asked


def _cut(rng: random.Random, texts: Sequence[str], words: int) -> str:
    found = rng.choice(texts).split()
    start = rng.randrange(max(1, len(found) - words))
    return " ".join(found[start : start + words])


async def send(url: str, asked: Sequence[Asked], due_s: Sequence[float], most: int) -> list[Any]:
    """Open loop; returns ``(TTFT in ms or None, Streamed)`` in order."""
    loop = asyncio.get_running_loop()
    bodies = [
        json.dumps(
            {
                "input_ids": list(one.prompt),
                "sampling_params": {
                    "temperature": 0.0,
                    "max_new_tokens": most,
                    "stop": list(one.stop),
                },
                "stream": True,
            }
        ).encode()
        for one in asked
    ]
    async with new_session() as session:
        start = loop.time()
        tasks = []
        for due, body in zip(due_s, bodies, strict=True):
            await asyncio.sleep(max(0.0, start + due - loop.time()))
            tasks.append(asyncio.create_task(stream(session, url, body, _TIMEOUT_S)))
        got: list[Streamed] = await asyncio.gather(*tasks)
    return [
        (None if one.first is None else (one.first - start - due) * 1e3, one)
        for due, one in zip(due_s, got, strict=True)
    ]


def window(
    side: str, url: str, load: float, repeat: int, asked: Sequence[Asked], args: Any, rate: float
) -> Window:
    due = poisson_arrivals(f"pressure {load} {repeat}", rate, requests=len(asked))
    asyncio.run(flush(url))
    got = asyncio.run(send(url, asked, due, args.max_new_tokens))
    ends = [one.last for _, one in got if one.last is not None]
    begin = min(one.sent for _, one in got)
    return Window(
        side=side,
        load=load,
        repeat=repeat,
        ttft_ms=tuple(ttft for ttft, one in got if ttft is not None),
        tbt_ms=tuple(gap * 1e3 for _, one in got for gap in one.gaps),
        seconds=max(ends) - begin,
        answers=tuple(one.text if one.error is None else None for _, one in got),
    )


def saturation(url: str, corpus: Corpus, args: Any) -> float:
    """Requests a second when all come at once."""
    asked = mixed(corpus, "saturation", args.requests, args.chat)
    asyncio.run(flush(url))
    got = asyncio.run(send(url, asked, [0.0] * len(asked), args.max_new_tokens))
    return len(got) / (max(one.last for _, one in got) - min(one.sent for _, one in got))


def ratios(windows: Sequence[Window], base: str, side: str, load: float) -> dict[str, Any]:
    """Of each figure base / side: median over repeats and its ends."""
    of = {(one.side, one.repeat): one.figures() for one in windows if one.load == load}
    repeats = sorted({repeat for name, repeat in of if name == base})
    told = {}
    for name in ("ttft_p50_ms", "ttft_p95_ms", "tbt_p50_ms", "tbt_p95_ms", "tbt_p99_ms"):
        each = [of[base, repeat][name] / of[side, repeat][name] for repeat in repeats]
        told[name] = [float(np.median(each)), min(each), max(each)]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--sides", default="fcfs,lpm,kvshare,kvshare+slo")
    parser.add_argument("--loads", default="0.7,0.95,1.2", help="shares of saturation")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pool-tokens", type=int, default=1300)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--chat", default="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
    parser.add_argument("--rate", type=float, help="of saturation, where it is known")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.chat = args.chat.replace("\\n", "\n")
    corpus = load_corpus(args.model, DataSource())
    console = Console()
    names = args.sides.split(",")
    windows: list[Window] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {}
        for name in names:
            mode, own = SIDES[name]
            flags = (*FLAGS, "--max-total-tokens", str(args.pool_tokens), *own)
            log = folder / f"{name}.log"
            console.print(f"starting {name}", highlight=False)
            server = stack.enter_context(Server(args.model, mode=mode, log=log, args=flags))
            urls[name] = server.url
        for name in names:
            console.print(f"warming up {name}", highlight=False)
            # The first forwards of a process are slow, and lengths are learnt.
            warm = mixed(corpus, "warm-up", args.requests, args.chat)
            asyncio.run(send(urls[name], warm, [0.0] * len(warm), args.max_new_tokens))
        rate = args.rate or saturation(urls[names[0]], corpus, args)
        console.print(f"saturation of {names[0]}: {rate:.3f} requests/s", highlight=False)
        for repeat in range(args.repeats):
            for load in map(float, args.loads.split(",")):
                asked = mixed(corpus, f"{load} {repeat}", args.requests, args.chat)
                for name in [*names[repeat % len(names) :], *names[: repeat % len(names)]]:
                    one = window(name, urls[name], load, repeat, asked, args, rate * load)
                    windows.append(one)
                    told = " ".join(f"{k}={v:.4g}" for k, v in one.figures().items())
                    console.print(f"{name} {load} #{repeat}: {told}", highlight=False)
                    if args.out is not None:
                        keep(args.out, windows, rate)
    report(console, windows, names)


def keep(path: Path, windows: Sequence[Window], rate: float) -> None:
    """All windows so far, so that a run that is cut off has told something."""
    facts = {"command": sys.argv[1:], "machine": machine_facts(), "saturation_per_s": rate}
    path.write_text(json.dumps(facts | {"windows": [asdict(one) for one in windows]}, indent=1))


def report(console: Console, windows: Sequence[Window], names: Sequence[str]) -> None:
    loads = sorted({one.load for one in windows})
    for base in (name for name in names if SIDES[name][0] == "stock"):
        table = Table(title=f"{base} / side: median over repeats [least, most]")
        for column in ("side", "load", "TTFT p50", "TTFT p95", "TBT p50", "TBT p95", "TBT p99"):
            table.add_column(column)
        for side in names:
            if side == base:
                continue
            for load in loads:
                cells = [
                    f"{middle:.2f} [{low:.2f}, {high:.2f}]"
                    for middle, low, high in ratios(windows, base, side, load).values()
                ]
                table.add_row(side, f"{load:g}", *cells)
        console.print(table)
    lost = sum(answer is None for one in windows for answer in one.answers)
    unequal = differing(windows, names[0])
    console.print(f"lost requests: {lost}; answers unlike {names[0]}'s: {unequal}")


def differing(windows: Sequence[Window], base: str) -> dict[str, str]:
    """Of each other side, answers that differ from the base's, of how many."""
    of = {(one.side, one.load, one.repeat): one.answers for one in windows}
    told: dict[str, list[int]] = {}
    for (side, load, repeat), answers in of.items():
        if side != base:
            pairs = list(zip(answers, of[base, load, repeat], strict=True))
            counts = told.setdefault(side, [0, 0])
            counts[0] += sum(mine != theirs for mine, theirs in pairs)
            counts[1] += len(pairs)
    return {side: f"{unlike} of {count}" for side, (unlike, count) in told.items()}


if __name__ == "__main__":
    main()
