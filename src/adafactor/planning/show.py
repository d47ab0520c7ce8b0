"""The memory plan of a model: its numbers, and how they become a table, bars, advice, JSON and a picture."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from adafactor.planning.memory import PARTS, Bytes, Line, Situation

ADVICE = ("adafactor-float32", "adafactor-stochastic", "adafactor-backward")  # the first that fits
FOLDED = 34  # columns for what a setting is called: where each part has a column of its own, longer ones are folded
NO_TERMINAL = 100  # columns, where there is no terminal and COLUMNS is not set
NOT_COUNTED = "what a framework gathers or reduces between devices, and what an allocator cannot use"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# a mark for each part of a bar, and a colour that can be told from its neighbours'
MARKS = dict(zip(PARTS, "█▓▒░▚▞·=+", strict=True))
COLOURS = dict(
    zip(PARTS, "#33508a #7b98d1 #d98b3a #3d9970 #8cc7a7 #a05ba0 #b0b0b0 #707070 #c94f4f".split(), strict=True)
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The memory plan of a model. `str()` is a table with a chart and advice below it, `plot(path)` draws it.

    `lines` has one entry per setting; `fitting` are those that the budget covers; `advice` says what to write. Where
    nothing fits, `alternative` is a plan with checkpointing, a smaller batch or more devices in which something does.
    """

    model: str
    parameters: int
    trained: int
    tensors: int
    lines: tuple[Line, ...]
    situation: Situation
    budget: int | None = None
    alternative: Plan | None = None

    @property
    def shards(self) -> int:
        """The number of devices that share the model."""
        return self.situation.shards

    @property
    def fitting(self) -> tuple[Line, ...]:
        """The settings that fit the budget; all if there is none."""
        budget = self.budget
        return tuple(x for x in self.lines if budget is None or (x.left(budget) or 0) > 0)

    def line(self, key: str) -> Line:
        """Return the line of one setting."""
        lines = {line.key: line for line in self.lines}
        if key not in lines:
            raise ValueError(f"unknown setting {key!r}; there are {', '.join(lines)}")
        return lines[key]

    @property
    def advice(self) -> str:
        """What fits, and the lines to write for it; else what is missing, and what would help."""
        bars = _bars(self)
        if not bars:
            return "None of these settings can be sharded."
        least, size = min(bars, key=lambda bar: (bar[1].total, not bar[0].write))
        if self.budget is None:
            text = _with_code(f"Least memory: {least.label}, {format_size(size.total)}.", least)
            return f"{text}\nA budget (--budget 24GiB) says what fits."
        budget, fitting = format_size(self.budget), self.fitting
        if not fitting:
            return f"Nothing fits in {budget}. Nearest: {least.label}, {_room(self, least)}.\n{_help(self)}"
        ours = [line for line in fitting if line.write]
        best = next(iter([line for line in ours if line.key in ADVICE] + ours), least)
        head = f"{len(fitting)} of {len(self.lines)} settings fit in {budget}."
        text = _with_code(f"{head} Take {best.label} ({_room(self, best)}).", best)
        if best.left(0) == least.left(0):
            return text
        return f"{text}\n" + _with_code(f"Most room: {least.label} ({_room(self, least)}).", least)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as `--json` prints it: numbers are bytes."""
        lines = []
        for line in self.lines:
            left = None if self.budget is None else line.left(self.budget)
            record = asdict(line) | {"left": left, "write": list(line.write)}
            for name, size in {"device": line.device, "whole": line.whole}.items():
                record[name] = size and record[name] | {"total": size.total}
            lines.append(record)
        return {
            **{name: getattr(self, name) for name in ("model", "parameters", "trained", "tensors", "shards", "budget")},
            **asdict(self.situation),
            "fitting": None if self.budget is None else [line.key for line in self.fitting],
            "settings": lines,
            "advice": self.advice,
        }

    def __str__(self) -> str:
        """Return the table, the chart, what is not in them, and advice, as wide as the terminal."""
        width = shutil.get_terminal_size((NO_TERMINAL, 24)).columns
        labels = max(len(line.label) for line in self.lines)
        parts = [
            fill(_heading(self), width),
            draw_table(table(self, width), width),
            self.chart(max(16, min(60, width - labels - 13))),
            "\n".join(fill(note, width) for note in _notes(self)),
            # code, which is indented, stays as it is
            "\n".join(x if x.startswith(" ") else fill(x, width) for x in self.advice.splitlines()),
        ]
        return "\n\n".join(parts)

    def chart(self, width: int = 60) -> str:
        """Return a bar for each setting, each part in a mark of its own; the budget, if there is one, is a line."""
        bars, longest = _bars(self), _longest(self)
        labels = max((len(line.label) for line, _ in bars), default=0)
        rows = []
        for line, size in bars:
            # rounding never moves the end of a bar
            ends = [round(size.sum(PARTS[: i + 1]) / longest * width) for i in range(len(PARTS))]
            bar = "".join(MARKS[part] * (b - a) for part, a, b in zip(PARTS, [0, *ends], ends, strict=False))
            if self.budget is not None:
                place = round(self.budget / longest * width)
                bar = bar.ljust(width + 1)
                bar = f"{bar[:place]}│{bar[place:]}".rstrip()
            rows.append(f"{line.label.ljust(labels)} {bar} {format_size(size.total)}")
        signs = {part: MARKS[part] for part in PARTS if any(getattr(size, part) for _, size in bars)}
        signs |= {} if self.budget is None else {"budget": "│"}
        legend = "  ".join(f"{sign}\N{NO-BREAK SPACE}{name}" for name, sign in signs.items())
        return "\n".join([*rows, "", fill(legend, labels + width + 12).replace("\N{NO-BREAK SPACE}", " ")])

    def plot(self, path: str | Path) -> None:
        """Draw the chart as a picture, with matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise ImportError(f"a plot needs matplotlib (pip install matplotlib): {missing}") from missing
        bars = _bars(self)
        figure = Figure(figsize=(9, 1.6 + 0.32 * len(bars)), layout="constrained")
        axes = figure.subplots()
        labels = [line.label for line, _ in bars]
        for i, part in enumerate(PARTS):
            lengths, starts = ([size.sum(parts) / 2**30 for _, size in bars] for parts in ((part,), PARTS[:i]))
            if any(lengths):
                drawn = axes.barh(labels, lengths, left=starts, color=COLOURS[part], label=part, height=0.7)
        if bars:
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the line of the budget
            axes.bar_label(drawn, [format_size(size.total) for _, size in bars], padding=4, fontsize=8, bbox=white)
        if self.budget is not None:
            axes.axvline(self.budget / 2**30, color="black", linestyle="--", linewidth=1)
            axes.text(self.budget / 2**30, -0.75, f" {format_size(self.budget)}", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * _longest(self) / 2**30)
        where = f" on each of {self.shards:,} devices" if self.shards > 1 else ""
        axes.set_xlabel(f"GiB{where}{'' if self.situation.batch else ', without activations'}")
        axes.set_title(f"{self.model}, {self.parameters:,} parameters", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
        figure.savefig(path, dpi=120)


def print_plan(plan: Plan) -> None:
    """Print all of it in the terminal; the parts of bars in colour where rich is installed."""
    try:
        from rich.console import Console
        from rich.text import Text

        console = Console()
    except ImportError:
        console = None
    if console is None or not console.is_terminal:
        print(plan)
        return
    text = Text(str(plan))
    for part, mark in MARKS.items():
        mark = re.escape(mark)
        text.highlight_regex(f"{mark}{{2,}}|{mark}(?= {part})", style=COLOURS[part])
    text.highlight_regex(r"(?m)^    .*$", style="bold")  # code to write
    console.print(text, soft_wrap=True)


# ---- sizes


def parse_size(text: int | str) -> int:
    """Return the bytes of `24GiB`, `24G` (the same), `24 GB` or `800MiB`; an integer is bytes, its text is not."""
    is_bytes = isinstance(text, int) and not isinstance(text, bool)
    words = f"{int(text)}B" if is_bytes else str(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", words)
    count, unit = (float(match[1]), match[2].upper()) if match else (0.0, "-")
    if count and not unit:
        raise ValueError(f"{text} of what? Write {text}GiB, or {text}MiB")
    if unit not in UNITS or count <= 0:
        raise ValueError(f"{text!r} must be a size above 0 such as 24GiB or 24G (2³⁰ bytes), 24GB (10⁹) or 800MiB")
    return int(count * UNITS[unit])


def format_size(count: int) -> str:
    """Write a number of bytes with three significant digits, in units of 1024."""
    if not count:
        return "–"
    if count < 0:
        return f"−{format_size(-count)}"
    size, unit = next(pair for pair in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if count >= pair[0])
    value = count / size
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


# ---- the table


def table(plan: Plan, width: int) -> list[list[str]]:
    """Return heads and rows; a part that no setting has is no column, and parts are added up where all are too wide.

    The name of an optimizer is a row of its own, above those of its settings.
    """
    sizes = [size for _, size in _bars(plan)]
    parts = [part for part in PARTS if any(getattr(size, part) for size in sizes)]
    rows = _rows(plan, {part: (part,) for part in parts}, with_whole=plan.shards > 1)
    first, *others = _widths(rows)
    if min(first, FOLDED) + sum(others) + len(others) <= width:
        return rows
    state, temporary = ("master", "statistics", "momentum", "rounding"), ("temporary",)
    columns = {"weights": ("weights", "buffers"), "gradients": ("gradients",)}
    if plan.situation.batch:
        columns |= {"optimizer": (*state, *temporary), "activations": ("activations",)}
    else:
        columns |= {"optimizer": state, "temporary": temporary}
    return _rows(plan, columns, with_whole=False)


def _rows(plan: Plan, columns: Mapping[str, tuple[str, ...]], with_whole: bool) -> list[list[str]]:
    heads = ["setting", *columns, "per device" if plan.shards > 1 else "total"]
    rows = [heads + ["on one"] * with_whole + ["left"] * (plan.budget is not None)]
    for line in plan.lines:
        name, _, kind = line.label.partition(", ")
        if [name] not in rows:
            rows.append([name])
        size = line.device
        cells = [format_size(size.sum(parts)) if size else "" for parts in columns.values()]
        cells += [format_size(size.total) if size else "cannot"] + [format_size(line.whole.total)] * with_whole
        if plan.budget is not None:
            cells.append(format_size(plan.budget - size.total) if size else "")
        rows.append([f" {kind}", *cells])
    return rows


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*(row for row in rows if row[1:]), strict=True)]


