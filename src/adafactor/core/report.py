"""What `optimizer.report()` returns: a list of records, which prints as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from adafactor.core.record import Record

WIDTH = 100  # columns of the printed table
LONGEST_SHAPE = 20  # columns


class Report(list[Record]):
    """The records of all parameters after a step, in the order of the groups; prints as a table.

    Attributes:
        step: t, the number of the last step of any parameter; 0 before the first.
        loss: the mean of the losses since the report before, where a `diagnostics.Watch` was given some; else None.
    """

    def __init__(self, records: Iterable[Record] = (), step: int = 0, loss: float | None = None) -> None:
        """Take the records as they are."""
        super().__init__(records)
        self.step, self.loss = step, loss

    def since(self, earlier: Report) -> Report:
        """Return this report with the counts of the steps after an earlier one; new parameters have all of theirs."""
        before = {record.name: record for record in earlier}
        records = []
        for record in self:
            if (old := before.get(record.name)) and old.steps <= record.steps:  # else a state was loaded in between
                record = replace(record, steps=record.steps - old.steps, clipped=record.clipped - old.clipped)
            records.append(record)
        return Report(records, self.step, self.loss)

    def __str__(self) -> str:
        """Write a table of at most 100 columns, numbers with three digits."""
        loss = "" if self.loss is None else f", loss {_digits(self.loss)}"
        title = f"step {self.step}{loss}: {len(self)} tensors"
        columns = {head: cell for head, cell in COLUMNS.items() if head != "skipped" or any(r.skipped for r in self)}
        rows = [[head, *map(cell, self)] for head, cell in columns.items()]  # a column each
        widths = [max(map(len, row)) for row in rows]
        room = WIDTH - sum(widths) - 2 * len(widths)
        names = [_cut(name, room) for name in ("parameter", *(record.name for record in self))]
        first = max(map(len, names))
        lines = [
            "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
            for name, cells in zip(names, zip(*rows, strict=True), strict=True)
        ]
        return "\n".join([title, *lines])

    __repr__ = __str__


def _digits(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _shape(record: Record) -> str:
    return _cut(" x ".join(map(str, record.shape)) or "scalar", LONGEST_SHAPE)


def _cut(text: str, room: int) -> str:
    """Cut a text in its middle: names differ at their ends."""
    return text if len(text) <= room else f"{text[: room // 3]}...{text[len(text) - (room - room // 3 - 3) :]}"


COLUMNS: dict[str, Callable[[Record], str]] = {
    "shape": _shape,
    "RMS(U)": lambda record: _digits(record.rms_update),
    "clipped": lambda record: "-" if math.isnan(record.clip_rate) else f"{record.clip_rate:.0%}",
    "step size": lambda record: _digits(record.step_size),
    "RMS(X)": lambda record: _digits(record.rms_parameter),
    "change": lambda record: _digits(record.relative_change),
    "skipped": lambda record: str(record.skipped),
}
