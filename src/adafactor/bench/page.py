"""The plots, and one self-contained HTML page with them and all tables."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from adafactor.bench.contenders import find
from adafactor.bench.present import Table, about, label, significant, tables
from adafactor.bench.results import Measured, Results, Timing
from adafactor.bench.targets import YARDSTICK

COLOURS = {"ours": "#1565c0", "peer": "#c62828", "baseline": "#8a949c", "own": "#7b4fb5"}
STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5d6770; --line: #dde2e6; --page: #fff; --ours: #1565c0; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e8eb; --soft: #9aa5ae; --line: #343c43; --page: #15191c; --ours: #64b5f6; } }
body { margin: 0 auto; max-width: 68rem; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { max-width: 46rem; margin: .4rem 0 .8rem; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--line); text-align: left; }
th { color: var(--soft); font-weight: 600; }
td + td { font-variant-numeric: tabular-nums; }
tr.ours { color: var(--ours); font-weight: 600; }
img { max-width: 100%; border-radius: 4px; }
"""


def write(results: Results, folder: Path) -> list[Path]:
    """The plots and the page; without matplotlib the page alone."""
    pictures = []
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        if results.suites:
            pictures.append(_times(results, folder / "times.png"))
        if results.cost:
            pictures.append(_cost(results, folder / "cost.png"))
    page = folder / "report.html"
    page.write_text(html(results, pictures), encoding="utf-8")
    return [*pictures, page]


def html(results: Results, pictures: list[Path]) -> str:
    """The page, with the pictures inside."""
    images = "".join(
        f'<img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for path in pictures
    )
    body = "".join(_section(table) for table in tables(results))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>adafactor bench</title><style>{STYLE}</style></head><body><h1>One optimizer step</h1>"
        f"<p>{escape(about(results))}</p>{images}{body}<p><code>{escape(results.command)}</code></p></body></html>\n"
    )


def _section(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.heads)
    lines = []
    for row in table.rows:
        ours = ' class="ours"' if row[0].startswith("adafactor,") else ""
        lines.append(f"<tr{ours}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    rows = "".join(lines)
    return f'<h2>{escape(table.title)}</h2>{note}<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _times(results: Results, path: Path) -> Path:
    """A step of each contender against fused AdamW's, on one scale for all suites; ms where that was not measured.

    On a log scale a bar has no natural beginning but 1, so bars go from there: to the left faster, to the right slower.
    """
    from matplotlib.figure import Figure

    relative = all(map(_has_base, results.suites))
    heights = [0.9 + 0.24 * len(m.timings) for m in results.suites]
    figure = Figure(figsize=(9, sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, measured in zip(panels, results.suites, strict=True):
        timings = sorted(measured.timings, key=lambda t: -_figure(measured, t, relative))
        values = [_figure(measured, t, relative) for t in timings]
        colours = [COLOURS[find(t.contender).role] for t in timings]
        axes.barh([label(t) for t in timings], [v - 1 for v in values], left=1, color=colours)
        for place, value in enumerate(values):
            text = significant(value)
            side = {"ha": "left", "xytext": (4, 0)} if value >= 1 else {"ha": "right", "xytext": (-4, 0)}
            axes.annotate(text, (value, place), textcoords="offset points", va="center", fontsize=8, **side)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.12)
        axes.set_title(f"{measured.name}: {measured.title}", loc="left", fontsize=10, fontweight="bold")
        axes.tick_params(labelsize=8, labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
    unit = "× torch.optim.AdamW, fused, in the same dtype" if relative else "ms a step"
    figure.supxlabel(f"{unit} (log scale; left is faster)", fontsize=9)
    figure.savefig(path, dpi=130)
    return path


def _cost(results: Results, path: Path) -> Path:
    """Lines: nanoseconds a parameter over the number of parameters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key in dict.fromkeys(t.contender for m in results.cost for t in m.timings):
        pairs = [(m.parameters, t) for m in results.cost for t in m.timings if t.contender == key]
        style = {"cpu": "-", "triton": "-", "adamw-fused": "-"}.get(key, "--")
        colour = COLOURS[find(key).role]
        costs = [1e9 * t.median / n for n, t in pairs]
        axes.plot([n for n, _ in pairs], costs, style, marker="o", label=find(key).label, color=colour)
    axes.set(xscale="log", yscale="log", ylabel="ns a parameter", xlabel="parameters")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return path


def _has_base(measured: Measured) -> bool:
    return all(measured.timing(YARDSTICK, t.dtype) for t in measured.timings)


def _figure(measured: Measured, timing: Timing, relative: bool) -> float:
    base = measured.timing(YARDSTICK, timing.dtype) if relative else None
    return timing.median / base.median if base else 1e3 * timing.median
