"""``kvshare eval simulate``: what a schedule does to users, without a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvshare_eval import interruptible
from kvshare_eval.command_line import plain_command
from kvshare_eval.errors import EvalError
from kvshare_eval.front import told
from kvshare_eval.run_dir import RunDir, load_run
from kvshare_eval.simulator.cli_options import (
    Count,
    Data,
    Experiment,
    Preset,
    Rate,
    Seed,
    Sides,
    Workload,
    with_experiment,
)
from kvshare_eval.simulator.costs import load_costs
from kvshare_eval.simulator.experiments import (
    Laboratory,
    Run,
    Setup,
    ablation_sides,
    sweep,
    to_record,
)
from kvshare_eval.simulator.results import Outcome
from kvshare_eval.simulator.settings import Flags, side_named
from kvshare_eval.simulator.tables import against_table, outcomes_table, sweep_text, table
from kvshare_eval.simulator.workloads import make_workload

simulate = typer.Typer(
    name="simulate",
    help="Simulate a server's schedule: stock's, KVShare's, and each of its parts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Url = Annotated[str, typer.Option(help="Address of a running SGLang server that is idle.")]


@simulate.command()
@told()
@with_experiment
def run(experiment: Experiment, rate: Rate = 0.0, side: Sides = None) -> None:
    """Simulate sides at one load, and compare them with the first."""
    _compare(experiment, _sides(side), rate)


@simulate.command()
@told()
@with_experiment
def ablate(experiment: Experiment, rate: Rate = 0.0) -> None:
    """Stock, all of KVShare's parts, all but each, and each alone."""
    _compare(experiment, ablation_sides(), rate)


@simulate.command(name="sweep")
@told()
@with_experiment
def sweep_loads(
    experiment: Experiment,
    rate: Annotated[float, typer.Option(min=0.001, help="Where the search begins.")] = 8.0,
    side: Sides = None,
) -> None:
    """Find the load at which the first side meets half of its SLOs, and what each stands at 90 %.

    At that load the sides are compared; the highest rate is that at which 90 % of all requests meet
    both SLOs.
    """
    sides = _sides(side)
    setup = experiment.setup()
    with _laboratory(setup, experiment.jobs, experiment.out) as laboratory:
        found = sweep(laboratory, setup, sides, experiment.seeds, rate, base=sides[0])
    typer.echo(sweep_text(found, sides[0]))


@simulate.command()
@told()
def calibrate(
    url: _Url,
    out: Annotated[Path, typer.Option(help="YAML file to write; --costs takes it.")],
    costs: Annotated[str, typer.Option(help="Preset that says what is not measured.")] = "this-cpu",
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prefills.")] = (
        "16,64,128,256,512,1024,2048"
    ),
    batches: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,2,4,8,16",
    context_tokens: Annotated[str, typer.Option(help="Lengths of their prompts.")] = "32,512",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    host_memory: Annotated[
        bool, typer.Option(help="KV is in this machine's memory: measure its copies.")
    ] = False,
) -> None:
    """Measure a running server's prefills and decode steps, fit costs, and show the error."""
    from dataclasses import replace

    from kvshare_eval.simulator.calibrate import Plan, copy_bandwidth
    from kvshare_eval.simulator.calibrate import calibrate as measure

    plan = Plan(_ints(prompt_tokens), _ints(batches), _ints(context_tokens), repeats=repeats)
    found = interruptible.run(measure(url.rstrip("/"), load_costs(costs), plan, say=typer.echo))
    made = found.costs
    if host_memory:
        bandwidth = copy_bandwidth()
        made = replace(made, out_bytes_per_ms=bandwidth, in_bytes_per_ms=bandwidth)
    rows = [["forward", "size", "measured ms", "fit ms", "error"]]
    rows += [
        [
            p.kind,
            "x".join(f"{s:g}" for s in p.sizes[1:]),
            f"{p.ms:.1f}",
            f"{p.told_ms:.1f}",
            f"{p.error:+.0%}",
        ]
        for p in found.points
    ]
    said = table(rows)
    worst = ", ".join(f"{kind} {found.worst_error(kind):.0%}" for kind in ("prefill", "decode"))
    about = (
        f"Measured by `kvshare eval simulate calibrate`; worst error of the fit: {worst}.\n{said}"
    )
    out.write_text(replace(made, name=out.stem, about=about).to_yaml(), encoding="utf-8")
    typer.echo(f"\n{said}\n\nworst error: {worst}; written to {out}")


