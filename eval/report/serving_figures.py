"""The figures of serving runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvshare_eval.report.drawing import PANELS, Drawing, Figure, ecdf, legend, log_axis, style
from kvshare_eval.report.serving import Cell, read_slos
from kvshare_eval.report.serving_page import families, rate_text
from kvshare_eval.run_dir import Run
from kvshare_eval.stats import serving as stats


def serving_figures(draw: Drawing, run: Run, found: list[Cell]) -> list[Figure]:
    """TTFT distributions, saturation sweeps, TTFT against the reusable share."""
    sides = {side: index for index, side in enumerate(dict.fromkeys(cell.side for cell in found))}
    figures = []
    for workload in dict.fromkeys(cell.workload for cell in found):
        mine = [cell for cell in found if cell.workload == workload and cell.load.done]
        rates = list(dict.fromkeys(cell.rate for cell in mine))
        panels = [_ttft_panel(rate, [c for c in mine if c.rate == rate], sides) for rate in rates]
        for first in range(0, len(panels), PANELS):
            caption = f"TTFT of `{workload}`, share of requests; left is better."
            name = f"{run.name}-ttft-{workload}-{first // PANELS + 1}"
            figures.append(draw.save(name, caption, panels[first : first + PANELS]))
        swept = [cell for cell in mine if cell.rate is not None]
        if len({cell.rate for cell in swept}) > 1:
            caption = f"Saturation of `{workload}`: TTFT and goodput against the offered rate."
            panels = _sweep_panels(run, swept, sides)
            figures.append(draw.save(f"{run.name}-saturation-{workload}", caption, panels))
    for (family, rate), cells in families(found).items():
        caption = f"TTFT p50 of `{family}`, {rate_text(rate)}, against the reusable share."
        panel = _share_panel([cell for cell in cells if cell.load.done], sides)
        figures.append(draw.save(f"{run.name}-share-{family}-{rate_text(rate)}", caption, [panel]))
    return figures


def _ttft_panel(
    rate: float | None, cells: list[Cell], sides: dict[str, int]
) -> Callable[[Any], None]:
    def panel(ax: Any) -> None:
        ax.set_title(rate_text(rate), fontsize=9)
        lines = [(cell.side, sides[cell.side], stats.ttft(cell.load)[0]) for cell in cells]
        ecdf(ax, lines, "TTFT, ms")

    return panel


def _sweep_panels(
    run: Run, cells: list[Cell], sides: dict[str, int]
) -> list[Callable[[Any], None]]:
    slos = read_slos(run)

    def times(q: float) -> Callable[[Any], None]:
        def panel(ax: Any) -> None:
            _against_rate(ax, cells, sides, lambda c: float(np.quantile(stats.ttft(c.load)[0], q)))
            log_axis(ax, "y")
            ax.set_ylabel(f"TTFT p{100 * q:.0f}, ms (log scale)")

        return panel

    def served(ax: Any) -> None:
        rates = sorted({cell.rate for cell in cells if cell.rate is not None})
        ax.plot(rates, rates, color="#999999", linewidth=0.8, label="offered")
        if all(slos.of(cell.workload) is None for cell in cells):
            _against_rate(ax, cells, sides, _throughput)
            ax.set_ylabel("throughput, requests/s (no SLO)")
        else:
            _against_rate(ax, cells, sides, goodput)
            ax.set_ylabel("goodput, requests/s")

    def goodput(cell: Cell) -> float | None:
        slo = slos.of(cell.workload)
        return None if slo is None else stats.goodput(cell.load, slo)

    return [times(0.5), times(0.95), served]


def _throughput(cell: Cell) -> float | None:
    done = stats.throughput(cell.load)
    return None if done is None else done.requests


def _against_rate(
    ax: Any, cells: list[Cell], sides: dict[str, int], figure: Callable[[Cell], float | None]
) -> None:
    for side, index in sides.items():
        points = [
            (c.rate, value) for c in cells if c.side == side and (value := figure(c)) is not None
        ]
        if points:
            ax.plot(*zip(*points, strict=True), label=side, **style(index))
    ax.set_xlabel("offered rate, requests/s")
    legend(ax)


def _share_panel(cells: list[Cell], sides: dict[str, int]) -> Callable[[Any], None]:
    def panel(ax: Any) -> None:
        for side, index in sides.items():
            mine = [cell for cell in cells if cell.side == side]
            found = [stats.percentile(*stats.ttft(cell.load), 0.5) for cell in mine]
            points = [(c.share, f) for c, f in zip(mine, found, strict=True) if f is not None]
            if not points:
                continue
            bars = [
                [f.value - (f.value if f.low is None else f.low) for _, f in points],
                [(f.value if f.high is None else f.high) - f.value for _, f in points],
            ]
            ax.errorbar(
                [share for share, _ in points],
                [f.value for _, f in points],
                yerr=np.maximum(bars, 0),
                capsize=3,
                label=side,
                **style(index),
            )
        ax.set_xlabel("reusable share of the prompt's tokens")
        ax.set_ylabel("TTFT p50, ms")
        ax.set_ylim(bottom=0)
        legend(ax)

    return panel
