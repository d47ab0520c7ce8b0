"""What the steps did to each parameter: RMS(U), clipping and the step size of §5, kept until `report()` asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adafactor.core import dtensor, sums
from adafactor.core import equations as eq
from adafactor.core.equations import Scalar
from adafactor.core.settings import Settings

WIDTH = 100  # columns of the printed table
LONGEST_SHAPE = 20  # columns


@dataclass(frozen=True, slots=True)  # a list of reports has many
class Record:
    """The metrics of one parameter, of the last step unless said otherwise; NaN before the first step.

    The counts are of all steps since the optimizer was made or loaded; in the reports of a `diagnostics.Watch`, of
    those since the report before.

    Attributes:
        name: as given to the optimizer; without names, the parameter's number. With `per_slice`, `name[i]`.
        shape: of the parameter, whole also where it is sharded.
        rms_update: RMS(Uₜ) before clipping (§5): far from 1 means an out-of-date second moment.
        step_size: αₜ.
        rms_parameter: RMS(Xₜ₋₁); of Xₜ for absolute steps, which do not need it and so leave it to the report.
        relative_change: αₜ·RMS(Ûₜ)/RMS(X): by how much of itself the step changes the parameter.
        beta2: β̂₂ₜ.
        steps: how many steps were taken.
        clipped: in how many of these the update was clipped (§6).
        skipped: steps not taken because of a NaN or infinite gradient, ever since the optimizer was made or loaded.
        state_bytes: what the optimizer keeps of the parameter; of a sharded one, all shards together.
        rule: the pattern of the optimizer's `rules` that matched its name; empty if none did.
        dtype: of the parameter.
        trainable: whether it requires a gradient.
        settings: the keywords of its group.
    """

    name: str
    shape: tuple[int, ...]
    rms_update: float
    step_size: float
    rms_parameter: float
    relative_change: float
    beta2: float
    steps: int
    clipped: int
    skipped: int
    state_bytes: int
    rule: str = ""
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    settings: Settings = field(default=Settings(), repr=False)

    @property
    def clip_rate(self) -> float:
        """The share of the steps in which the update was clipped; NaN without a step."""
        return self.clipped / self.steps if self.steps else math.nan


@dataclass
class StepMetrics:
    """What is behind a `Record`: 0-d tensors where reading them would make the host wait, else numbers."""

    rms_update: Scalar | None = None
    step_size: Scalar | None = None
    rms_parameter: Scalar | None = None
    beta2: Scalar | None = None
    clipped: Tensor | int = 0  # steps, as the next two
    taken: Tensor | int = 0
    skipped: Tensor | int = 0
    captured: list[object] = field(default_factory=list)  # what graphs read with every replay, so it must last

    def add(
        self,
        beta2: Scalar,
        rms_parameter: Scalar | None,
        step_size: Scalar,
        rms_update: Scalar,
        clipped: Tensor | int,
        taken: Tensor | int,
    ) -> None:
        """Keep the figures of a step, or the last figures and the counts of several; of none, only the counts."""

        def last(new: Scalar | None, old: Scalar | None) -> Scalar | None:
            if not isinstance(new, Tensor) or not isinstance(taken, Tensor):
                return new
            before = old if isinstance(old, Tensor) else torch.full_like(new, math.nan if old is None else old)
            return torch.where(taken > 0, new, before.to(new))

        self.beta2, self.rms_parameter = last(beta2, self.beta2), last(rms_parameter, self.rms_parameter)
        self.step_size, self.rms_update = last(step_size, self.step_size), last(rms_update, self.rms_update)
        self.clipped, self.taken = self.clipped + clipped, self.taken + taken

    def record(self, name: str, x: Tensor, trainable: bool, state_bytes: int, group: Mapping[str, Any]) -> Record:
        """Read the figures: here the host may wait for the device."""
        rms_update, step_size, rms_parameter = map(_read, (self.rms_update, self.step_size, self.rms_parameter))
        if self.step_size is not None and self.rms_parameter is None and not dtensor.is_sharded(x):
            rms_parameter = rms(x)
        return Record(
            name=name,
            shape=tuple(x.shape),
            rms_update=rms_update,
            step_size=step_size,
            rms_parameter=rms_parameter,
            relative_change=relative_change(step_size, rms_update, rms_parameter, group["clip"]),
            beta2=_read(self.beta2),
            steps=int(self.taken),
            clipped=int(self.clipped),
            skipped=int(self.skipped),
            state_bytes=state_bytes,
            rule=group.get("rule", ""),
            dtype=x.dtype,
            trainable=trainable,
            settings=Settings.of(group),
        )


def relative_change(step_size: float, rms_update: float, rms_parameter: float, clip: float | None) -> float:
    """αₜ·RMS(Ûₜ)/RMS(X) with RMS(Û) = RMS(U)/max(1, RMS(U)/d) (§6); infinite for a parameter that is all zero."""
    change = step_size * rms_update / float(eq.clip_divisor(rms_update, clip))
    if rms_parameter == 0:
        return math.inf if change > 0 else 0.0
    return change / rms_parameter


def rms(x: Tensor) -> float:
    """RMS(X), where a step has not measured it."""
    if not x.numel():
        return math.nan
    return float(eq.root_mean_square(float(sums.norm([x.detach()])) ** 2, x.numel()))


def _read(value: Scalar | None) -> float:
    return math.nan if value is None else float(value)


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
