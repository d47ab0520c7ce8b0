"""RMS(U), the step size and the clip rate of all parameters over a run, in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from adafactor.core.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {"rms_update": "RMS(U)", "step_size": "step size", "clip_rate": "clip rate"}
INK, LINE, EXTREMES = "#777777", "#3d7fd9", "#d6342c"  # can be seen on white and on black
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "font.size": 8,
}


def plot(reports: Sequence[Report], path: str | Path) -> None:
    """Draw RMS(U), step size and clip rate over the run: their median, nine of ten parameters, and the extremes.

    `pip install matplotlib` brings what it needs.

    Args:
        reports: what a `Watch` handed to `reports.append`.
        path: the picture's file, whose ending says its kind: .png, .svg, .pdf.

    Raises:
        ValueError: there are no reports.
    """
    if not reports:
        raise ValueError("there is nothing to draw: no report was taken")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("the plot needs matplotlib: `pip install matplotlib` brings it") from missing
    with rc_context(STYLE):
        page = Figure(figsize=(8, 6), dpi=120, layout="constrained")
        for axes, (metric, title) in zip(page.subplots(len(PANELS), 1, sharex=True), PANELS.items(), strict=True):
            _draw(axes, reports, metric)
            axes.set_ylabel(title)
        page.axes[0].set_title(f"{len(reports[-1])} parameters: median, nine of ten, extremes", loc="left", fontsize=9)
        page.axes[-1].set_xlabel("step")
        page.savefig(Path(path))


def _draw(axes: Axes, reports: Sequence[Report], metric: str) -> None:
    """Draw one metric; a report in which no parameter has it is left out."""
    columns = [(report.step, [getattr(record, metric) for record in report]) for report in reports]
    known = [(step, sorted(filter(math.isfinite, values))) for step, values in columns]
    steps = [step for step, values in known if values]
    spread = [_spread(values) for _, values in known if values]
    lowest, low, middle, high, highest = zip(*spread, strict=True) if spread else ((),) * 5
    axes.fill_between(steps, low, high, color=INK, alpha=0.3, lw=0)
    for extreme in (lowest, highest):
        axes.plot(steps, extreme, color=EXTREMES, lw=0.8)
    axes.plot(steps, middle, color=LINE, lw=1.8, marker="o" if len(steps) == 1 else None)
    if metric == "rms_update":
        axes.axhline(1.0, color=INK, lw=0.8, ls=":")
    if metric == "clip_rate":
        axes.set_ylim(-0.02, 1.02)
    elif any(value > 0 for value in highest):
        axes.set_yscale("log", nonpositive="clip")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _spread(values: list[float]) -> tuple[float, ...]:
    """Return the least, the 5 %, the median, the 95 % and the greatest of sorted values."""
    cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    return values[0], cuts[0], cuts[9], cuts[18], values[-1]
