"""One Markdown page from any number of runs, its figures in a folder beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kvshare_eval.errors import EvalError
from kvshare_eval.report import quality_page, serving_page
from kvshare_eval.report.drawing import Drawing, Figure
from kvshare_eval.report.findings import (
    Finding,
    findings_section,
    quality_findings,
    serving_findings,
)
from kvshare_eval.report.quality import task_cases
from kvshare_eval.report.quality_figures import kl_figures
from kvshare_eval.report.serving import cells
from kvshare_eval.report.serving_figures import serving_figures
from kvshare_eval.report.text import (
    machine,
    model_name,
    provenance,
    settings_text,
    table,
)
from kvshare_eval.run_dir import Run, load_run


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page.

    Args:
        runs: run directories, of both kinds in any mixture.
        out: the page, ending in ``.md``, or a folder that gets a ``report.md``.

    Returns:
        Where the page is.

    Raises:
        EvalError: no runs, one that cannot be read, or two of the same name.
    """
    if not runs:
        raise EvalError("give at least one run directory")
    loaded = [load_run(path) for path in runs]
    names = [run.name for run in loaded]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EvalError(f"two runs are called {twice!r}: rename one, figures are traced by name")
    page = out if out.suffix == ".md" else out / "report.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    draw = Drawing(page.with_name(f"{page.stem}-figures"))
    page.write_text(_page(loaded, draw), encoding="utf-8")
    return page


def _page(runs: list[Run], draw: Drawing) -> str:
    findings: list[Finding] = []
    sections: list[str] = []
    for kind, how in (("quality", quality_page.HOW_TO_READ), ("serving", serving_page.HOW_TO_READ)):
        mine = [run for run in runs if run.kind == kind]
        if mine:
            sections += [f"## {kind.capitalize()}", "", how]
        for run in mine:
            part = _quality if kind == "quality" else _serving
            sections.append(part(run, draw, findings))
    head = ["# Evaluation", "", "## Runs", "", _runs_table(runs), ""]
    verdicts = ["## What loses, and what is noise", "", findings_section(findings)]
    return "\n".join([*head, *verdicts, *sections]).rstrip() + "\n"


def _runs_table(runs: list[Run]) -> str:
    head = ["run", "kind", "records", "model", "commit", "started", "machine"]
    rows = [
        [
            f"`{run.name}`",
            run.kind,
            str(len(run.records)),
            model_name(run),
            f"`{run.facts.get('commit', 'unknown')}`",
            str(run.facts.get("started", "unknown")),
            machine(run),
            ", ".join(f"{p} {run.facts.get(p, 'unknown')}" for p in ("python", "sglang", "torch")),
            settings_text(run.settings),
            f"`{run.facts.get('command', 'unknown')}`",
        ]
        for run in runs
    ]
    return table([*head, "versions", "settings", "command"], rows)


def _quality(run: Run, draw: Drawing, findings: list[Finding]) -> str:
    title = f"## Quality: {model_name(run)}, run `{run.name}`\n"
    tasks = task_cases(run)
    if not tasks:
        return f"{title}\nThe run holds no records yet.\n\n{provenance(run)}\n"
    findings += quality_findings(run, tasks)
    parts = [title, "### All tasks", "", quality_page.overview(run, tasks)]
    parts += [quality_page.task_section(run, task) for task in tasks]
    return "\n".join([*parts, _figures(run, draw, kl_figures(draw, run, tasks))])


def _serving(run: Run, draw: Drawing, findings: list[Finding]) -> str:
    title = f"## Serving: {model_name(run)}, run `{run.name}`\n"
    found = cells(run)
    if not found:
        return f"{title}\nThe run holds no complete window yet.\n\n{provenance(run)}\n"
    findings += serving_findings(run, found)
    parts = [title, serving_page.serving_section(run, found)]
    return "\n".join([*parts, _figures(run, draw, serving_figures(draw, run, found))])


def _figures(run: Run, draw: Drawing, figures: list[Figure]) -> str:
    folder = quote(draw.folder.name)
    return "\n".join(
        f"![{figure.caption}]({folder}/{figure.file})\n\n{figure.caption} {provenance(run)}\n"
        for figure in figures
    )
