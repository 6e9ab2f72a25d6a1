"""Five passages in five orders, asked five questions: what KVShare reuses and how much it saves.

    python -m kvshare_eval.demo --model DIR [-- further flags of both servers]

One server at a time is started and stopped: SGLang with KVShare, then stock SGLang. What is printed
is measured in this run; the last lines say how.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_kvshare import __version__

from .machine import cpu_name, git_commit
from .passages import Passage, Question, build_prompt, load_passages
from .servers import Answer, Server, ServerError

PASSAGES = 5
SEED = 1
ANSWER_TOKENS = 16
PLAIN_WIDTH = 100
#: Times of the same work that differ by more than this factor say that the machine was not quiet.
CALM_SPREAD = 1.25


@dataclass(frozen=True)
class Turn:
    """One request: ``order`` numbers the passages from 1; ``input_ids`` is what is sent."""

    order: tuple[int, ...]
    question: Question
    input_ids: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """The same turn, answered three times."""

    turn: Turn
    kvshare: Answer
    off: Answer
    stock: Answer


def choose_passages(passages: Sequence[Passage]) -> tuple[list[Passage], list[Passage]]:
    """The longest passages, to ask about, and the next longest ones, to warm up with."""
    longest = sorted(passages, key=lambda passage: len(passage.text), reverse=True)
    return longest[:PASSAGES], longest[PASSAGES : 2 * PASSAGES]


def choose_orders(seed: int = SEED) -> list[tuple[int, ...]]:
    """As many different orders of the numbers 1 to 5; the first one is the natural one."""
    shuffle = random.Random(seed)
    orders = [tuple(range(1, PASSAGES + 1))]
    while len(orders) < PASSAGES:
        order = tuple(shuffle.sample(orders[0], PASSAGES))
        if order not in orders:
            orders.append(order)
    return orders


def make_turns(passages: Sequence[Passage], encode: Callable[[str], Sequence[int]]) -> list[Turn]:
    """Request i asks the first question about passage i, wherever that stands in order i."""
    turns = []
    for order, asked in zip(choose_orders(), passages, strict=True):
        question = asked.questions[0]
        text = build_prompt([passages[number - 1] for number in order], question)
        turns.append(Turn(order, question, tuple(encode(text))))
    return turns


def chat_encoder(model: Path) -> Callable[[str], list[int]]:
    """Turns a user message into the tokens of the model's own chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))

    def encode(text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        return list(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        )

    return encode


def measure(
    model: Path,
    turns: Sequence[Turn],
    warm_up: Sequence[Turn],
    server_args: Sequence[str],
    logs: Path,
    say: Callable[[str], None],
) -> tuple[list[Measured], dict[str, Any]]:
    """Run every turn in all three ways; returns also the first server's settings."""

    def ask(server: Server, **options: Any) -> list[Answer]:
        return [
            server.generate(turn.input_ids, max_new_tokens=ANSWER_TOKENS, **options)
            for turn in turns
        ]

    def ready(server: Server) -> None:
        say(f"  ready after {server.start_seconds:.0f} s; warming up with two other prompts")
        for turn in warm_up:
            server.generate(turn.input_ids, max_new_tokens=ANSWER_TOKENS)
        server.flush_cache()

    say("starting SGLang with KVShare")
    with Server(model, args=server_args, log=logs / "kvshare.log") as server:
        ready(server)
        info = server.info()
        say(f"  {len(turns)} requests with KVShare")
        kvshare = ask(server)
        # A request with reuse off publishes its KV like any other: it comes after, not between.
        server.flush_cache()
        say("  the same with reuse off")
        off = ask(server, kvshare={"reuse": "off"})
    say("stopped; starting stock SGLang")
    with Server(model, mode="stock", args=server_args, log=logs / "stock.log") as server:
        ready(server)
        say("  the same with stock SGLang")
        stock = ask(server)
    say("stopped")
    answers = zip(turns, kvshare, off, stock, strict=True)
    return [Measured(*each) for each in answers], info


def count(answer: Answer, name: str) -> int:
    """One of KVShare's counts for one answer."""
    if answer.report is None:
        raise ServerError("the server reported nothing about reuse: KVShare was not active")
    return int(answer.report[name])


def reused_tokens(results: Sequence[Measured]) -> int:
    return sum(count(result.kvshare, "reused_tokens") for result in results)


def times_table(results: Sequence[Measured]) -> Table:
    """Tokens and times of each request, and the medians of those that could reuse something."""
    tokens = ("prompt", "prefix", "reused", "recom-\nputed", "new")
    times = ("TTFT\nKVShare", "TTFT\nno reuse", "TTFT\nstock", "stock's\nprefix")
    ratios = ("no reuse\n/KVShare", "stock\n/KVShare")
    # The box has a blank between columns already.
    table = Table(box=SIMPLE_HEAD, padding=0, title="Prompt tokens and time to first token (TTFT)")
    table.add_column("request:\npassages", no_wrap=True)
    for name in tokens + times + ratios:
        table.add_column(name, justify="right", no_wrap=True)
    for number, result in enumerate(results, 1):
        counts = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens")
        table.add_row(
            f"{number}: {' '.join(map(str, result.turn.order))}",
            str(result.kvshare.prompt_tokens),
            *(str(count(result.kvshare, name)) for name in counts),
            *_times(
                result.kvshare.ttft,
                result.off.ttft,
                result.stock.ttft,
                str(result.stock.cached_tokens),
            ),
            end_section=number in (1, len(results)),
        )
    later = results[1:]
    medians = _times(
        statistics.median(result.kvshare.ttft for result in later),
        statistics.median(result.off.ttft for result in later),
        statistics.median(result.stock.ttft for result in later),
        "",
    )
    table.add_row(f"median 2-{len(results)}", *[""] * 5, *medians, style="bold")
    return table


def _times(kvshare: float, off: float, stock: float, stock_prefix: str) -> list[str]:
    return [
        f"{kvshare:.2f} s",
        f"{off:.2f} s",
        f"{stock:.2f} s",
        stock_prefix,
        f"{off / kvshare:.1f} x",
        f"{stock / kvshare:.1f} x",
    ]


def caution(results: Sequence[Measured]) -> str | None:
    """A warning when the times cannot be compared.

    The first request finds an empty cache: all three ways compute all of it, and take as long.
    """
    first = results[0]
    times = sorted((first.kvshare.ttft, first.off.ttft, first.stock.ttft))
    if times[-1] <= CALM_SPREAD * times[0]:
        return None
    return (
        f"Do not trust these times: request 1 is the same work in all three columns, yet took from "
        f"{times[0]:.2f} to {times[-1]:.2f} s. Other processes kept the machine busy; run again "
        "when it is quiet."
    )


def answers_table(results: Sequence[Measured]) -> Table:
    """What was answered, beside what the passage says."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"Answers, first {ANSWER_TOKENS} tokens")
    table.add_column("request and question")
    table.add_column("the passage says")
    table.add_column("with KVShare")
    table.add_column("no reuse, stock")
    for number, result in enumerate(results, 1):
        full = [_line(result.off)]
        if result.stock.text != result.off.text:
            full.append(_line(result.stock))
        question = result.turn.question
        row = [f"{number}: {question.question}", question.answers[0], _line(result.kvshare)]
        table.add_row(*map(escape, [*row, "\nstock: ".join(full)]))
    return table


def _line(answer: Answer) -> str:
    return " ".join(answer.text.split())


def provenance(model: Path, info: dict[str, Any], server_args: Sequence[str], machine: str) -> str:
    """Where the figures come from."""
    setting = {key: info.get(key, "?") for key in ("version", "device", "dtype")}
    backend = info.get("attention_backend", "?")
    flags = f", flags {' '.join(server_args)}" if server_args else ""
    return f"""Where the figures come from
- prefix, reused, recomputed, new: the server's own counters, in each response under
  meta_info.cached_tokens_details.kvshare; they sum to the prompt. stock's prefix: what stock
  SGLang took from its own cache (meta_info.cached_tokens).
- TTFT: this client's clock, from sending /generate to the first streamed token; the same token ids
  each time, one request at a time, measured once. First all requests with KVShare; then, the cache
  emptied, "no reuse": the same server with custom_params.kvshare.reuse = off, which takes nothing
  from the cache; then stock SGLang: a second server, same flags, its prefix cache on, KVShare not
  loaded. Each server had answered two other prompts of this size before.
- Request 1 meets an empty cache; the medians leave it out.
- Model {model.name}, {setting["dtype"]}, attention {backend}, device {setting["device"]};
  {machine};
  SGLang {setting["version"]}, sglang-kvshare {__version__} at commit {git_commit()}{flags}.
- The token counts are the same in every run. The times are not: they depend on what else the
  machine does."""


def describe_machine() -> str:
    """The processor, how many cores this process may use, and how busy they are just now."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {cpu_name()}, load {os.getloadavg()[0]:.1f} before the start"


def main(
    model: Annotated[Path, typer.Option(help="A Hugging Face folder.", show_default=False)],
    server_args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="Flags for both servers.")
    ] = None,
) -> None:
    """Serve five passages in five orders with KVShare, with reuse off, and with stock SGLang."""
    console = Console(
        width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=False
    )
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {escape(text)}", style="dim")

    flags = list(server_args or [])
    machine = describe_machine()
    say("reading the model's tokenizer")
    encode = chat_encoder(model)
    asked, others = choose_passages(load_passages())
    turns, warm_up = make_turns(asked, encode), make_turns(others, encode)[:2]
    for number, passage in enumerate(asked, 1):
        console.print(f"passage {number}: {escape(passage.title)}, {escape(passage.author)}")
    logs = Path(tempfile.mkdtemp(prefix="kvshare-demo-"))
    say(f"server logs: {logs} (removed when all goes well)")
    try:
        results, info = measure(model, turns, warm_up, flags, logs, say)
        console.print(times_table(results))
        if warning := caution(results):
            console.print(warning, style="bold")
        if reused_tokens(results) == 0:
            reasons = sorted({str((each.kvshare.report or {}).get("reason")) for each in results})
            raise ServerError(f"nothing was reused (reasons given: {', '.join(reasons)})")
    except ServerError as error:
        print(f"demo: {error}\ndemo: the servers' logs are in {logs}", file=sys.stderr)
        raise typer.Exit(1) from None
    shutil.rmtree(logs, ignore_errors=True)
    console.print(answers_table(results))
    console.print(escape(provenance(model, info, flags, machine)))


if __name__ == "__main__":
    typer.run(main)
