"""``kvshare eval``: what reuse costs in quality, what it gains in time, and what changed."""

from __future__ import annotations

import typer

from kvshare_eval.front import told
from kvshare_eval.quality.cli import quality
from kvshare_eval.report.cli import compare, report
from kvshare_eval.serving.cli import serving
from kvshare_eval.simulator.cli import simulate

app = typer.Typer(
    name="eval",
    help="Measure what reuse costs in quality and gains in time, on your model and your data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (quality, serving, report, compare):
    app.command()(told()(command))
app.add_typer(simulate)
