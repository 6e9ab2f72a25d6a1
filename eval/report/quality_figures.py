"""The figures of quality runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvshare_eval.report.drawing import PANELS, Drawing, Figure, ecdf
from kvshare_eval.report.quality import FULL, NO_CONTEXT, TaskCases, kl
from kvshare_eval.run_dir import Run
from kvshare_eval.stats.paired import KL_FLOOR


def kl_figures(draw: Drawing, run: Run, tasks: Sequence[TaskCases]) -> list[Figure]:
    """Distributions of the divergence, a panel for each task."""
    methods = dict.fromkeys(m for task in tasks for m in task.by_method)
    places = {m: i for i, m in enumerate(m for m in methods if m not in (FULL, NO_CONTEXT))}
    panels = []
    for task in tasks:
        lines = []
        for method, place in places.items():
            rows, _ = task.paired([(method, kl)])
            if len(rows):
                lines.append((method, place, np.maximum(rows[:, 0], KL_FLOOR).tolist()))
        if lines:
            panels.append(_kl_panel(task.task, lines))
    caption = (
        f"KL of the next-token distribution from full recompute's, mean over an answer's tokens, "
        f"share of cases; left is better. Values below {KL_FLOOR:g} are drawn there."
    )
    return [
        draw.save(f"{run.name}-kl-{first // PANELS + 1}", caption, panels[first : first + PANELS])
        for first in range(0, len(panels), PANELS)
    ]


def _kl_panel(
    title: str, lines: Sequence[tuple[str, int, Sequence[float]]]
) -> Callable[[Any], None]:
    def panel(ax: Any) -> None:
        ax.set_title(title, fontsize=9)
        ecdf(ax, lines, "KL, nats")

    return panel
