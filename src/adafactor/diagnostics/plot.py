"""A metric of every parameter over time: a heat map by kind of layer, and above it what most and the worst do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from adafactor.diagnostics.naming import group_with_title
from adafactor.diagnostics.report import Report

LOW, HIGH = "#2f6fd0", "#d6342c"
AROUND_ONE = LinearSegmentedColormap.from_list(  # transparent in the middle
    "blue to red", [(0.0, LOW), (0.5, f"{LOW}00"), (0.5, f"{HIGH}00"), (1.0, HIGH)]
)
NO_NUMBER = (0.5, 0.5, 0.5, 0.3)  # half transparent grey


class Look(NamedTuple):
    """How a metric is drawn."""

    title: str
    colours: Colormap = colormaps["viridis"]
    limits: tuple[float, float] | None = None  # None: of the data
    log: bool = True
    line: float | None = None  # what is as it should be


LOOKS = {
    "rms_update": Look("RMS(U)", AROUND_ONE, (1 / 8, 8.0), line=1.0),
    "clip_rate": Look("share of steps clipped", colormaps["magma_r"], (0.0, 1.0), log=False),
    "relative_change": Look("relative change a step"),
    "step_size": Look("step size αₜ"),
    "rms_parameter": Look("RMS(X)"),
}
# Of every picture in the documentation: no background, and colours that can be seen on white and on black.
INK, OURS, THEIRS = "#777777", "#3d7fd9", "#9a9a9a"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor", "legend.edgecolor"), "none"),
    "grid.color": INK,
    "grid.alpha": 0.3,
}
ROW, LABEL = 0.052, 0.16  # inches that a parameter and that a label needs
styled = rc_context(STYLE)  # decorates a function, which then draws for light and dark pages


@styled
def draw(reports: Sequence[Report], path: str | Path, figure: str = "rms_update") -> None:
    """Draw a metric of all reports to a file.

    Raises:
        ValueError: there are no reports, or no such metric.
    """
    if figure not in LOOKS:
        raise ValueError(f"figure={figure!r} must be one of {', '.join(map(repr, LOOKS))}")
    if not reports:
        raise ValueError("there is nothing to draw: the history has no report")
    look = LOOKS[figure]
    title, kinds = group_with_title(reports[-1].records)
    height = sum(max(LABEL, ROW * len(kind)) for kind in kinds.values())
    page = Figure(figsize=(9, height + 2.6), dpi=120, layout="constrained")
    above, below = page.subplots(2, 1, sharex=True, height_ratios=[1.5, height])
    steps = [report.step or i + 1 for i, report in enumerate(reports)]
    values = _values(reports, [record.name for kind in kinds.values() for record in kind], figure)
    _draw_curves(above, steps, values, look)
    _draw_map(below, steps, values, {label: len(kind) for label, kind in kinds.items()}, look)
    above.set_title(f"{look.title}, {title}", loc="left", fontsize=10)
    page.savefig(Path(path))


def _values(reports: Sequence[Report], names: list[str], metric: str) -> NDArray[np.float64]:
    """Return a metric as (parameters, reports), NaN where there is none."""
    columns = [{record.name: getattr(record, metric) for record in report.records} for report in reports]
    values = np.array([[column.get(name, np.nan) for column in columns] for name in names], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _draw_curves(axes: Axes, steps: list[int], values: NDArray[np.float64], look: Look) -> None:
    """Draw the median, the middle nine tenths and the extremes over the parameters."""
    known = np.isfinite(values).any(0)  # else there is no quantile
    at = np.array(steps)[known]
    if len(at):
        lowest, low, middle, high, highest = np.nanquantile(values[:, known], [0, 0.05, 0.5, 0.95, 1], axis=0)
        axes.fill_between(at, low, high, color=INK, alpha=0.3, lw=0, label="nine of ten")
        axes.plot(at, highest, color="tab:red", lw=1, label="highest")
        axes.plot(at, lowest, color="tab:blue", lw=1, label="lowest")
        axes.plot(at, middle, color=INK, lw=1.8, label="median")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=7, frameon=False)
    if look.log:  # plain numbers; 1, 2 and 5 of each power of ten while there are few of these
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if top < 300 * bottom else (1.0,)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
    if look.line is not None:
        axes.axhline(look.line, color=INK, lw=0.8, ls=":")
    axes.tick_params(labelsize=8)


def _draw_map(axes: Axes, steps: list[int], values: NDArray[np.float64], kinds: dict[str, int], look: Look) -> None:
    """Draw one strip for each kind of layer, in it a row for each layer, the first on top."""
    edges, ticks, labels = [0.0], [], []
    for label, count in kinds.items():
        top, height = edges[-1], max(LABEL, ROW * count)
        edges += list(top + height * np.arange(1, count + 1) / count)
        ticks.append(top + height / 2)
        labels.append(label + (f"  ×{count}" if count > 1 else ""))
        axes.axhline(edges[-1], color=INK, lw=1.2)
    # a report stands for the steps since the one before
    times = [steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1), *steps]
    # without a number above 0 there would be no limits
    limits = look.limits or ((None, None) if (values > 0).any() else (0.1, 1.0))
    norm = LogNorm(*limits) if look.log else Normalize(*limits)
    colours = look.colours.with_extremes(bad=NO_NUMBER)
    mesh = axes.pcolormesh(times, edges, values, rasterized=True, cmap=colours, norm=norm)
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(edges[-1], 0)
    axes.set_xlabel("step", fontsize=8)
    bar = axes.figure.colorbar(mesh, ax=axes, location="bottom", aspect=60, fraction=0.02, pad=0.01, extend="both")
    bar.ax.tick_params(labelsize=7)
    if look.log and look.limits:
        marks = [2.0**power for power in range(-3, 4)]
        bar.set_ticks(marks, labels=[f"{mark:g}" for mark in marks])
        bar.ax.minorticks_off()
