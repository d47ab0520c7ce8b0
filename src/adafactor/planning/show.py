"""The memory plan of a model: its numbers, and how they become a table, bars, advice, JSON and a picture."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from adafactor.planning.optimizers import SETTINGS, SHORT, Setting, Situation

ADVICE = ("adafactor-float32", "adafactor-stochastic", "adafactor-backward")  # the first that fits
NO_TERMINAL = 100  # columns, where there is no terminal and COLUMNS is not set
NOT_COUNTED = "what a framework gathers or reduces between devices, and what an allocator cannot use"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Bytes:
    """The parts of a plan, in bytes. Activations are an estimate, and only there when a batch is given."""

    weights: int = 0
    master: int = 0  # float32 copies of 16-bit weights, which the optimizer steps
    gradients: int = 0
    statistics: int = 0  # of the gradients' squares, and the counts of steps
    momentum: int = 0
    rounding: int = 0  # Kahan's compensation
    temporary: int = 0  # the most that a step, or the sum of a tied parameter's gradients, holds for a moment
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All parts together: the peak of a training step."""
        return sum(getattr(self, part) for part in PARTS)


PARTS = tuple(part.name for part in fields(Bytes))
# a mark for each part of a bar, and a colour that can be told from its neighbours'
MARKS = dict(zip(PARTS, "█▓▒░▚▞·=+", strict=True))
COLOURS = dict(
    zip(PARTS, "#33508a #7b98d1 #d98b3a #3d9970 #8cc7a7 #a05ba0 #b0b0b0 #707070 #c94f4f".split(), strict=True)
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """The memory that one setting takes."""

    key: str
    label: str
    whole: Bytes  # on one device
    device: Bytes | None  # on the fullest of them; None if the optimizer cannot step sharded parameters
    note: str = ""

    def left(self, budget: int) -> int | None:
        """What remains of a device's memory; below zero if it is not enough, None if it cannot be sharded."""
        return None if self.device is None else budget - self.device.total


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
    shards: int
    situation: Situation
    budget: int | None = None
    alternative: Plan | None = None

    @property
    def fitting(self) -> tuple[Line, ...]:
        """The settings that fit the budget; all if there is none."""
        budget = self.budget
        return tuple(x for x in self.lines if budget is None or (x.left(budget) or 0) > 0)

    def line(self, key: str) -> Line:
        """Return the line of one setting."""
        return next(line for line in self.lines if line.key == find_setting(key).key)

    @property
    def advice(self) -> str:
        """What fits, and the lines to write for it; else what is missing, and what would help."""
        usable = [line for line in self.lines if line.device is not None]
        if not usable:
            return "None of these settings can be sharded."
        least = max(usable, key=lambda line: (line.left(0) or 0, SETTINGS[line.key].keywords is not None))
        if self.budget is None:
            size = format_size(-(least.left(0) or 0))
            return _with_code(self, least, f"Least memory: {least.label}, {size}.") + (
                "\nA budget (--budget 24GiB) says what fits."
            )
        budget, fitting = format_size(self.budget), self.fitting
        if not fitting:
            return f"Nothing fits in {budget}. Nearest: {least.label}, {_room(self, least)}.\n{_help(self)}"
        ours = [line for line in fitting if SETTINGS[line.key].keywords is not None]
        best = next((line for line in (*(x for x in ours if x.key in ADVICE), *ours)), least)
        head = f"{len(fitting)} of {len(self.lines)} settings fit in {budget}. "
        text = _with_code(self, best, f"{head}Take {best.label} ({_room(self, best)}).")
        if best.left(0) == least.left(0):
            return text
        return f"{text}\n" + _with_code(self, least, f"Most room: {least.label} ({_room(self, least)}).")

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as `--json` prints it: numbers are bytes."""
        return {
            **{name: getattr(self, name) for name in ("model", "parameters", "trained", "tensors", "shards", "budget")},
            **asdict(self.situation),
            "fitting": None if self.budget is None else [line.key for line in self.fitting],
            "settings": [_line_as_dict(self, line) for line in self.lines],
            "advice": self.advice,
        }

    def __str__(self) -> str:
        """Return the table, the chart, what is not in them, and advice, as wide as the terminal."""
        width = shutil.get_terminal_size((NO_TERMINAL, 24)).columns
        labels = max(len(line.label) for line in self.lines)
        parts = [
            fill(_heading(self), width),
            "\n".join(_draw_table(*table(self, width), width)),
            self.chart(max(16, min(60, width - labels - 13))),
            "\n".join(fill(note, width) for note in _notes(self)),
            # code, which is indented, stays as it is
            "\n".join(x if x.startswith(" ") else fill(x, width) for x in self.advice.splitlines()),
        ]
        return "\n\n".join(parts)

    def chart(self, width: int = 60) -> str:
        """Return a bar for each setting, each part in a mark of its own; the budget, if there is one, is a line."""
        bars, longest = _bars(self)
        labels = max((len(line.label) for line, _ in bars), default=0)
        rows = []
        for line, size in bars:
            bar = "".join(MARKS[part] * length for part, length in _segments(size, longest, width))
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
        bars, longest = _bars(self)
        figure = Figure(figsize=(9, 1.6 + 0.32 * len(bars)), layout="constrained")
        axes = figure.subplots()
        labels = [line.label for line, _ in bars]
        start = [0.0] * len(bars)
        for part in PARTS:
            lengths = [getattr(size, part) / 2**30 for _, size in bars]
            if any(lengths):
                axes.barh(labels, lengths, left=start, color=COLOURS[part], label=part, height=0.7)
                start = [a + b for a, b in zip(start, lengths, strict=True)]
        for place, (_, size) in enumerate(bars):
            axes.annotate(
                format_size(size.total),
                (start[place], place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # over the line of the budget
            )
        if self.budget is not None:
            axes.axvline(self.budget / 2**30, color="black", linestyle="--", linewidth=1)
            axes.text(self.budget / 2**30, -0.75, f" {format_size(self.budget)}", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * longest / 2**30)
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
    except ImportError:
        print(plan)
        return
    console = Console()
    if not console.is_terminal:
        print(plan)
        return
    text = Text(str(plan))
    for part in PARTS:
        mark = re.escape(MARKS[part])
        text.highlight_regex(f"{mark}{{2,}}|{mark}(?= {part})", style=COLOURS[part])
    text.highlight_regex(r"(?m)^    .*$", style="bold")  # code to write
    console.print(text, soft_wrap=True)


def find_setting(key: str) -> Setting:
    """Return the setting of that key, or raise an error that lists all."""
    if key not in SETTINGS:
        raise ValueError(f"unknown setting {key!r}; there are {', '.join(SETTINGS)}")
    return SETTINGS[key]


def parse_size(text: int | str) -> int:
    """Return the bytes of `24GiB`, `24G` (the same), `24 GB` or `800MiB`; an integer is bytes, its text is not."""
    if isinstance(text, int) and not isinstance(text, bool):
        count, unit = float(text), "B"
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
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
    size, unit = next(pair for pair in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if count >= pair[0])
    value = count / size
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


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
    for reason in dict.fromkeys(line.note for line in plan.lines if line.device is None):
        keys = ", ".join(line.key for line in plan.lines if line.note == reason)
        notes.append(f"Cannot be sharded: {keys} ({reason}).")
    if how.batch:
        notes.append(
            f"Activations are an estimate from the matrices' shapes, for {how.batch:,} × {how.tokens:,} tokens on each "
            f"device, {'with' if how.checkpointing else 'without'} checkpointing, and for attention that does not keep "
            "its weights (SDPA)."
        )
    return [*notes, f"Not counted: {'' if how.batch else 'activations (--batch, --tokens), '}{NOT_COUNTED}."]


def table(plan: Plan, width: int) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows; a part that no setting has is no column, and parts are added up where all are too wide."""
    totals = ["per device", "on one"] if plan.shards > 1 else ["total"]
    left = [] if plan.budget is None else ["left"]
    columns = {part: (part,) for part in PARTS if any(x.device and getattr(x.device, part) for x in plan.lines)}
    heads = ["setting", *columns, *totals, *left]
    rows = [_row(plan, line, columns, totals) for line in plan.lines]
    if sum(_widths(heads, rows)) + 2 * (len(heads) - 1) <= width:
        return heads, rows
    state, temporary = ("master", "statistics", "momentum", "rounding"), ("temporary",)
    narrow = {"weights": ("weights", "buffers"), "gradients": ("gradients",)}
    if plan.situation.batch:
        narrow |= {"optimizer": (*state, *temporary), "activations": ("activations",)}
    else:
        narrow |= {"optimizer": state, "temporary": temporary}
    return ["setting", *narrow, *totals[:1], *left], [_row(plan, line, narrow, totals[:1]) for line in plan.lines]


def _row(plan: Plan, line: Line, columns: Mapping[str, tuple[str, ...]], totals: list[str]) -> list[str]:
    size = line.device
    cells = [format_size(sum(getattr(size, part) for part in parts)) if size else "" for parts in columns.values()]
    last = [format_size(size.total) if size else "cannot", format_size(line.whole.total)][: len(totals)]
    if plan.budget is not None:
        left = line.left(plan.budget)
        last.append("" if left is None else f"−{format_size(-left)}" if left < 0 else format_size(left))
    return [line.label, *cells, *last]


def _widths(heads: list[str], rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(heads, *rows, strict=True)]


def _draw_table(heads: list[str], rows: list[list[str]], width: int) -> list[str]:
    """Return its lines. Where it is too wide, each optimizer's name has its own line, and labels are folded."""
    widths = _widths(heads, rows)
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= width else 1
    room = max(16, width - sum(widths[1:]) - gap * (len(widths) - 1))
    is_folded, family = widths[0] > room, ""
    widths[0] = min(widths[0], room)
    lines = []
    for row in (heads, ["─" * width for width in widths], *rows):
        label, *cells = row
        numbers = (" " * gap).join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        first = [label]
        if is_folded and row in rows:
            name, _, kind = label.partition(", ")
            lines += [name] * (name != family)
            family, first = name, wrap(kind, room, initial_indent=" ", subsequent_indent="  ")
        lines += [f"{first[0].ljust(widths[0])}{' ' * gap}{numbers}".rstrip(), *first[1:]]
    return lines


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


def _with_code(plan: Plan, line: Line, sentence: str) -> str:
    code = "\n".join(f"    {row}" for row in _code(plan, line))
    return f"{sentence} Write:\n\n{code}\n" if code else sentence


def _code(plan: Plan, line: Line) -> list[str]:
    """The lines to write for one of our settings; none for another optimizer's."""
    setting, how = SETTINGS[line.key], plan.situation
    if setting.keywords is None:
        return []
    adapt = f'model = peft.get_peft_model(model, peft.LoraConfig(r={how.lora}, target_modules="all-linear"))'
    rows = {
        adapt: how.lora > 0,
        "model.bfloat16()": setting.dtype == SHORT,
        "model.gradient_checkpointing_enable()  # of transformers; else torch.utils.checkpoint": how.checkpointing,
        "fully_shard(model)  # of torch.distributed.fsdp; each layer before the whole": plan.shards > 1,
        f"optimizer = Adafactor(model.named_parameters(){setting.keywords})": True,
        "step_in_backward(model, optimizer)": setting.in_backward,
    }
    return [row for row, is_needed in rows.items() if is_needed]


def _line_as_dict(plan: Plan, line: Line) -> dict[str, Any]:
    sizes = {"device": line.device, "whole": line.whole}
    return {
        "key": line.key,
        "label": line.label,
        **{name: size and {**asdict(size), "total": size.total} for name, size in sizes.items()},
        "left": None if plan.budget is None else line.left(plan.budget),
        "note": line.note,
        "write": _code(plan, line),
    }


def _bars(plan: Plan) -> tuple[list[tuple[Line, Bytes]], int]:
    """Every line that has a bar, its bytes on a device, and the bytes of the longest bar or the budget."""
    bars = [(line, line.device) for line in plan.lines if line.device is not None]
    return bars, max([plan.budget or 1, *(size.total for _, size in bars)])


def _segments(size: Bytes, longest: int, width: int) -> list[tuple[str, int]]:
    """How long each part of a bar is; rounding never moves the end of a bar."""
    segments, total, end = [], 0, 0
    for part in PARTS:
        total += getattr(size, part)
        length = round(total / longest * width) - end
        segments.append((part, length))
        end += length
    return segments
