"""Figures for loggers: TensorBoard, and any function that takes a dict of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import Protocol

from adafactor.core.record import Record
from adafactor.diagnostics.report import Report, Sink

FIGURES = ("rms_update", "clip_rate", "relative_change")
ALL_FIGURES = ("rms_update", "clip_rate", "step_size", "rms_parameter", "relative_change", "beta2", "skipped")


class Writer(Protocol):
    """What is used of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""


def figures(records: Iterable[Record], which: Iterable[str] = FIGURES) -> dict[str, float]:
    """`{"rms_update/h.0.attn.weight": 0.97, …}`, and for each figure its median and maximum over the parameters.

    A figure that a parameter does not have (NaN) is left out.

    Args:
        records: what `report()` gave.
        which: the figures wanted, by their names in `Record`.
    """
    records, found = list(records), {}
    for name in check_figures(which):
        values = {record.name: float(getattr(record, name)) for record in records}
        known = {key: value for key, value in values.items() if not math.isnan(value)}
        if known:
            found[f"adafactor/{name}_median"] = median(known.values())
            found[f"adafactor/{name}_max"] = max(known.values())
        found.update({f"{name}/{key}": value for key, value in known.items()})
    return found


def to_callback(function: Callable[[dict[str, float], int], object], which: Iterable[str] = FIGURES) -> Sink:
    """A sink that calls `function(figures, step)`.

    Weights & Biases is `to_callback(wandb.log)`, MLflow `to_callback(mlflow.log_metrics)`, and Lightning's loggers
    `to_callback(logger.log_metrics)`: all of them take the dict first and the step second.

    Args:
        function: takes a dict of numbers and the number of the step.
        which: the figures wanted, by their names in `Record`.
    """
    which = check_figures(which)

    def sink(report: Report) -> None:
        function(figures(report.records, which), report.step)

    return sink


def to_tensorboard(writer: Writer, which: Iterable[str] = FIGURES) -> Sink:
    """A sink that writes scalars: `rms_update/<parameter>` and so on, and `adafactor/rms_update_max` for a first look.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or any other with its `add_scalar`.
        which: the figures wanted, by their names in `Record`.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"writer={writer!r} must have `add_scalar`, as a SummaryWriter has; pass a SummaryWriter, not a path"
        )

    def write(values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)

    return to_callback(write, which)


def check_figures(which: Iterable[str]) -> tuple[str, ...]:
    """Refuse what is no figure of a record."""
    which = (which,) if isinstance(which, str) else tuple(which)
    for name in which:
        if name not in ALL_FIGURES:
            raise ValueError(f"which={name!r} must be of {', '.join(map(repr, ALL_FIGURES))}")
    return which
