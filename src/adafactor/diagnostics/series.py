"""Reports turned round: one parameter through all of them, and what can be said of it without judging it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from adafactor.core.record import Record
from adafactor.core.settings import Settings
from adafactor.diagnostics.report import About, Report

LARGE = 64  # elements; RMS(U) of a smaller tensor is the mean of too few to say much (§5: "a large weight matrix")


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter through all reports."""

    name: str
    shape: tuple[int, ...]
    steps: tuple[int, ...]  # t of each record
    records: tuple[Record, ...]
    about: About | None
    everyone: list[Parameter]  # all parameters, this one among them

    @cached_property
    def stepped(self) -> list[Record]:
        """The records of a time in which it was stepped: the others repeat old metrics, which a single one may."""
        single = len(self.records) == 1
        return [r for r in self.records if r.steps or (single and not math.isnan(r.rms_update))]

    @cached_property
    def latest(self) -> list[Record]:
        """The last quarter of these, at least two: all of them have a fault that began in the middle of a run."""
        return self.stepped[-max(2, math.ceil(len(self.stepped) / 4)) :]

    @cached_property
    def taken(self) -> int:
        """The number of steps in all reports."""
        return sum(record.steps for record in self.records)

    @cached_property
    def large_matrix(self) -> bool:
        """Is it a matrix, or a tensor of more axes, whose metrics are means of enough elements?"""
        return len(self.shape) > 1 and self.count >= LARGE

    @cached_property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def settings(self) -> Settings:
        """The settings of its group; the defaults if nothing is known of it."""
        return self.about.settings if self.about else Settings()

    @property
    def clipped(self) -> bool:
        """Is clipping known to be on?"""
        return self.about is not None and self.settings.clip is not None

    @property
    def averaged(self) -> bool:
        """Is U made of an average of gradients, so that its RMS is below 1 by right?"""
        return bool(self.settings.beta1) and self.settings.momentum_of == "gradient"

    @property
    def scale(self) -> float:
        """The RMS of a matrix whose outputs are as large as its inputs, for as many inputs as its smaller side has.

        A matrix that starts at zero is measured by this: whatever it does is much of itself.
        """
        return math.sqrt(max(self.shape) / self.count)

    def values(self, metric: str) -> list[float]:
        """Return a metric of every report in which it was stepped."""
        return [getattr(record, metric) for record in self.stepped]

    def middle(self, metric: str) -> float:
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


def reports_of(source: object) -> list[Report]:
    """Return the reports that an optimizer, a `History`, a report or records stand for."""
    if isinstance(source, Report):
        return [source]
    if hasattr(source, "param_groups"):
        return [Report.of(source)]
    if not isinstance(source, Iterable):
        raise TypeError(f"source={source!r} must be an optimizer, a History, or reports, not {type(source).__name__}")
    items = list(source)
    if items and all(isinstance(item, Record) for item in items):
        items = [items]
    return [item if isinstance(item, Report) else Report(0, _records(item)) for item in items]


def _records(items: object) -> tuple[Record, ...]:
    records = tuple(items) if isinstance(items, Iterable) else (items,)
    if not all(isinstance(record, Record) for record in records):
        raise TypeError(f"a report must be a Report or a list of records, as optimizer.report() gives, not {items!r}")
    return records


def turn(reports: Iterable[Report]) -> list[Parameter]:
    """Turn the reports round: each parameter with all its records."""
    series: dict[str, list[tuple[int, Record]]] = {}
    about: dict[str, About] = {}
    for report in reports:
        about.update(report.about)
        for record in report.records:
            series.setdefault(record.name, []).append((report.step, record))
    parameters: list[Parameter] = []
    for name, pairs in series.items():
        steps, records = zip(*pairs, strict=True)
        parameters.append(Parameter(name, records[-1].shape, steps, records, about.get(name), parameters))
    return parameters
