"""Tables of the results: for the terminal, for Markdown, and for the page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adafactor.bench import contenders
from adafactor.bench.measure import Entry
from adafactor.bench.results import Measured, Results, Timing
from adafactor.bench.targets import YARDSTICK, floor_share, targets


@dataclass(frozen=True)
class Table:
    """A table with the sentence above it; the first column is text, the others numbers."""

    title: str
    note: str
    heads: list[str]
    rows: list[list[str]]


def tables(results: Results) -> list[Table]:
    """Everything that was found, the most important first; what was not measured has no table."""
    found = [_overview(results), *(_suite(results, m) for m in results.suites), _cost(results), _checks(results)]
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
    return Entry(contenders.find(timing.contender), timing.dtype).label


def about(results: Results) -> str:
    """Where and how it was measured, in two sentences."""
    machine = results.machine
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    if results.device != "cpu":
        return (
            f"{machine['card']} ({results.device}), {size(machine['card_cache_bytes'])} L2 cache, "
            f"{size(machine['card_memory_bytes'])} memory, beside {machine['processor']}. {machine['system']}, "
            f"Python {machine['python']}, {versions}. "
            f"Medians of {results.rounds} rounds that alternate the contenders, by the device's own events."
        )
    return (
        f"{machine['processor']}, {results.threads} of {machine['cores']} cores, "
        f"{size(machine['cache_bytes'])} last-level cache, {size(machine['memory_bytes'])} memory. "
        f"{machine['system']}, Python {machine['python']}, {versions}. "
        f"Medians of {results.rounds} rounds that alternate the contenders."
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
        base = measured.timing(YARDSTICK, t.dtype)
        low, high = t.middle
        share = floor_share(measured, t)
        rows.append([
            label(t),
            significant(1e3 * t.median),
            f"{significant(1e3 * low)}–{significant(1e3 * high)}",
            f"{t.median / base.median:.2f}" if base else "–",
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
        name = Entry(contenders.find(c.contender), c.dtype).label
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
