"""The memory plan of a model: its numbers, the table, and the advice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import fill

from adafactor.planning.memory import COMMON, Bytes, Line, Situation

WIDTH = 100
ADVICE = ("adafactor-float32", "adafactor-stochastic", "adafactor-backward")  # the first that fits
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Plan:
    """The memory plan of a model. `str()` is a table with advice below it.

    `lines` has one entry per setting; `fitting` are those that the budget covers; `advice` says what to write.
    """

    model: str
    parameters: int
    trained: int
    tensors: int
    lines: tuple[Line, ...]
    situation: Situation
    budget: int | None = None
    everything: bool = False  # whether `str()` shows all lines

    @property
    def fitting(self) -> tuple[Line, ...]:
        """The settings that fit the budget; all if there is none."""
        return tuple(x for x in self.lines if self.budget is None or x.left(self.budget) > 0)

    def line(self, key: str) -> Line:
        """Return the line of one setting."""
        lines = {line.key: line for line in self.lines}
        if key not in lines:
            raise ValueError(f"unknown setting {key!r}; there are {', '.join(lines)}")
        return lines[key]

    @property
    def advice(self) -> str:
        """What to take, and the lines to write for it; where nothing fits, what is missing and what would help."""
        fits = [line for line in map(self.line, ADVICE) if line in self.fitting]
        if not fits:
            least = self.line(ADVICE[-1])
            how = self.situation
            help_ = ["--lora 16"] * (not how.lora) + [f"--shards {2 * how.shards}"]
            if how.batch:
                help_ = ["--checkpointing"] * (not how.checkpointing) + ["a smaller --batch"] * (how.batch > 1) + help_
            missing = format_size(-least.left(self.budget or 0))
            return (
                f"{least.label} is {missing} too large for {format_size(self.budget or 0)}. Try {', or '.join(help_)}."
            )
        room = "" if self.budget is None else f" ({format_size(fits[0].left(self.budget))} left)"
        return f"Take {fits[0].label}{room}:\n\n" + "\n".join(f"    {text}" for text in fits[0].write)

    def __str__(self) -> str:
        """Return the table, what is not in it, and the advice."""
        how = self.situation
        lora = f", with LoRA of rank {how.lora}" if how.lora else ""
        shards = f", on each of {how.shards:,} devices" if how.shards > 1 else ""
        head = f"{self.model}{lora}: {self.parameters:,} parameters in {self.tensors:,} tensors"
        frozen = f", {self.trained:,} of them trained" if self.trained < self.parameters else ""
        count = "" if how.batch else "activations (--batch, --tokens), "
        note = f"Not counted: {count}what a framework gathers between devices, and what an allocator cannot use."
        return "\n\n".join([fill(f"{head}{frozen}{shards}.", WIDTH), self._table(), fill(note, WIDTH), self.advice])

    def _table(self) -> str:
        shown = [line for line in self.lines if self.everything or line.key in COMMON]
        activations = ["activations"] * bool(self.situation.batch)
        left = ["left"] * (self.budget is not None)
        rows = [["", "weights", "gradients", "optimizer", *activations, "total", *left]]
        rows += [[line.label, *self._cells(line.bytes)] for line in shown]
        widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=False))
            for row in rows
        )

    def _cells(self, size: Bytes | None) -> list[str]:
        """What a row says after its label."""
        if size is None:
            return ["cannot be sharded"]
        parts = [size.weights, size.gradients, size.optimizer + size.temporary]
        parts += [size.activations] * bool(self.situation.batch)
        left = [] if self.budget is None else [self.budget - size.total]
        return [format_size(part) for part in (*parts, size.total, *left)]


def parse_size(text: int | str) -> int:
    """Return the bytes of `24GiB`, `24G` (the same), `24 GB` or `800MiB`; an integer is bytes, its text is not."""
    is_bytes = isinstance(text, int) and not isinstance(text, bool)
    words = f"{int(text)}B" if is_bytes else str(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", words)
    count, unit = (float(match[1]), match[2].upper()) if match else (0.0, "-")
    if unit not in UNITS or count <= 0:
        raise ValueError(f"{text!r} must be a size above 0 such as 24GiB or 24G (2³⁰ bytes), 24GB (10⁹) or 800MiB")
    return int(count * UNITS[unit])


def format_size(count: int) -> str:
    """Write a number of bytes with three significant digits, in units of 1024."""
    if count < 0:
        return f"-{format_size(-count)}"
    size, unit = next(
        p for p in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if count >= p[0] or p[0] == 1
    )
    value = count / size
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"
