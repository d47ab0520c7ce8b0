"""A plan as a table, as bars in the terminal, as advice, as JSON and as a picture."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from adafactor.planning import sizes
from adafactor.planning.bill import PARTS, Bytes, Line, Plan
from adafactor.planning.optimizers import SETTINGS, SHORT

# a mark for each part of a bar, and a colour that can be told from its neighbours'
MARKS = dict(zip(PARTS, "█▓▒░▚▞·=+", strict=True))
COLOURS = dict(
    zip(PARTS, "#33508a #7b98d1 #d98b3a #3d9970 #8cc7a7 #a05ba0 #b0b0b0 #707070 #c94f4f".split(), strict=True)
)  # fmt: skip
# what a narrow table shows, and which parts are in it; beside activations, temporaries count as the optimizer's
NARROW = {
    "weights": ("weights", "buffers"),
    "gradients": ("gradients",),
    "optimizer": ("master", "statistics", "momentum", "rounding"),
    "temporary": ("temporary",),
}
NARROW_WITH_ACTIVATIONS = {
    "weights": NARROW["weights"],
    "gradients": NARROW["gradients"],
    "optimizer": (*NARROW["optimizer"], "temporary"),
    "activations": ("activations",),
}
ON_A_PIPE = 100  # columns, where there is no terminal and COLUMNS is not set
LEFT_OUT = "what a framework gathers or reduces between devices, and what an allocator cannot use"


def heading(plan: Plan) -> str:
    """Which model, and how it is trained."""
    how = plan.situation
    count = f"{plan.parameters:,} parameters in {plan.tensors:,} tensors"
    frozen = f", {plan.trained:,} of them trained" if plan.trained < plan.parameters else ""
    lora = f" (LoRA of rank {how.lora} on every matrix of the layers)" if how.lora else ""
    cut = f", cut among {plan.shards:,} devices" if plan.shards > 1 else ""
    return f"{plan.model}: {count}{frozen}{lora}{cut}. Steps on {how.device}, AdamW {how.adamw}."


def notes(plan: Plan) -> list[str]:
    """What has to be said below the table."""
    said, how = [], plan.situation
    for reason in dict.fromkeys(line.note for line in plan.lines if line.device is None):
        keys = ", ".join(line.key for line in plan.lines if line.note == reason)
        said.append(f"Cannot be sharded: {keys} ({reason}).")
    if how.batch:
        kept = "with checkpointing" if how.checkpointing else "without checkpointing"
        said.append(
            f"Activations are an estimate from the matrices' shapes, for {how.batch:,} × {how.tokens:,} tokens on each "
            f"device, {kept}, and for attention that does not keep its weights (SDPA)."
        )
    return [*said, f"Not counted: {'' if how.batch else 'activations (--batch, --tokens), '}{LEFT_OUT}."]


def table(plan: Plan, width: int) -> tuple[list[str], list[list[str]]]:
    """Heads and rows; a part that no setting has is no column. Parts are put together where all are too wide."""
    used = [part for part in PARTS if any(line.device and getattr(line.device, part) for line in plan.lines)]
    both = ["per device", "on one"] if plan.shards > 1 else ["total"]
    fit = [] if plan.budget is None else ["left"]
    heads = ["setting", *used, *both, *fit]
    rows = [_row(plan, line, [(part,) for part in used], both) for line in plan.lines]
    if sum(_widths(heads, rows)) + 2 * (len(heads) - 1) <= width:
        return heads, rows
    parts = NARROW_WITH_ACTIVATIONS if plan.situation.batch else NARROW
    heads = ["setting", *parts, both[0], *fit]
    return heads, [_row(plan, line, list(parts.values()), both[:1]) for line in plan.lines]


def _row(plan: Plan, line: Line, parts: list[tuple[str, ...]], totals: list[str]) -> list[str]:
    bill = line.device
    cells = [sizes.show(sum(getattr(bill, name) for name in part)) if bill else "" for part in parts]
    last = [sizes.show(bill.total) if bill else "cannot", sizes.show(line.whole.total)][: len(totals)]
    if plan.budget is not None:
        left = line.left(plan.budget)
        last.append("" if left is None else f"−{sizes.show(-left)}" if left < 0 else sizes.show(left))
    return [line.label, *cells, *last]


def _widths(heads: list[str], rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(heads, *rows, strict=True)]


def draw(heads: list[str], rows: list[list[str]], width: int) -> list[str]:
    """The lines of a table. Where it is too wide, each optimizer's name has its own line, and labels are folded."""
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


def text(plan: Plan, width: int | None = None) -> str:
    """Table, chart, notes and advice in plain text."""
    width = width or shutil.get_terminal_size((ON_A_PIPE, 24)).columns
    labels = max(len(line.label) for line in plan.lines)
    bars = chart(plan, max(16, min(60, width - labels - 13)))
    said = [fill(note, width) for note in notes(plan)]
    drawn = draw(*table(plan, width), width)
    return "\n".join([fill(heading(plan), width), "", *drawn, "", bars, "", *said, "", _folded(plan.advice, width)])


