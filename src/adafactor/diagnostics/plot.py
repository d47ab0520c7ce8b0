"""A figure of every parameter over time: a heat map by kind of layer, and above it what most and the worst do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from adafactor.diagnostics.naming import common_prefix, grouped
from adafactor.diagnostics.report import Report

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Look:
    """How a figure is drawn."""

    title: str
    colours: str | tuple[str, str]  # the name of a map, or the two ends of one that is transparent in the middle
    low: float | None = None  # None: of the data
    high: float | None = None
    log: bool = True
    line: float | None = None  # what is as it should be


LOOKS = {
    "rms_update": Look("RMS(U)", ("#2f6fd0", "#d6342c"), 1 / 8, 8.0, line=1.0),
    "clip_rate": Look("share of steps clipped", "magma_r", 0.0, 1.0, log=False),
    "relative_change": Look("relative change a step", "viridis"),
    "step_size": Look("step size αₜ", "viridis"),
    "rms_parameter": Look("RMS(X)", "viridis"),
}
# Of every picture in the documentation: no background, and colours that can be seen on white and on black.
INK, OURS, THEIRS = "#777777", "#3d7fd9", "#9a9a9a"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor", "legend.edgecolor"), "none"),
    "grid.color": INK,
    "grid.alpha": 0.3,
}
ROW = 0.052  # inches
LABEL = 0.16  # inches that a label needs


P = ParamSpec("P")


def styled(drawing: Callable[P, None]) -> Callable[P, None]:
    """Let a function draw its picture for light and dark pages."""

    @wraps(drawing)
    def draw(*args: P.args, **keywords: P.kwargs) -> None:
        try:
            from matplotlib import rc_context
        except ImportError as missing:
            raise ImportError("the plot needs matplotlib: `pip install matplotlib` brings it") from missing
        with rc_context(STYLE):
            drawing(*args, **keywords)

    return draw


@styled
def draw(reports: Sequence[Report], path: str | Path, figure: str = "rms_update") -> None:
    """Draw a figure of all reports to a file.

    Raises:
        ValueError: there are no reports, or no such figure.
    """
    if figure not in LOOKS:
        raise ValueError(f"figure={figure!r} must be one of {', '.join(map(repr, LOOKS))}")
    if not reports:
        raise ValueError("there is nothing to draw: the history has no report")
    from matplotlib.figure import Figure

    named = [(record.name, record.shape) for record in reports[-1].records]
    kinds = grouped(named)
    names = [name for kind in kinds.values() for name in kind]
    heights = {label: max(LABEL, ROW * len(kind)) for label, kind in kinds.items()}
    total = sum(heights.values())
    page = Figure(figsize=(9, total + 2.6), dpi=120, layout="constrained")
    above, below = page.subplots(2, 1, sharex=True, height_ratios=[1.5, total])
    values = _values(reports, names, figure)
    steps = [report.step or i + 1 for i, report in enumerate(reports)]
    _lines(above, steps, values, LOOKS[figure])
    _map(below, steps, values, kinds, heights, LOOKS[figure])
    prefix = common_prefix(names).rstrip(".")
    whose = f"{len(names)} tensors{f' of {prefix}' if prefix else ''}"
    above.set_title(f"{LOOKS[figure].title}, {whose}", loc="left", fontsize=10)
    page.savefig(Path(path))


def _values(reports: Sequence[Report], names: list[str], figure: str) -> NDArray[np.float64]:
    """(parameters, reports), NaN where there is none."""
    import numpy as np

    table = np.full((len(names), len(reports)), np.nan)
    row = {name: i for i, name in enumerate(names)}
    for column, report in enumerate(reports):
        for record in report.records:
            if record.name in row:
                table[row[record.name], column] = getattr(record, figure)
    table[~np.isfinite(table)] = np.nan
    return table


def _lines(axes: Axes, steps: list[int], values: NDArray[np.float64], look: Look) -> None:
    """The median, the middle nine tenths and the extremes over the parameters."""
    import numpy as np

    columns = [column[np.isfinite(column)] for column in values.T]
    known = [
        (t, np.quantile(column, [0, 0.05, 0.5, 0.95, 1]))
        for t, column in zip(steps, columns, strict=True)
        if len(column)
    ]
    if known:
        at = [t for t, _ in known]
        lowest, low, middle, high, highest = np.array([quantiles for _, quantiles in known]).T
        axes.fill_between(at, low, high, color=INK, alpha=0.3, lw=0, label="nine of ten")
        axes.plot(at, highest, color="tab:red", lw=1, label="highest")
        axes.plot(at, lowest, color="tab:blue", lw=1, label="lowest")
        axes.plot(at, middle, color=INK, lw=1.8, label="median")
    if look.log:
        _log_ticks(axes)
    if look.line is not None:
        axes.axhline(look.line, color=INK, lw=0.8, ls=":")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=7, frameon=False)
    axes.tick_params(labelsize=8)


def _log_ticks(axes: Axes) -> None:
    """Plain numbers; 1, 2 and 5 of each power of ten while there are few of these."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _map(
    axes: Axes,
    steps: list[int],
    values: NDArray[np.float64],
    kinds: dict[str, list[str]],
    heights: dict[str, float],
    look: Look,
) -> None:
    """One strip for each kind of layer, in it a row for each layer, the first on top."""
    import numpy as np

    prefix = common_prefix(name for kind in kinds.values() for name in kind)
    edges, ticks, labels = [0.0], [], []
    for label, kind in kinds.items():
        top = edges[-1]
        edges += list(top + heights[label] * np.arange(1, len(kind) + 1) / len(kind))
        ticks.append((top + edges[-1]) / 2)
        labels.append(label.removeprefix(prefix) + (f"  ×{len(kind)}" if len(kind) > 1 else ""))
        axes.axhline(edges[-1], color=INK, lw=1.2)
    colours = _colours(look).with_extremes(bad=(0.5, 0.5, 0.5, 0.3))
    mesh = axes.pcolormesh(_between(steps), edges, values, cmap=colours, norm=_norm(values, look), rasterized=True)
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(edges[-1], 0)
    axes.set_xlabel("step", fontsize=8)
    bar = axes.figure.colorbar(mesh, ax=axes, location="bottom", aspect=60, fraction=0.02, pad=0.01, extend="both")
    bar.ax.tick_params(labelsize=7)
    if look.log and look.low is not None and look.high is not None:
        marks = [2.0**power for power in range(-3, 4)]
        bar.set_ticks(marks, labels=[f"{mark:g}" for mark in marks])
        bar.ax.minorticks_off()


def _colours(look: Look) -> Colormap:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    if isinstance(look.colours, str):
        return colormaps[look.colours]
    low, high = look.colours
    nodes = [(0.0, low), (0.5, f"{low}00"), (0.5, f"{high}00"), (1.0, high)]
    return LinearSegmentedColormap.from_list(look.title, nodes)


def _norm(values: NDArray[np.float64], look: Look) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize

    known = values[np.isfinite(values) & ((values > 0) | (not look.log))]
    low = look.low if look.low is not None else float(known.min()) if known.size else 0.1
    high = look.high if look.high is not None else float(known.max()) if known.size else 1.0
    return LogNorm(low, max(high, low * 1.01)) if look.log else Normalize(low, high)


def _between(steps: list[int]) -> list[float]:
    """The edges of columns around the steps: a report stands for the steps since the one before."""
    first = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
    return [float(first), *map(float, steps)]
