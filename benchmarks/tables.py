"""Tables of the results for the terminal and for Markdown, and two plots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import find
from benchmarks.measure import Entry
from benchmarks.results import YARDSTICK, Checked, Measured, Results, Timing, targets

COLOURS = {"ours": "#1565c0", "peer": "#c62828", "baseline": "#8a949c", "own": "#7b4fb5", "floor": "#cfd6db"}


@dataclass(frozen=True)
class Table:
    """A table with the sentence above it; the first column is text, the others numbers."""

    title: str
    note: str
    heads: list[str]
    rows: list[list[str]]


def tables(results: Results) -> list[Table]:
    """Everything that was found, the most important first; what was not measured has no table."""
    found = [*_steps(results), _suites(results), _cost(results), _missing(results), _targets(results)]
    return [table for table in found if table.rows]


def significant(value: float) -> str:
    """Three significant digits, never with an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "–"
    unit, name = next(pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= pair[0] or pair[0] == 1e3)
    return f"{significant(count / unit)} {name}"


def label(found: Timing | Checked) -> str:
    """What a table calls the contender."""
    return Entry(find(found.contender), found.dtype).label


def about(results: Results) -> str:
    """Where and how it was measured, in a few sentences."""
    machine = results.machine
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    if results.device == "cpu":
        where = (
            f"{machine['processor']}, {results.threads} of {machine['cores']} cores, "
            f"{size(machine['cache_bytes'])} last-level cache, {size(machine['memory_bytes'])} memory."
        )
    else:
        where = (
            f"{machine['card']} ({results.device}), {size(machine['card_cache_bytes'])} L2 cache, "
            f"{size(machine['card_memory_bytes'])} memory, beside {machine['processor']}."
        )
    clock = "" if results.device == "cpu" else ", by the device's own events"
    load = ""
    if results.load_before and results.load_after:
        load = f" Load average of a minute {results.load_before[0]:.1f} before, {results.load_after[0]:.1f} after."
    return (
        f"{where} {machine['system']}, Python {machine['python']}, {versions}. "
        f"Medians of {results.rounds} rounds that alternate the contenders{clock}.{load} {_checks(results)}"
    ).rstrip()


