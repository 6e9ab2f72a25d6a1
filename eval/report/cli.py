"""``report`` and ``compare``, to be added to the command that carries them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

# What draws and computes is imported when a command runs: `--help` needs none of it.


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The page, ending in .md, or a folder for report.md."),
    ] = Path("report.md"),
) -> None:
    """Write one Markdown page with tables and figures from any number of runs."""
    from kvshare_eval.report.page import write_report

    page = write_report(runs, out)
    typer.echo(f"{page} is written.")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The run before.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The run after.")],
    threshold: Annotated[
        float,
        typer.Option(help="Relative size from which a change for the worse is a regression."),
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what got better or worse beyond noise.

    Ends with 0, with 1 on a regression past the threshold, and with 2 when the runs cannot be
    compared.
    """
    from kvshare_eval.report.comparison import compare as hold_against
    from kvshare_eval.report.comparison_text import render

    found = hold_against(a, b, threshold)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else render(found))
    if found.has_regression:
        raise typer.Exit(1)
