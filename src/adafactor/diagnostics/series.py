"""Reports turned round: one parameter through all of them, and what can be said of it without judging it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from adafactor.core.report import Record, Report

LARGE = 64  # elements; RMS(U) of a smaller tensor is the mean of too few to say much (§5: "a large weight matrix")


class Parameter:
    """One parameter through all reports: its records, with `stepped` those that the metrics are read from."""

    def __init__(self, records: list[Record], t: int, everyone: list[Parameter]) -> None:
        """Take its records, the step of the last one, and all parameters, it among them."""
        self.records, self.t, self.everyone = records, t, everyone
        last = records[-1]
        self.name, self.shape, self.settings = last.name, last.shape, last.settings
        self.dtype, self.trainable = str(last.dtype).removeprefix("torch."), last.trainable
        self.count = math.prod(self.shape)
        # its metrics are means of enough elements; tensors of more axes are matrices, too
        self.large_matrix = len(self.shape) > 1 and self.count >= LARGE
        # The RMS of a matrix whose outputs are as large as its inputs, for as many inputs as its smaller side has.
        # A matrix that starts at zero is measured by this: whatever it does is much of itself.
        self.scale = math.sqrt(max(self.shape) / self.count) if self.large_matrix else math.nan
        self.stepped = [record for record in records if record.steps]  # records of a time without steps repeat old ones
        # the last quarter, at least two: all of them have a fault that began in the middle of a run
        self.latest = self.stepped[-max(2, math.ceil(len(self.stepped) / 4)) :]
        self.taken = sum(record.steps for record in records)  # steps in all reports
        self.clipped = self.settings.clip is not None
        # U is made of an average of gradients, so that its RMS is below 1 by right
        self.averaged = bool(self.settings.beta1) and self.settings.momentum_of == "gradient"

    def values(self, metric: str) -> list[float]:
        """Return a metric of every report in which it was stepped."""
        return [getattr(record, metric) for record in self.stepped]

    def median(self, metric: str) -> float:
        """Return the median of a metric over the reports; NaN without any."""
        values = self.values(metric)
        return median(values) if values and not any(map(math.isnan, values)) else math.nan

    def seen(self, reports: int) -> str:
        """Say in how many of the reports something was so."""
        total = len(self.stepped)
        return "at the last step" if total == 1 else f"in {reports} of {total} reports"

    def certainty(self, reports: int) -> str:
        """Return how certain it is what so many of the reports show."""
        total = len(self.stepped)
        return "likely" if total >= 5 and reports >= min(3, total / 2) else "possible"


def group_by_parameter(reports: Iterable[Report]) -> list[Parameter]:
    """Turn the reports round: each parameter with all its records."""
    records: dict[str, list[Record]] = {}
    last: dict[str, int] = {}
    for report in reports:
        for record in report:
            records.setdefault(record.name, []).append(record)
            last[record.name] = report.step
    everyone: list[Parameter] = []
    everyone += [Parameter(records[name], last[name], everyone) for name in records]
    return everyone