def markdown(results: Results) -> str:
    """All tables, for the documents."""
    parts = [f"`{results.command}`: {about(results)}"]
    for table in tables(results):
        lines = [f"| {' | '.join(row)} |" for row in (table.heads, ["---"] * len(table.heads), *table.rows)]
        parts += [f"### {table.title}", *([table.note] if table.note else []), "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def show(results: Results) -> None:
    """All tables, in the terminal."""
    import rich.table
    from rich.box import SIMPLE_HEAD
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a file has no width
        console = Console(width=160)
    console.print(about(results), style="dim", highlight=False)
    for table in tables(results):
        title = f"{table.title}\n{table.note}" if table.note else table.title
        drawn = rich.table.Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for i, head in enumerate(table.heads):
            drawn.add_column(head, justify="right" if i else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*row, style="bold" if row[0].startswith("adafactor,") else None)
        console.print(drawn)


def _steps(results: Results) -> list[Table]:
    """The metrics of a step: a table of each over the suites, or one table of all of them if there is one suite."""
    metrics = {"time of a step, and × fused AdamW": _time, "state and extra memory": _memory}
    if len(results.suites) == 1:
        [suite] = results.suites
        rows = [[label(t), *(show_of(suite, t) for show_of in metrics.values())] for t in suite.timings]
        return [Table(suite.title, "", ["optimizer", *metrics], rows)]
    heads = ["optimizer", *(m.name for m in results.suites)]
    entries = dict.fromkeys((t.contender, t.dtype) for m in results.suites for t in m.timings)
    made = []
    for title, show_of in metrics.items():
        rows = []
        for contender, dtype in entries:
            timings = [m.timing(contender, dtype) for m in results.suites]
            cells = ["–" if t is None else show_of(m, t) for m, t in zip(results.suites, timings, strict=True)]
            rows.append([Entry(find(contender), dtype).label, *cells])
        made.append(Table(title[0].upper() + title[1:], "", heads, rows))
    return made


def _time(suite: Measured, timing: Timing) -> str:
    return f"{significant(1e3 * timing.median)} ms, {suite.against_adamw(timing) or '–'}"


def _memory(suite: Measured, timing: Timing) -> str:
    return f"{size(timing.state_bytes)} + {size(timing.extra_bytes)}"


def _suites(results: Results) -> Table:
    rows = []
    for m in results.suites:
        rows.append([m.name, m.title, f"{m.tensors}", f"{m.parameters:,}", f"{significant(m.bandwidth / 1e9)} GB/s"])
    return Table("The suites", "", ["suite", "shapes of", "tensors", "parameters", "speed of a copy"], rows)


def _cost(results: Results) -> Table:
    """Nanoseconds a parameter, from the smallest model to the largest."""
    contenders = dict.fromkeys(t.contender for m in results.cost for t in m.timings)
    rows = []
    for m in results.cost:
        timings = [m.timing(contender) for contender in contenders]
        cells = ["–" if t is None else significant(1e9 * t.median / m.parameters) for t in timings]
        rows.append([f"{m.parameters:,}", *cells])
    heads = ["parameters", *(find(contender).label for contender in contenders)]
    return Table("What a parameter costs", "Nanoseconds a parameter.", heads, rows)


def _checks(results: Results) -> str:
    """Which updates are not those of the optimizers' own formulas, in a sentence."""
    if not results.checks:
        return ""
    wrong = [f"{label(c)} by {c.error:.0e}" for c in results.checks if c.correct is False]
    unknown = [label(c) for c in results.checks if c.correct is None]
    said = f"WRONG, off its own formula: {', '.join(wrong)}." if wrong else "Every update is that of its own formula."
    return f"{said} Without a formula to check: {', '.join(unknown)}." if unknown else said


def _missing(results: Results) -> Table:
    return Table("Not measured", "", ["optimizer", "why"], [[name, why] for name, why in results.missing.items()])


def _targets(results: Results) -> Table:
    rows = []
    found = targets(results)
    if results.device != "cpu":  # none has been set for a GPU
        found = []
    for t in found if any(t.value is not None for t in found) else []:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[t.met]
        value = "–" if t.value is None else t.show(t.value)
        rows.append([t.text, value, f"{'at most' if t.most else 'at least'} {t.show(t.bound)}", verdict, t.detail])
    return Table("adafactor, cpu: the targets", "", ["figure", "reached", "target", "", "by suite"], rows)


# ---- plots


def plot(results: Results, folder: Path) -> list[Path]:
    """Draw what was measured; nothing without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return []
    pictures = [_plot_times(results, folder / "times.png")] if results.suites else []
    return pictures + ([_plot_cost(results, folder / "cost.png")] if results.cost else [])


def _plot_times(results: Results, path: Path) -> Path:
    """A step of each contender against fused AdamW's, on one scale for all suites; ms where that was not measured.

    On a log scale a bar has no natural beginning but 1, so bars go from there: to the left faster, to the right slower.
    """
    from matplotlib.figure import Figure

    relative = all(map(_has_base, results.suites))
    heights = [0.9 + 0.24 * len(m.timings) for m in results.suites]
    figure = Figure(figsize=(9, sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, measured in zip(panels, results.suites, strict=True):
        timings = sorted(measured.timings, key=lambda t: -_value(measured, t, relative))
        values = [_value(measured, t, relative) for t in timings]
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


def _plot_cost(results: Results, path: Path) -> Path:
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


def _value(measured: Measured, timing: Timing, relative: bool) -> float:
    ratio = measured.against_adamw(timing) if relative else None
    return 1e3 * timing.median if ratio is None else ratio.median