def _folded(lines: str, width: int) -> str:
    """Sentences within the width; code, which is indented, as it is."""
    return "\n".join(line if line.startswith(" ") else fill(line, width) for line in lines.splitlines())


def advice(plan: Plan) -> str:
    """What fits, and the lines to write for it; else what is missing, and what would help."""
    usable = [line for line in plan.lines if line.device is not None]
    if not usable:
        return "None of these settings can be sharded."
    most = max(usable, key=lambda line: (line.left(0) or 0, SETTINGS[line.key].keywords is not None))
    if plan.budget is None:
        takes = f"Least memory: {most.label}, {sizes.show(-(most.left(0) or 0))}."
        return _write(plan, most, takes) + "\nA budget (--budget 24GiB) says what fits."
    budget = sizes.show(plan.budget)
    if not plan.fitting:
        return f"Nothing fits in {budget}. Nearest: {most.label}, {_room(plan, most)}.\n" + _help(plan)
    ours = [line for line in plan.fitting if line.key in ADVISED] or [
        line for line in plan.fitting if SETTINGS[line.key].keywords is not None
    ]
    best = ours[0] if ours else most
    of = f"{len(plan.fitting)} of {len(plan.lines)} settings fit in {budget}. "
    text = _write(plan, best, f"{of}Take {best.label} ({_room(plan, best)}).")
    if best.left(0) == most.left(0):
        return text
    return f"{text}\n" + _write(plan, most, f"Most room: {most.label} ({_room(plan, most)}).")


ADVISED = ("adafactor-float32", "adafactor-stochastic", "adafactor-backward")  # the first that fits


def _help(plan: Plan) -> str:
    """Where nothing fits: what would."""
    other, how = plan.alternative, plan.situation
    if other is None:
        return "Neither checkpointing, nor a batch of one sequence, nor 1,024 times as many devices would be enough."
    words = [f"--batch {other.situation.batch}"] * (other.situation.batch < how.batch)
    words += ["--checkpointing"] * (other.situation.checkpointing and not how.checkpointing)
    words += [f"--shards {other.shards}"] * (other.shards > plan.shards)
    return f"With {' '.join(words)}: {advice(other)}"


def _room(plan: Plan, line: Line) -> str:
    left = line.left(plan.budget or 0) or 0
    if left <= 0:
        return f"{sizes.show(-left)} too large"
    where = " on each device" if plan.shards > 1 else ""
    return f"{sizes.show(left)} left{where}{'' if plan.situation.batch else ' for activations'}"


def _write(plan: Plan, line: Line, sentence: str) -> str:
    code = "\n".join(f"    {row}" for row in lines_to_write(plan, line))
    return f"{sentence} Write:\n\n{code}\n" if code else sentence


def lines_to_write(plan: Plan, line: Line) -> list[str]:
    """The code of one of our settings; nothing for another optimizer's."""
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
    return [row for row, wanted in rows.items() if wanted]


def as_dict(plan: Plan) -> dict[str, Any]:
    """All of a plan, for JSON."""
    return {
        **{name: getattr(plan, name) for name in ("model", "parameters", "trained", "tensors", "shards", "budget")},
        **asdict(plan.situation),
        "fitting": None if plan.budget is None else [line.key for line in plan.fitting],
        "settings": [_line_as_dict(plan, line) for line in plan.lines],
        "advice": plan.advice,
    }


def _line_as_dict(plan: Plan, line: Line) -> dict[str, Any]:
    bills = {"device": line.device, "whole": line.whole}
    return {
        "key": line.key,
        "label": line.label,
        **{name: bill and {**asdict(bill), "total": bill.total} for name, bill in bills.items()},
        "left": None if plan.budget is None else line.left(plan.budget),
        "note": line.note,
        "write": lines_to_write(plan, line),
    }


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
    signs = {part: MARKS[part] for part in seen} | ({} if plan.budget is None else {"budget": "│"})
    legend = "  ".join(f"{sign}\N{NO-BREAK SPACE}{name}" for name, sign in signs.items())
    folded = fill(legend, labels + width + 12).replace("\N{NO-BREAK SPACE}", " ")
    return "\n".join([*lines, "", folded])


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
    """All of it in the terminal; the parts of bars in colour where rich is installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(text(plan))
        return
    console = Console()
    if not console.is_terminal:
        print(text(plan))
        return
    shown = Text(text(plan))
    for part in PARTS:
        mark = re.escape(MARKS[part])
        shown.highlight_regex(f"{mark}{{2,}}|{mark}(?= {part})", style=COLOURS[part])
    shown.highlight_regex(r"(?m)^    .*$", style="bold")  # code to write
    console.print(shown, soft_wrap=True)


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
    where = f" on each of {plan.shards:,} devices" if plan.shards > 1 else ""
    axes.set_xlabel(f"GiB{where}{'' if plan.situation.batch else ', without activations'}")
    axes.set_title(f"{plan.model}, {plan.parameters:,} parameters", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
