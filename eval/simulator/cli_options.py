"""Options that commands of ``kvshare eval simulate`` have in common, as typer reads them.

:class:`Experiment` lists them once. A command that is decorated with :func:`with_experiment` takes
one as its first parameter; on the command line its fields are options beside the command's own:

    written       def run(experiment: Experiment, rate: ... = 0.0)
    typer sees    def run(*, rate: ... = 0.0, workload: ... = "azure-conv", requests: ..., ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from kvshare_eval.errors import EvalError
from kvshare_eval.simulator.costs import load_costs, presets
from kvshare_eval.simulator.experiments import Setup
from kvshare_eval.simulator.settings import PARTS, Flags
from kvshare_eval.simulator.workloads import described

NONE = "none"

Workload = Annotated[str, typer.Option(help=f"NAME:option=value,... {described()}")]
Count = Annotated[int, typer.Option(min=1, help="Requests of a run.")]
Preset = Annotated[
    str, typer.Option(help=f"Preset ({', '.join(presets())}) or a file of `calibrate`.")
]
Seed = Annotated[int, typer.Option(help="The first seed.")]
Data = Annotated[Path | None, typer.Option(help="Folder with traces.")]
Sides = Annotated[
    list[str] | None,
    typer.Option(
        help="stock, lpm, kvshare, kvshare-PART, stock+PART, each with :setting=value,...; "
        f"parts: {', '.join(PARTS)}. May be repeated. Default: stock and kvshare."
    ),
]
Rate = Annotated[float, typer.Option(min=0.0, help="Mean arrivals a second; 0: the workload's.")]
_Pool = Annotated[int | None, typer.Option(help="KV slots. Default: the preset's.")]
_Running = Annotated[int | None, typer.Option(help="As --max-running-requests of the server.")]
_Chunk = Annotated[int | None, typer.Option(help="As --chunked-prefill-size; 0: no chunks.")]
_Ttft = Annotated[str, typer.Option(help="TTFT SLO of every request in ms, or 'none'.")]
_Tbt = Annotated[str, typer.Option(help="TBT SLO of every request in ms, or 'none'.")]
_Repeats = Annotated[int, typer.Option(min=1, help="Seeds.")]
_Jobs = Annotated[int, typer.Option(min=1, help="Processes.")]
_Out = Annotated[
    Path | None, typer.Option(help="Run directory that keeps every outcome, and is gone on with.")
]


@dataclass(frozen=True)
class Experiment:
    """What is simulated on which machine, how often, and where outcomes are kept."""

    workload: Workload = "azure-conv"
    requests: Count = 100_000
    costs: Preset = "h100-llama-3.1-8b"
    pool_tokens: _Pool = None
    max_running: _Running = None
    chunked_prefill_size: _Chunk = None
    slo_ttft_ms: _Ttft = "2000"
    slo_tbt_ms: _Tbt = "100"
    repeats: _Repeats = 1
    seed: Seed = 1
    data: Data = None
    jobs: _Jobs = 1
    out: _Out = None

    def setup(self) -> Setup:
        """
        Raises:
            EvalError: no such costs, or an SLO that is none.
        """
        costs = load_costs(self.costs)
        flags = Flags.of(
            costs,
            pool_tokens=self.pool_tokens,
            max_running=self.max_running,
            chunked_prefill_tokens=self.chunked_prefill_size,
        )
        return Setup(
            self.workload,
            self.requests,
            self.data,
            costs,
            flags,
            ttft_slo_ms=_limit("--slo-ttft-ms", self.slo_ttft_ms),
            tbt_slo_ms=_limit("--slo-tbt-ms", self.slo_tbt_ms),
        )

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.repeats)


_Own = ParamSpec("_Own")


def with_experiment(
    command: Callable[Concatenate[Experiment, _Own], None],
) -> Callable[..., None]:
    """The command with the fields of :class:`Experiment` in the place of its first parameter."""
    # Typer reads a signature, and wants types in it, not their names.
    types = get_type_hints(command, include_extras=True)
    of_field = get_type_hints(Experiment, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = list(inspect.signature(command).parameters.values())[1:]
    parameters = [p.replace(kind=keyword, annotation=types[p.name]) for p in own]
    parameters += [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=of_field[f.name])
        for f in fields(Experiment)
    ]

    @wraps(command)
    def with_options(**given: Any) -> None:
        common = {f.name: given.pop(f.name) for f in fields(Experiment)}
        command(Experiment(**common), **given)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _limit(option: str, text: str) -> float | None:
    if text == NONE:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 < limit < float("inf"):
        raise EvalError(f"{option} {text}: write milliseconds above 0, or {NONE}")
    return limit
