"""``kvshare eval serving``: what reuse gains in time, and against whom."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvshare_eval.command_line import plain_command, plain_words
from kvshare_eval.errors import EvalError
from kvshare_eval.front import server_flags
from kvshare_eval.loaders import DataSource
from kvshare_eval.progress import bar
from kvshare_eval.run_dir import RunDir, load_run
from kvshare_eval.serving.plan import AUTO, Amount, make_specs, read_rates
from kvshare_eval.serving.runner import Runner
from kvshare_eval.serving.sides import check_sides, read_urls, started_sides, url_sides
from kvshare_eval.serving.sweep import CLIENTS, Slo, Sweep, check_sweep, clients_of
from kvshare_eval.serving.tokens import load_corpus
from kvshare_eval.serving.window import ClientSettings
from kvshare_eval.serving.workloads import workloads

DEFAULT_WORKLOADS = ("rag", "no_reuse")
DEFAULT_MULTIPLES = "0.25,0.5,0.75,1,1.25,1.5,2"
NONE = "none"
#: What the servers that are started get beside ``--server-args``.
QUIET = ("--log-level-http", "warning")
METRICS = "--enable-metrics"


def serving(
    model: Annotated[
        str, typer.Option(help="Model folder or hub name: served, and its tokenizer used.")
    ],
    out: Annotated[Path, typer.Option(help="Run directory to make, or to go on with.")],
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME:option=value,...; may be repeated. Names: "
            + ", ".join(workloads())
            + f". Default: {', '.join(DEFAULT_WORKLOADS)}."
        ),
    ] = None,
    sides: Annotated[
        str,
        typer.Option(
            help="Which of stock, off, reuse and SELECTOR@RATIO, in the order of the first repeat."
        ),
    ] = "stock,off,reuse",
    url: Annotated[
        list[str] | None,
        typer.Option(help="SIDE=http://HOST:PORT of a running server; replaces --sides. Repeat."),
    ] = None,
    server_args: Annotated[
        str | None,
        typer.Option(
            help="Flags of the servers that are started, as one string; by default what suits a "
            "machine without an accelerator, and none where there is one."
        ),
    ] = None,
    rates: Annotated[
        str,
        typer.Option(
            help="Requests a second, and 'closed' for one at a time, as a list; 'auto': closed, "
            "and multiples of what stock serves one at a time."
        ),
    ] = AUTO,
    rate_multiples: Annotated[
        str, typer.Option(help="The multiples for --rates auto.")
    ] = DEFAULT_MULTIPLES,
    shares: Annotated[str, typer.Option(help="Reusable shares to sweep, as a list.")] = "",
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths to sweep, as a list.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Windows for each side and rate.")] = 3,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests a window. Default: --window-seconds decides."),
    ] = None,
    window_seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Arrivals of this time make a window. Default: 60."),
    ] = None,
    closed_requests: Annotated[
        int, typer.Option(min=1, help="Requests of a window that sends one at a time.")
    ] = 8,
    slo_ttft_ms: Annotated[
        str, typer.Option(help="Limit in ms; 'auto': 3 times stock's median alone; or 'none'.")
    ] = AUTO,
    slo_tbt_ms: Annotated[str, typer.Option(help="The same for time between tokens.")] = AUTO,
    client: Annotated[
        str,
        typer.Option(
            help="own, sglang (its bench_serving), or auto: sglang's where it can send the "
            "workload. Only our own counts TTFT from the time a request was due, and knows "
            "the scheduler's CPU time."
        ),
    ] = "auto",
    timeout_seconds: Annotated[
        float, typer.Option(min=0.1, help="After which a request is given up.")
    ] = 600.0,
    poll: Annotated[bool, typer.Option(help="Watch the KV pool through /metrics.")] = True,
    data: Annotated[Path | None, typer.Option(help="Folder with traces.")] = None,
    server_logs: Annotated[
        Path | None, typer.Option(help="Folder for the servers' logs. Default: thrown away.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides every prompt and arrival.")] = 1,
    resume: Annotated[bool, typer.Option(help="Go on with the run that --out holds.")] = False,
) -> None:
    """Measure TTFT, time between tokens and throughput under load, side by side.

    Starts stock SGLang and SGLang with KVShare, or takes servers that run (--url), and sends the
    same requests to each side in turn, the cache emptied before each window.
    """
    urls = read_urls(url or [])
    names = check_sides(list(urls) or _list("--sides", sides, str))
    if urls and server_args:
        raise EvalError("--server-args: for servers that are started, not for --url")
    if client not in CLIENTS:
        raise EvalError(f"--client {client}: allowed are {', '.join(CLIENTS)}")
    if requests is not None and window_seconds is not None:
        raise EvalError("--requests and --window-seconds: give one of them")
    multiples = _positive("--rate-multiples", rate_multiples)
    sweep = Sweep(
        specs=make_specs(
            workload or DEFAULT_WORKLOADS,
            _list("--shares", shares, float),
            _list("--prompt-tokens", prompt_tokens, int),
        ),
        rates=read_rates(rates),
        multiples=multiples,
        repeats=repeats,
        amount=Amount(requests, _seconds(requests, window_seconds), closed_requests),
        seed=seed,
        slo=Slo(_limit("--slo-ttft-ms", slo_ttft_ms), _limit("--slo-tbt-ms", slo_tbt_ms)),
        client=client,
    )
    own = () if urls else server_flags(server_args)
    flags = [*QUIET, *([METRICS] if poll else []), *own]
    settings = {
        "model": Path(model).name if Path(model).exists() else model,
        "sides": list(names),
        "servers": "given by URL" if urls else plain_words(flags),
        "workloads": [spec.text for spec in sweep.specs],
        "rates": rates,
        "rate_multiples": list(multiples),
        "repeats": repeats,
        "requests": requests,
        "window_seconds": sweep.amount.seconds,
        "closed_requests": closed_requests,
        "slo_ttft_ms": sweep.slo.ttft_ms,
        "slo_tbt_ms": sweep.slo.tbt_ms,
        "clients": clients_of(sweep, model),
        "timeout_seconds": timeout_seconds,
        "poll": poll,
        "seed": seed,
    }
    corpus = load_corpus(model, DataSource(folder=data))
    check_sweep(sweep, names, corpus)
    command = plain_command([Path(sys.argv[0]).name, *sys.argv[1:]])
    run = RunDir(out, kind="serving", command=command, settings=settings, resume=resume)
    earlier = load_run(out).records
    with ExitStack() as stack:
        console = Console()
        if urls:
            running = url_sides(urls)
        else:
            made = stack.enter_context(tempfile.TemporaryDirectory())
            if server_logs is not None:
                server_logs.mkdir(parents=True, exist_ok=True)
            console.print("starting the servers", highlight=False)
            running = stack.enter_context(
                started_sides(names, model, flags, server_logs or Path(made))
            )
        stack.enter_context(run)
        progress = stack.enter_context(bar(console))
        runner = Runner(
            running,
            sweep,
            corpus,
            ClientSettings(model, timeout_seconds, poll),
            run,
            earlier=earlier,
            say=lambda text: progress.console.print(text, highlight=False, soft_wrap=True),
        )
        _carry_out(runner, progress)


def _carry_out(runner: Runner, progress: Progress) -> None:
    task = progress.add_task("warming up", total=None)
    runner.prepare()
    progress.update(task, description="calibrating")
    windows = runner.windows()
    counts = [runner.requests_of(window) for window, _ in windows]
    progress.update(task, total=sum(counts))
    done = 0
    for number, ((window, side), count) in enumerate(zip(windows, counts, strict=True), 1):
        progress.update(task, description=f"window {number} of {len(windows)}")
        runner.measure(window, side, lambda: progress.advance(task))
        done += count
        progress.update(task, completed=done)  # SGLang's client does not tell one by one
    progress.update(task, description=f"{len(windows)} windows done")


def _seconds(requests: int | None, seconds: float | None) -> float | None:
    return None if requests is not None else seconds or 60.0


def _limit(option: str, text: str) -> float | str | None:
    if text in (AUTO, NONE):
        return AUTO if text == AUTO else None
    return _positive(option, text)[0]


def _list(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(item.strip()) for item in text.split(",") if item.strip()]
    except ValueError:
        raise EvalError(f"{option} {text}: write numbers, separated by commas") from None


def _positive(option: str, text: str) -> tuple[float, ...]:
    values: Sequence[float] = _list(option, text, float)
    if not values or not all(0 < value < float("inf") for value in values):
        raise EvalError(f"{option} {text}: must be above 0")
    return tuple(values)
