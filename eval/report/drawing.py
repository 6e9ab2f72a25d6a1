"""Figures that can be read without colour: every line has its own marker and dashes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

_MARKERS = "osD^vPX*<>"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
#: Okabe and Ito's colours, which differ in lightness as well.
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
PANELS = 6
_POINTS = 400


@dataclass(frozen=True)
class Figure:
    """A file beside the page, and what it shows."""

    file: str
    caption: str


class Drawing:
    """Draws into a folder; figures are named after run and content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._used: set[str] = set()

    def save(self, name: str, caption: str, panels: Sequence[Callable[[Any], None]]) -> Figure:
        """One figure of up to three panels a row; a panel draws into the axes it gets."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas

        across = min(3, len(panels))
        down = -(-len(panels) // across)
        look: dict[Any, Any] = {
            "svg.hashsalt": "kvshare",
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
        }
        with rc_context(look):
            canvas = Canvas(figsize=(4.2 * across + 0.4, 3.2 * down), layout="constrained")
            axes = canvas.subplots(down, across, squeeze=False).ravel()
            for ax, panel in zip(axes, panels, strict=False):
                panel(ax)
            for ax in axes[len(panels) :]:
                ax.remove()
            file = self._name(name)
            self.folder.mkdir(parents=True, exist_ok=True)
            canvas.savefig(self.folder / file, metadata={"Date": None})
        return Figure(file, caption)

    def _name(self, name: str) -> str:
        stem = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
        file, number = f"{stem}.svg", 1
        while file in self._used:
            number += 1
            file = f"{stem}-{number}.svg"
        self._used.add(file)
        return file


def style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "markersize": 4,
        "linewidth": 1.3,
    }


def ecdf(ax: Any, lines: Sequence[tuple[str, int, Sequence[float]]], label: str) -> None:
    """Share of values up to x; many values are thinned to evenly spaced ranks."""
    for name, index, values in lines:
        ranked = np.sort(values)
        share = np.arange(1, len(ranked) + 1) / len(ranked)
        keep = np.unique(np.linspace(0, len(ranked) - 1, min(len(ranked), _POINTS)).astype(int))
        ax.plot(
            ranked[keep],
            share[keep],
            drawstyle="steps-post",
            label=f"{name} (n={len(values)})",
            markevery=max(1, len(keep) // 8),
            **style(index),
        )
    log_axis(ax, "x")
    ax.set_xlabel(f"{label} (log scale)")
    ax.set_ylabel("share up to this value")
    ax.set_ylim(0, 1.02)
    legend(ax)


def legend(ax: Any) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, framealpha=0.8, edgecolor="none")


def log_axis(ax: Any, which: Literal["x", "y"]) -> None:
    """Logarithmic, with ticks at 1, 2 and 5 of each decade, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
