"""``kvshare eval``: what reuse costs in quality, what it gains in time, and what changed."""

from __future__ import annotations

import typer

from kvshare_eval.quality.cli import quality

app = typer.Typer(
    name="eval",
    help="Measure what reuse costs in quality and gains in time, on your model and your data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(quality)
