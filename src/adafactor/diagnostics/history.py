"""The reports of a run, one after another: kept in memory, as JSON lines, and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any

from adafactor.core.record import Record
from adafactor.core.settings import Settings
from adafactor.diagnostics.report import About, Report

DIGITS = 6  # significant, of a figure in a file
FLOATS = [field.name for field in fields(Record) if field.type == "float"]
INTEGERS = ["steps", "skipped", "state_bytes"]


class History:
    """Collects the reports that a `Watch` hands it.

    Args:
        path: a file to which each report is added as it comes, so that a run that dies leaves its history. If the
            file is there already, as after a resume, it is continued; `History.load` reads it all.

    Examples:
        >>> history = History()
        >>> with Watch(optimizer, history, every=50):
        ...     train()
        >>> history.plot("rms.png")
        >>> print(*diagnose(history))
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Begin empty."""
        self.reports: list[Report] = []
        self.path = None if path is None else Path(path)
        self._written: dict[str, Any] | None = None

    def __call__(self, report: Report) -> None:
        """Add a report. One of a step that was seen before, as after a resume, takes the place of what came after."""
        while self.reports and report.step and self.reports[-1].step >= report.step:
            self.reports.pop()
        self.reports.append(report)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                self._write(report, stream)

    def __iter__(self) -> Iterator[Report]:
        """The reports, first to last."""
        return iter(self.reports)

    def __len__(self) -> int:
        """How many reports there are."""
        return len(self.reports)

    def save(self, path: str | Path) -> None:
        """Write the reports as JSON lines, figures with six digits."""
        self._written = None
        with Path(path).open("w", encoding="utf-8") as stream:
            for report in self.reports:
                self._write(report, stream)

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read what `save` wrote, or a run with a `path`. A last line that was cut off is left out.

        Raises:
            ValueError: the file is not of this kind; the line is named.
        """
        history, parameters = cls(), _Parameters()
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, start=1):
            if number == len(lines):  # empty, or the line that a run was writing when it died
                break
            try:
                found = json.loads(line)
                if "parameters" in found:
                    parameters = _Parameters(**found)
                else:
                    history(parameters.report(found))
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as wrong:
                raise ValueError(f"{path}, line {number}, is no part of a history: {wrong!r}") from wrong
        return history

    def plot(self, path: str | Path, figure: str = "rms_update") -> None:
        """Draw a figure of every parameter over time; `pip install matplotlib` brings what it needs.

        Args:
            path: the picture's file, whose ending says its kind: .png, .svg, .pdf.
            figure: `"rms_update"`, `"clip_rate"`, `"relative_change"`, `"step_size"` or `"rms_parameter"`.
        """
        from adafactor.diagnostics.plot import draw

        draw(self.reports, path, figure)

    def _write(self, report: Report, stream: IO[str]) -> None:
        about = _Parameters.line(report)
        if about != self._written:  # said once, and again when it changes
            self._written = about
            stream.write(json.dumps(about) + "\n")
        line: dict[str, Any] = {"step": report.step, "loss": None if report.loss is None else _number(report.loss)}
        for name in FLOATS:
            line[name] = [_number(getattr(record, name)) for record in report.records]
        for name in INTEGERS:
            line[name] = [getattr(record, name) for record in report.records]
        stream.write(json.dumps(line) + "\n")


class _Parameters:
    """The line before the reports that it is true of: what the columns are about."""

    def __init__(
        self,
        parameters: list[dict[str, Any]] | None = None,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        known = {field.name for field in fields(Settings)}
        settings = [Settings(**{key: _given(group[key]) for key in group if key in known}) for group in groups or []]
        self.named = [(str(one["name"]), tuple(map(int, one["shape"]))) for one in parameters or []]
        self.about = {
            one["name"]: About(str(one["dtype"]), bool(one["trainable"]), settings[one["group"]])
            for one in parameters or []
            if "group" in one
        }

    @staticmethod
    def line(report: Report) -> dict[str, Any]:
        """What is to be written for a report's parameters."""
        groups: list[dict[str, Any]] = []
        indices: dict[Settings, int] = {}
        parameters = []
        for record in report.records:
            one: dict[str, Any] = {"name": record.name, "shape": list(record.shape)}
            if about := report.about.get(record.name):
                if about.settings not in indices:
                    indices[about.settings] = len(groups)
                    groups.append(asdict(about.settings))
                    del groups[-1]["lr"]  # changes with every step of a scheduler; αₜ is in the records
                one |= {"dtype": about.dtype, "trainable": about.trainable, "group": indices[about.settings]}
            parameters.append(one)
        return {"parameters": parameters, "groups": groups}

    def report(self, line: dict[str, Any]) -> Report:
        """A report from its line."""
        columns = [[float(value) for value in line[name]] for name in FLOATS]
        columns += [[int(value) for value in line[name]] for name in INTEGERS]
        records = []
        for (name, shape), *values in zip(self.named, *columns, strict=True):
            figures: dict[str, Any] = dict(zip([*FLOATS, *INTEGERS], values, strict=True))
            records.append(Record(name=name, shape=shape, **figures))
        loss = line.get("loss")
        return Report(int(line["step"]), tuple(records), self.about, None if loss is None else float(loss))


def _number(value: float) -> float | str:
    """With as many digits as are worth keeping; NaN and infinity as text, since JSON has no such numbers."""
    text = f"{value:.{DIGITS}g}"
    return float(text) if value - value == 0 else text


def _given(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