def draw_table(rows: list[list[str]], width: int) -> str:
    """Draw heads and rows; what a setting is called is folded where the terminal is too narrow."""
    widths = _widths(rows)
    room = widths[0] = min(widths[0], max(16, width - sum(widths[1:]) - len(widths) + 1))
    lines = []
    for label, *cells in (rows[0], ["─" * width for width in widths], *rows[1:]):
        first, *rest = wrap(label, room, subsequent_indent="  ") if cells else [label]
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False)]
        lines += [" ".join([first.ljust(room), *numbers]).rstrip(), *rest]
    return "\n".join(lines)


# ---- sentences


def _heading(plan: Plan) -> str:
    how = plan.situation
    count = f"{plan.parameters:,} parameters in {plan.tensors:,} tensors"
    frozen = f", {plan.trained:,} of them trained" if plan.trained < plan.parameters else ""
    lora = f" (LoRA of rank {how.lora} on every matrix of the layers)" if how.lora else ""
    shards = f", cut among {plan.shards:,} devices" if plan.shards > 1 else ""
    return f"{plan.model}: {count}{frozen}{lora}{shards}. Steps on {how.device}, AdamW {how.adamw}."


def _notes(plan: Plan) -> list[str]:
    """What has to be said below the table."""
    notes, how = [], plan.situation
    for reason in dict.fromkeys(line.note for line in plan.lines if line.note):
        keys = ", ".join(line.key for line in plan.lines if line.note == reason)
        notes.append(f"Cannot be sharded: {keys} ({reason}).")
    if how.batch:
        notes.append(
            f"Activations are an estimate from the matrices' shapes, for {how.batch:,} × {how.tokens:,} tokens on each "
            f"device, {'with' if how.checkpointing else 'without'} checkpointing, and for attention that does not keep "
            "its weights (SDPA)."
        )
    return [*notes, f"Not counted: {'' if how.batch else 'activations (--batch, --tokens), '}{NOT_COUNTED}."]


