"""Tables of the results for the terminal and for Markdown, and two plots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import find
from benchmarks.measure import Entry
from benchmarks.results import YARDSTICK, Measured, Results, Timing, targets

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
    found = [
        _against_adamw(results),
        _overview(results),
        *(_suite(results, m) for m in results.suites),
        _cost(results),
        _checks(results),
    ]
    found += [_missing(results), _targets(results)]
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


def label(timing: Timing) -> str:
    """What a table calls the contender."""
    return Entry(find(timing.contender), timing.dtype).label


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
        f"Medians of {results.rounds} rounds that alternate the contenders{clock}.{load}"
    )


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
            ours = row[0].startswith("adafactor,")
            drawn.add_row(*row, style="bold" if ours else None)
        console.print(drawn)


def _against_adamw(results: Results) -> Table:
    """Ours as people run it, and the floor, against fused AdamW."""
    ours = "cpu" if results.device == "cpu" else "triton"
    columns = {
        "float32": (ours, "float32"),
        "with momentum": (f"{ours}-momentum", "float32"),
        "bfloat16": (ours, "bfloat16"),
        "bfloat16, stochastic rounding": (f"{ours}-stochastic", "bfloat16"),
        "floor, float32": ("floor", "float32"),
        "floor, bfloat16": ("floor", "bfloat16"),
    }
    rows = []
    for measured in results.suites:
        ratios = [measured.against_adamw(measured.timing(*key)) for key in columns.values()]
        if any(ratios):
            rows.append([measured.name, *("–" if ratio is None else str(ratio) for ratio in ratios)])
    note = (
        "In the same dtype: the median of the rounds and, in brackets, the lowest and the highest. The floor is "
        "trivial loops that read and write the same bytes in the same rounds."
    )
    return Table("Times the time of fused AdamW", note, [f"adafactor, {ours}", *columns], rows)


def _overview(results: Results) -> Table:
    """Milliseconds of every contender in every suite."""
    keys = dict.fromkeys((t.contender, t.dtype) for m in results.suites for t in m.timings)
    rows = []
    for contender, dtype in keys:
        found = [m.timing(contender, dtype) for m in results.suites]
        name = next(label(t) for t in found if t)
        rows.append([name, *(significant(1e3 * t.median) if t else "–" for t in found)])
    heads = ["ms a step", *(m.name for m in results.suites)]
    return Table("One step", "", heads, rows if len(results.suites) > 1 else [])


def _suite(results: Results, measured: Measured) -> Table:
    rows = []
    for t in measured.timings:
        ratio, share = measured.against_adamw(t), measured.floor_share(t)
        low, high = t.middle
        rows.append([
            label(t),
            significant(1e3 * t.median),
            f"{significant(1e3 * low)}–{significant(1e3 * high)}",
            "–" if ratio is None else str(ratio),
            "–" if share is None else f"{100 * share:.0f} %",
            size(t.state_bytes),
            size(t.extra_bytes),
            {True: "right", False: "WRONG", None: "–"}[results.correct(t.contender, t.dtype)],
        ])  # fmt: skip
    heads = ["optimizer", "ms a step", "middle half", "× AdamW", "floor", "state", "extra", "update"]
    note = (
        f"{measured.tensors} tensors, {measured.parameters:,} parameters. "
        f"A copy moved {significant(measured.bandwidth / 1e9)} GB/s."
    )
    return Table(f"{measured.name}: {measured.title}", note, heads, rows)


def _cost(results: Results) -> Table:
    rows = []
    for measured in results.cost:
        for t in measured.timings:
            rows.append([
                label(t),
                measured.name,
                f"{measured.parameters:,}",
                significant(1e3 * t.median),
                significant(1e9 * t.median / measured.parameters),
                size(t.state_bytes),
                size(t.extra_bytes),
            ])  # fmt: skip
    rows.sort(key=lambda row: row[0])  # stable: sizes stay in order
    heads = ["optimizer", "size", "parameters", "ms a step", "ns a parameter", "state", "extra"]
    return Table("What a parameter costs", "", heads, rows)


def _checks(results: Results) -> Table:
    rows = []
    for c in results.checks:
        name = Entry(find(c.contender), c.dtype).label
        verdict = {True: "right", False: "WRONG", None: "has no formula to check"}[c.correct]
        rows.append([name, "–" if c.error is None else f"{c.error:.0e}", verdict])
    note = "Deviation after five steps from each one's own formula in float64, relative to the distance travelled."
    return Table("Is the update the one that the formula says?", note, ["optimizer", "deviation", "update"], rows)


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
