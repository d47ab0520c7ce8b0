"""A plan as a table, as bars in the terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path

from adafactor.planning import sizes
from adafactor.planning.bill import PARTS, Bytes, Line, Plan

# a mark for each part of a bar, and a colour that can be told from its neighbours'
MARKS = dict(zip(PARTS, "█▓▒░▚▞·=", strict=True))
COLOURS = dict(
    zip(PARTS, "#33508a #7b98d1 #d98b3a #3d9970 #8cc7a7 #a05ba0 #b0b0b0 #707070".split(), strict=True)
)  # fmt: skip
LEFT_OUT = "activations, what a framework gathers or reduces between devices, and what an allocator cannot use"


def heading(plan: Plan) -> str:
    """Which model, and how it is cut."""
    count = f"{plan.parameters:,} parameters in {plan.tensors:,} tensors"
    frozen = f", {plan.trained:,} of them trained" if plan.trained < plan.parameters else ""
    cut = f", cut among {plan.shards:,} devices" if plan.shards > 1 else ""
    return f"{plan.model}: {count}{frozen}{cut}. Steps on {plan.situation.device}, AdamW {plan.situation.adamw}."


def notes(plan: Plan) -> list[str]:
    """What has to be said below the table."""
    said = []
    if plan.budget is not None:
        keys = ", ".join(line.key for line in plan.fitting) or "none"
        said.append(f"Within {sizes.show(plan.budget)}: {keys}.")
    for reason in dict.fromkeys(line.note for line in plan.lines if line.device is None):
        keys = ", ".join(line.key for line in plan.lines if line.note == reason)
        said.append(f"Cannot be sharded: {keys} ({reason}).")
    return [*said, f"Not counted: {LEFT_OUT}."]


def table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Heads and rows; a part that no setting has is no column."""
    bills = [line.device for line in plan.lines if line.device is not None]
    parts = [part for part in PARTS if any(getattr(bill, part) for bill in bills)]
    last = ["per device", "on one"] if plan.shards > 1 else ["total"]
    fit = [] if plan.budget is None else ["fits", "left"]
    rows = [_row(plan, line, parts) for line in plan.lines]
    return ["setting", *parts, *last, *fit], rows


def _row(plan: Plan, line: Line, parts: list[str]) -> list[str]:
    bill = line.device
    cells = [sizes.show(getattr(bill, part)) if bill else "" for part in parts]
    last = [sizes.show(bill.total) if bill else "cannot"]
    if plan.shards > 1:
        last.append(sizes.show(line.whole.total))
    if plan.budget is not None:
        left = line.left(plan.budget)
        last += ["no", ""] if left is None else ["yes" if left > 0 else "no", _signed(left)]
    return [line.label, *cells, *last]


def _signed(count: int) -> str:
    return f"−{sizes.show(-count)}" if count < 0 else sizes.show(count)


def text(plan: Plan) -> str:
    """Table, chart and notes in plain text."""
    heads, rows = table(plan)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for row in (heads, ["─" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([heading(plan), "", *lines, "", chart(plan), "", *notes(plan)])


def chart(plan: Plan, width: int = 60) -> str:
    """A bar for each setting, each part in a mark of its own; the budget, if there is one, is a line."""
    drawn = [line for line in plan.lines if line.device is not None]
    longest, labels = _longest(plan), max((len(line.label) for line in drawn), default=0)
    lines = []
    for line in drawn:
        assert line.device is not None
        bar = "".join(MARKS[part] * length for part, length in segments(line.device, longest, width))
        if plan.budget is not None:
            place = round(plan.budget / longest * width)
            bar = bar.ljust(width + 1)
            bar = f"{bar[:place]}│{bar[place:]}".rstrip()
        lines.append(f"{line.label.ljust(labels)} {bar} {sizes.show(line.device.total)}")
    seen = [part for part in PARTS if any(getattr(line.device, part) for line in drawn)]
    legend = "   ".join(f"{MARKS[part]} {part}" for part in seen)
    return "\n".join([*lines, "", legend + ("   │ budget" if plan.budget is not None else "")])


def segments(bill: Bytes, longest: int, width: int) -> list[tuple[str, int]]:
    """How long each part of a bar is; rounding never moves the end of a bar."""
    found, done, end = [], 0, 0
    for part in PARTS:
        done += getattr(bill, part)
        length = round(done / longest * width) - end
        found.append((part, length))
        end += length
    return found


def _longest(plan: Plan) -> int:
    return max([plan.budget or 1, *(line.device.total for line in plan.lines if line.device is not None)])


def show(plan: Plan) -> None:
    """Table, chart and notes in the terminal; in colour where rich is installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(text(plan))
        return
    console = Console()
    if not console.is_terminal:  # a file has no width, and no colours that would tell the parts of a bar
        print(text(plan))
        return
    console.print(heading(plan), highlight=False, soft_wrap=True)
    heads, rows = table(plan)
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="right" if i else "left", overflow="fold")
    fitting = plan.fitting
    for line, row in zip(plan.lines, rows, strict=True):
        style = "dim" if line not in fitting else "bold" if line.label.startswith("adafactor,") else None
        drawn.add_row(*row, style=style)
    console.print(drawn)
    bars = Text(chart(plan, max(20, console.width - 60)))
    for part in PARTS:
        bars.highlight_regex(f"{MARKS[part]}+", style=COLOURS[part])
    console.print(bars)
    console.print("\n" + "\n".join(notes(plan)), highlight=False, soft_wrap=True)


def plot(plan: Plan, path: Path) -> None:
    """The bars as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(f"a plot needs matplotlib (pip install matplotlib): {missing}") from missing
    drawn = [line for line in plan.lines if line.device is not None]
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    labels = [line.label for line in drawn]
    start = [0.0] * len(drawn)
    for part in PARTS:
        lengths = [getattr(line.device, part) / 2**30 for line in drawn]
        if any(lengths):
            axes.barh(labels, lengths, left=start, color=COLOURS[part], label=part, height=0.7)
            start = [a + b for a, b in zip(start, lengths, strict=True)]
    for place, line in enumerate(drawn):
        assert line.device is not None
        axes.annotate(
            sizes.show(line.device.total),
            (start[place], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # over the line of the budget
        )
    if plan.budget is not None:
        axes.axvline(plan.budget / 2**30, color="black", linestyle="--", linewidth=1)
        axes.text(plan.budget / 2**30, -0.75, f" {sizes.show(plan.budget)}", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * _longest(plan) / 2**30)
    axes.set_xlabel(
        "GiB" + (f" on each of {plan.shards:,} devices" if plan.shards > 1 else "") + ", without activations"
    )
    axes.set_title(f"{plan.model}, {plan.parameters:,} parameters", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