@simulate.command()
@told()
def validate(
    url: _Url,
    costs: Preset = "this-cpu",
    workload: Workload = "plain:prompt=256,prompt_sigma=0.5,output=24,output_sigma=0.5",
    requests: Count = 40,
    rate: Annotated[float, typer.Option(min=0.001, help="Mean arrivals a second.")] = 0.5,
    side: Annotated[str, typer.Option(help="What the server runs.")] = "stock",
    seed: Seed = 1,
    data: Data = None,
) -> None:
    """Send a small workload to a server, simulate the same one, and show both.

    The answers have the lengths asked, so the workload must not name another bound (max_new).
    """
    from dataclasses import replace

    from kvshare_eval.simulator.validate import WITHIN
    from kvshare_eval.simulator.validate import validate as measure

    made = make_workload(workload, requests, seed, data).at_rate(rate)
    made = replace(made, max_new=made.output, ignore_eos=True)
    compared, flags = interruptible.run(
        measure(url.rstrip("/"), made, load_costs(costs), side_named(side), seed=seed)
    )
    rows = [["figure", "measured ms", "simulated ms", "simulated / measured", f"{WITHIN:.0%}"]]
    rows += [
        [
            c.name,
            f"{c.measured_ms:.1f}",
            f"{c.simulated_ms:.1f}",
            f"{c.ratio:.2f}",
            "within" if c.near else "OUTSIDE",
        ]
        for c in compared
    ]
    typer.echo(f"{flags}\n\n{table(rows)}")
    if not all(each.near for each in compared):
        raise typer.Exit(1)


def _compare(experiment: Experiment, sides: Sequence[str], rate: float) -> None:
    setup = experiment.setup()
    with _laboratory(setup, experiment.jobs, experiment.out) as laboratory:
        runs = [Run(setup, side, rate, seed) for side in sides for seed in experiment.seeds]
        results = laboratory.all(runs)
    by_side = {
        side: [result for run, result in zip(runs, results, strict=True) if run.side == side]
        for side in sides
    }
    typer.echo(outcomes_table(by_side))
    if len(sides) > 1:
        typer.echo("\n" + against_table(by_side, sides[0]))


@contextmanager
def _laboratory(setup: Setup, jobs: int, out: Path | None) -> Iterator[Laboratory]:
    """One that says what it does, and keeps it where ``out`` is given."""
    console = Console(stderr=True)
    laboratory = Laboratory(jobs)

    def say(run: Run, result: Outcome) -> None:
        console.print(
            f"{run.side} at {result.offered:.3g}/s, seed {run.seed}: both SLOs {result.slo:.1%}",
            highlight=False,
            soft_wrap=True,
        )

    if out is None:
        laboratory.done = say
        yield laboratory
        return
    command = plain_command([Path(sys.argv[0]).name, *sys.argv[1:]])
    with RunDir(
        out, kind="simulation", command=command, settings=_settings(setup), resume=True
    ) as kept:
        names = {field.name for field in fields(Outcome)}
        for record in load_run(out).records:
            told_of = {name: value for name, value in record.items() if name in names}
            laboratory.known[record["key"]] = Outcome(**told_of)

        def keep(run: Run, result: Outcome) -> None:
            kept.append(to_record(run, result))
            say(run, result)

        laboratory.done = keep
        yield laboratory


def _settings(setup: Setup) -> dict[str, object]:
    """What decides an outcome beside its own key."""
    return {
        "workload": setup.workload,
        "requests": setup.count,
        "costs": setup.costs.to_yaml(),
        "flags": {field.name: getattr(setup.flags, field.name) for field in fields(Flags)},
        "ttft_slo_ms": setup.ttft_slo_ms,
        "tbt_slo_ms": setup.tbt_slo_ms,
    }


def _sides(given: list[str] | None) -> list[str]:
    sides = list(dict.fromkeys(given or ["stock", "kvshare"]))
    for side in sides:
        side_named(side)
    return sides


def _ints(text: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise EvalError(f"{text}: write whole numbers from 1 on, separated by commas")
    return values