def _help(plan: Plan) -> str:
    """Where nothing fits: what would."""
    other, how = plan.alternative, plan.situation
    if other is None:
        return "Neither checkpointing, nor a batch of one sequence, nor 1,024 times as many devices would be enough."
    words = [f"--batch {other.situation.batch}"] * (other.situation.batch < how.batch)
    words += ["--checkpointing"] * (other.situation.checkpointing and not how.checkpointing)
    words += [f"--shards {other.shards}"] * (other.shards > plan.shards)
    return f"With {' '.join(words)}: {other.advice}"


def _room(plan: Plan, line: Line) -> str:
    left = line.left(plan.budget or 0) or 0
    if left <= 0:
        return f"{format_size(-left)} too large"
    where = " on each device" if plan.shards > 1 else ""
    return f"{format_size(left)} left{where}{'' if plan.situation.batch else ' for activations'}"


def _with_code(sentence: str, line: Line) -> str:
    code = "".join(f"    {text}\n" for text in line.write)
    return f"{sentence} Write:\n\n{code}" if code else sentence


def _bars(plan: Plan) -> list[tuple[Line, Bytes]]:
    """Every line that can be had, with its bytes on a device."""
    return [(line, line.device) for line in plan.lines if line.device is not None]


def _longest(plan: Plan) -> int:
    """The bytes of the longest bar, or of the budget."""
    return max([plan.budget or 1, *(size.total for _, size in _bars(plan))])
