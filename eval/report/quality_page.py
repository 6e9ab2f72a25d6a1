"""The tables of quality runs."""

from __future__ import annotations

import math

from kvshare_eval.report.quality import (
    BASE,
    FULL,
    NO_CONTEXT,
    MethodSummary,
    TaskCases,
)
from kvshare_eval.report.quality_overview import OverTasks, over_tasks
from kvshare_eval.report.text import (
    NONE,
    Format,
    fixed,
    interval,
    number,
    percent,
    plain,
    provenance,
    signed,
    table,
)
from kvshare_eval.run_dir import Run
from kvshare_eval.stats.bootstrap import MIN_GROUPS, Interval
from kvshare_eval.stats.paired import KL_FLOOR, Wins

HOW_TO_READ = f"""\
Intervals are 95 %, by bootstrap over groups: cases of one group share passages and donors. All
comparisons are paired: they use the cases that both methods have.

- **minus full**, **of full**: mean score less, and as a fraction of, full recompute's.
- **PGR**: (score - no context) / (full - no context); "{NONE}" where full is not clearly better
  than no context.
- **KL**: of the next-token distribution from full recompute's, in nats, teacher-forced over full
  recompute's own answer; the mean over an answer's tokens is one value. It is a lower bound: tokens
  that full recompute does not name share one bucket.
- **KL / none**: geometric mean over cases of the ratio to `{BASE}`, reuse without repair; below 1
  is closer to full recompute. Values are raised to {KL_FLOOR:g} nats first, since below it both are
  as good as equal. A mean of KL is carried by a few prompts.
- **better / equal / worse**: cases, against `{BASE}`; p of the sign test over groups.
- **first change**: where greedy text would part from full recompute's, the median of token indices,
  and the share of answers in which it never does.
- **reused**, **computed**: of all prompt tokens; the rest came from the exact prefix.
"""


def task_section(run: Run, task: TaskCases) -> str:
    """Up to two tables: what the answers are worth, and what changed under them."""
    rows = task.summaries
    parts = [f"### {task.task}", ""]
    scored = [row for row in rows if row.score is not None]
    if scored:
        parts += [_answers(scored, task.metric), ""]
    else:
        parts += ["No answers with gold in this task: divergence only.", ""]
    parts += [_divergence(rows), ""]
    for method in (FULL, BASE):
        if method not in task.by_method:
            parts += [f"`{method}` was not run: figures relative to it are missing.", ""]
    if all(row.groups < MIN_GROUPS for row in rows):
        parts += [f"Fewer than {MIN_GROUPS} groups: no intervals can be given.", ""]
    return "\n".join([*parts, provenance(run), ""])


def _answers(rows: list[MethodSummary], metric: str) -> str:
    head = ["method", "cases (groups)", metric, "minus full", "of full", "PGR"]
    return table(
        [*head, "better / equal / worse than none"],
        [
            [
                f"`{row.method}`",
                _size(row),
                interval(row.score, fixed),
                interval(row.minus_full, signed),
                interval(row.fraction, fixed),
                interval(row.pgr, fixed),
                wins(row.score_wins),
            ]
            for row in rows
        ],
    )


def _divergence(rows: list[MethodSummary]) -> str:
    head = ["method", "cases (groups)", "KL / none", "KL median", "KL p90", "KL mean"]
    head += ["better / equal / worse than none", "top-1 agreement", "first change", "never"]
    return table(
        [*head, "reused", "computed"],
        [
            [
                f"`{row.method}`",
                _size(row),
                "1 by definition" if row.method == BASE else interval(row.kl_ratio),
                *_kl_cells(row),
                interval(row.reused, percent),
                interval(row.computed, percent),
            ]
            for row in rows
            if row.method != NO_CONTEXT
        ],
    )


def _kl_cells(row: MethodSummary) -> list[str]:
    if row.method == FULL:
        return ["0 by definition", "0", "0", NONE, "1", NONE, "100.0 %"]
    return [
        interval(row.kl_median),
        interval(row.kl_p90),
        interval(row.kl_mean),
        wins(row.kl_wins),
        interval(row.top1, fixed),
        _first(row),
        plain(row.never, percent),
    ]


def _first(row: MethodSummary) -> str:
    if row.first_divergence is None:
        return NONE
    return "never" if math.isinf(row.first_divergence) else f"token {row.first_divergence:.0f}"


def _size(row: MethodSummary) -> str:
    return f"{row.cases} ({row.groups})"


def wins(found: Wins | None) -> str:
    if found is None:
        return NONE
    return f"{found.wins} / {found.ties} / {found.losses}, p={number(found.p)}"


def overview(run: Run, tasks: list[TaskCases]) -> str:
    """All tasks of a run in one table."""
    head = [
        "method",
        "score, fraction of full, mean over tasks",
        "KL / none, geometric mean over tasks",
    ]
    head += ["KL better / equal / worse than none", "computed"]
    rows = [
        [
            f"`{row.method}`",
            _over(row.fraction, row.fraction_tasks),
            "1 by definition" if row.method == BASE else _over(row.kl_ratio, row.kl_tasks, number),
            _counts(row),
            interval(row.computed, percent),
        ]
        for row in over_tasks(tasks)
    ]
    if not rows:
        return f"No method beside `{FULL}` and `{NO_CONTEXT}` in this run.\n\n{provenance(run)}\n"
    note = "Every task has the same weight."
    return "\n".join([table([*head], rows), "", note, "", provenance(run), ""])


def _over(found: Interval | None, tasks: int, form: Format = fixed) -> str:
    return (
        NONE
        if found is None
        else f"{interval(found, form)}, {tasks} task{'s' if tasks > 1 else ''}"
    )


def _counts(row: OverTasks) -> str:
    return NONE if row.kl_wins is None else " / ".join(map(str, row.kl_wins))
