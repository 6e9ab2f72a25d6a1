"""``kvshare eval quality``: what does reuse cost in quality?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvshare_eval import interruptible
from kvshare_eval.asking import Asker
from kvshare_eval.command_line import plain_command, plain_words
from kvshare_eval.errors import EvalError
from kvshare_eval.front import (
    data_source,
    one_server,
    server_facts,
    server_flags,
    server_or_url,
)
from kvshare_eval.loaders import DataSource
from kvshare_eval.metrics import all_scores
from kvshare_eval.progress import Counting
from kvshare_eval.quality.methods import Method, default_methods, parse_methods
from kvshare_eval.quality.runner import Depth, Part, QualityRun, take_cases
from kvshare_eval.quality.tasks import find_task, tasks
from kvshare_eval.rendering import load_renderer
from kvshare_eval.run_dir import RunDir, load_run
from kvshare_eval.stats.sample_size import plan_lines

#: Every plan is carried out: what is asked is what reuse costs, not whether it pays here.
_KVSHARE_FLAGS = ("--kvshare-gate", "off")
#: Of a server's facts, what may differ when a run goes on: the memory at hand decides it.
_MAY_CHANGE = ("max_total_num_tokens",)


@dataclass(frozen=True)
class QualitySettings:
    """What is measured; see :func:`quality` for the words."""

    model: str
    tokenizer: str | None
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    cases: int
    seed: int
    answers: bool
    gold: bool
    top: int
    positions: int
    data: str
    server: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "tasks": list(self.tasks),
            "methods": list(self.methods),
            "cases": self.cases,
            "seed": self.seed,
            "answers": self.answers,
            "gold": self.gold,
            "top": self.top,
            "positions": self.positions,
            "data": self.data,
            "server": {"flags": list(self.server)},
        }


def quality(
    out: Annotated[
        Path | None, typer.Option(help="The run directory to make.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Start a server for this folder or hub name.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Ask this running server instead.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="A task, as NAME or NAME:option=value,...; may be repeated. Default: all of them.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="full, no_context, exact_prefix, none, or SELECTOR@RATIO; may be repeated. "
            "Default: all but the last, and every selector at 0.1, 0.2 and 0.4.",
            show_default=False,
        ),
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases a task.")] = 30,
    answers: Annotated[
        bool,
        typer.Option(
            help="Generate and judge answers; without it only distributions are compared."
        ),
    ] = True,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the data sets; by default the small set of this package."),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Fetch data sets by name from the hub.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub name; by default the server's own.")
    ] = None,
    gold: Annotated[
        bool, typer.Option(help="Write the accepted answers, which are the data set's, as well.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the shuffles.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    top: Annotated[int, typer.Option(min=1, help="Tokens told apart at each position.")] = 20,
    positions: Annotated[int, typer.Option(min=1, help="Positions of an answer compared.")] = 32,
    api_key: Annotated[
        str | None, typer.Option(envvar="SGLANG_API_KEY", help="The server's --api-key.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run that is in OUT; cases, tasks and methods may be more.",
        ),
    ] = False,
    list_tasks: Annotated[
        bool, typer.Option("--list", help="List the tasks with their options and exit.")
    ] = False,
    server_args: Annotated[
        str | None,
        typer.Option(
            help="Flags of the server that is started, as one string; by default what suits a "
            "machine without an accelerator, and none where there is one."
        ),
    ] = None,
) -> None:
    """Compare every method with full recompute: answers, scores, next-token distributions.

    The methods are settings of a request; one server serves them all. Every figure of a report on
    this run comes from its records.jsonl.
    """
    if list_tasks:
        _list()
        raise typer.Exit(0)
    if out is None:
        raise EvalError("give the run directory to make: --out DIR")
    one_server(model, url, server_args)
    flags = () if url else (*server_flags(server_args), *_KVSHARE_FLAGS)
    settings = QualitySettings(
        model=plain_command([model or tokenizer or "given by URL"]),
        # Behind a URL the tokenizer stands for the model.
        tokenizer=plain_command([tokenizer]) if model and tokenizer else None,
        tasks=tuple(
            dict.fromkeys(task or [name for name, each in tasks().items() if each.by_default])
        ),
        methods=tuple(m.name for m in parse_methods(method or default_methods())),
        cases=cases,
        seed=seed,
        answers=answers,
        gold=gold,
        top=top,
        positions=positions,
        data="hub" if hub else data.resolve().name if data else "built in",
        server=tuple(plain_words(flags)),
    )
    source = data_source(data, hub)
    parts = _parts(settings, source)
    console = Console(stderr=True, highlight=False)
    for part in parts:
        for line in plan_lines(part.cases, len(part.groups), gold=part.has_gold):
            console.print(f"{part.label}: {line}", soft_wrap=True)
    run = RunDir(
        out,
        kind="quality",
        command=plain_command(["kvshare", *sys.argv[1:]]),
        settings=settings.to_dict(),
        resume=resume,
        may_grow=("tasks", "methods", "cases"),
    )
    with ExitStack() as stack:
        stack.enter_context(run)
        address = stack.enter_context(server_or_url(model, url, flags, console=console))
        counting = stack.enter_context(Counting(console))
        methods = parse_methods(settings.methods)
        interruptible.run(
            _measure(
                Asker(address, concurrency=concurrency, api_key=api_key),
                tokenizer or model,
                run,
                methods,
                parts,
                settings,
                counting,
            )
        )
    console.print(f"Done. Make a page of it: kvshare eval report {out}")


async def _measure(
    asker: Asker,
    tokenizer: str | None,
    run: RunDir,
    methods: Sequence[Method],
    parts: Sequence[Part],
    settings: QualitySettings,
    counting: Counting,
) -> None:
    async with asker:
        info = await asker.info()
        # What judges answers is loaded now, which takes seconds: later requests would wait for it.
        all_scores("", ("0",))
        renderer = load_renderer(tokenizer or str(info.get("tokenizer_path")))
        await _refuse_what_the_server_cannot(asker, methods)
        _note_server(run, server_facts(info))
        depth = Depth(settings.top, settings.positions)
        ask = QualityRun(
            asker,
            renderer,
            run,
            methods,
            depth=depth,
            keep_gold=settings.gold,
            done=counting.advance,
        )
        for part in parts:
            counting.add(part.label, part.cases, before=ask.finished(part))
        for part in parts:
            await ask.part(part)


def _note_server(run: RunDir, facts: dict[str, Any]) -> None:
    """Write down what server answers; a run goes on with one that is like the first."""
    if "server" not in run.done:
        run.append({"key": "server", "type": "server", **facts})
        return
    before = next(each for each in load_run(run.path).records if each["key"] == "server")
    for key in sorted(({*before, *facts}) - {"key", "type", *_MAY_CHANGE}):
        if before.get(key) != facts.get(key):
            raise EvalError(
                f"{run.path} was measured on a server with {key}={before.get(key)!r}, not "
                f"{facts.get(key)!r}: resume it with one like it"
            )


async def _refuse_what_the_server_cannot(asker: Asker, methods: Sequence[Method]) -> None:
    """Ask with every method once, before hours are spent: a bad selector is refused at once."""
    for method in methods:
        answered = await asker.generate([1, 2, 3], max_new_tokens=1, settings=method.settings)
        if not answered.report:
            raise EvalError(
                f"the server at {asker.url} says nothing about reuse: start it with --kvshare"
            )


def _parts(settings: QualitySettings, source: DataSource) -> list[Part]:
    found = []
    for label in settings.tasks:
        task, options = find_task(label)
        groups = take_cases(task.groups(source, settings.seed, options), settings.cases)
        found.append(Part(label, task, tuple(groups), settings.answers))
    return found


def _list() -> None:
    for task in tasks().values():
        options = ", ".join(f"{key}={value}" for key, value in task.defaults().items())
        typer.echo(f"{task.name}  {task.doc}")
        typer.echo(f"    judged by {task.metric}; options: {options or 'none'}")
