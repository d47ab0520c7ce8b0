"""Metrics for loggers: TensorBoard, and any function that takes a dict of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from adafactor.core.report import Record, Report
from adafactor.diagnostics.watch import Sink

METRICS = ("rms_update", "clip_rate", "relative_change")  # unless others are asked for
ALL_METRICS = ("rms_update", "clip_rate", "step_size", "rms_parameter", "relative_change", "beta2", "skipped")


def figures(records: Iterable[Record], which: Iterable[str] = METRICS) -> dict[str, float]:
    """Return `{"rms_update/h.0.attn.weight": 0.97, …}`, and each metric's median and maximum over the parameters.

    A metric that a parameter does not have (NaN) is left out.

    Args:
        records: what `report()` gave.
        which: the metrics wanted, by their names in `Record`.
    """
    records, values = list(records), {}
    for metric in _check(which):
        measured = {record.name: float(getattr(record, metric)) for record in records}
        if known := {name: value for name, value in measured.items() if not math.isnan(value)}:
            values[f"adafactor/{metric}_median"] = median(known.values())
            values[f"adafactor/{metric}_max"] = max(known.values())
            values.update({f"{metric}/{name}": value for name, value in known.items()})
    return values


def to_callback(function: Callable[[dict[str, float], int], object], which: Iterable[str] = METRICS) -> Sink:
    """Make a sink that calls `function(figures, step)`.

    Weights & Biases is `to_callback(wandb.log)`, MLflow `to_callback(mlflow.log_metrics)`, and Lightning's loggers
    `to_callback(logger.log_metrics)`: all of them take the dict first and the step second.

    Args:
        function: takes a dict of numbers and the number of the step.
        which: the metrics wanted, by their names in `Record`.
    """
    which = _check(which)

    def sink(report: Report) -> None:
        function(figures(report, which), report.step)

    return sink


def to_tensorboard(writer: Any, which: Iterable[str] = METRICS) -> Sink:
    """Make a sink that writes `rms_update/<parameter>` and so on, and `adafactor/rms_update_max` for a first look.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or any other with its `add_scalar`.
        which: the metrics wanted, by their names in `Record`.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"writer={writer!r} must have `add_scalar`, as a SummaryWriter has; pass a SummaryWriter, not a path"
        )

    def write(values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)

    return to_callback(write, which)


def _check(which: Iterable[str]) -> tuple[str, ...]:
    """Refuse what is no metric of a record."""
    which = (which,) if isinstance(which, str) else tuple(which)
    for name in which:
        if name not in ALL_METRICS:
            raise ValueError(f"which={name!r} must be of {', '.join(map(repr, ALL_METRICS))}")
    return which
