"""The reports of a run, one after another: in memory, as JSON lines, and drawn.

A file has two kinds of lines: what is true of many reports (names, shapes, dtypes and settings of the parameters), and
a report, which has one list per metric, in the order of the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import IO, Any

from adafactor.core.record import Record
from adafactor.core.settings import Settings
from adafactor.diagnostics.report import About, Report

DIGITS = 6  # significant, of a number in a file
BEGINNING = b'{"parameters": '  # of a file
COLUMNS = fields(Record)[2:-1]  # all but the name, the shape and the rule
Member = partial[Record]  # has a parameter's name, shape and rule, and takes the rest


class History:
    """Collects the reports that a `Watch` hands it.

    Args:
        path: a file to which each report is added as it comes, so that a run that dies leaves its history. If the
            file is there already, as after a resume, it is continued; `History.load` reads it all.

    Raises:
        ValueError: there is a file of another kind at `path`.

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
        self._header: dict[str, Any] = {}  # the last one written
        if self.path is not None and self.path.exists():
            _check_beginning(self.path)

    def __call__(self, report: Report) -> None:
        """Add a report. One of a step that was seen before, as after a resume, takes the place of what came after."""
        while self.reports and report.step and self.reports[-1].step >= report.step:
            self.reports.pop()
        self.reports.append(report)
        if self.path is not None:
            if not self._header and self.path.exists():
                _drop_unfinished_line(self.path)
            with self.path.open("a", encoding="utf-8") as stream:
                self._write(report, stream)

    def __iter__(self) -> Iterator[Report]:
        """Go through the reports, first to last."""
        return iter(self.reports)

    def __len__(self) -> int:
        """Return how many reports there are."""
        return len(self.reports)

    def save(self, path: str | Path) -> None:
        """Write the reports as JSON lines, numbers with six digits."""
        self._header = {}
        with Path(path).open("w", encoding="utf-8") as stream:
            for report in self.reports:
                self._write(report, stream)

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read what `save` wrote, or a run with a `path`. A last line that was cut off is left out.

        Raises:
            ValueError: the file is not of this kind; the line is named.
        """
        history = cls()
        members: list[Member] = []
        about: dict[str, About] = {}
        # what follows the last line feed is empty, or the line that a run was writing when it died
        for number, text in enumerate(Path(path).read_text(encoding="utf-8").split("\n")[:-1], start=1):
            try:
                line = json.loads(text)
                if "parameters" in line:
                    members, about = _read_header(line)
                else:
                    history(_read_report(line, members, about))
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as wrong:
                raise ValueError(f"{path}, line {number}, is no part of a history: {wrong!r}") from wrong
        return history

    def plot(self, path: str | Path, figure: str = "rms_update") -> None:
        """Draw a metric of every parameter over time; `pip install matplotlib` brings what it needs.

        Args:
            path: the picture's file, whose ending says its kind: .png, .svg, .pdf.
            figure: `"rms_update"`, `"clip_rate"`, `"relative_change"`, `"step_size"` or `"rms_parameter"`.
        """
        try:
            from adafactor.diagnostics.plot import draw
        except ImportError as missing:
            raise ImportError("the plot needs matplotlib: `pip install matplotlib` brings it") from missing
        draw(self.reports, path, figure)

    def _write(self, report: Report, stream: IO[str]) -> None:
        header = _header(report)
        if header != self._header:  # said once, and again when it changes
            self._header = header
            stream.write(json.dumps(header) + "\n")
        line: dict[str, Any] = {"step": report.step, "loss": _rounded(report.loss)}
        line |= {field.name: [_rounded(getattr(record, field.name)) for record in report.records] for field in COLUMNS}
        stream.write(json.dumps(line) + "\n")


def _check_beginning(path: Path) -> None:
    """Refuse to continue a file of another kind; one that a run had only begun is a history."""
    with path.open("rb") as stream:
        if not BEGINNING.startswith(stream.read(len(BEGINNING))):
            raise ValueError(f"{path} is there already and is no history, so it cannot be continued")


def _drop_unfinished_line(path: Path) -> None:
    """Remove what a run that died was writing, so that the next line does not continue it."""
    with path.open("rb+") as stream:
        stream.truncate(stream.read().rfind(b"\n") + 1)


def _header(report: Report) -> dict[str, Any]:
    """Return what is true of many reports, with the settings of each group once."""
    groups: dict[Settings, int] = {}
    parameters = []
    for record in report.records:
        one: dict[str, Any] = {"name": record.name, "shape": list(record.shape)}
        one |= {"rule": record.rule} if record.rule else {}
        if about := report.about.get(record.name):
            group = groups.setdefault(about.settings, len(groups))
            one |= {"dtype": about.dtype, "trainable": about.trainable, "group": group}
        parameters.append(one)
    # lr changes with every step of a scheduler; αₜ is in the records
    settings = [{key: value for key, value in asdict(group).items() if key != "lr"} for group in groups]
    return {"parameters": parameters, "groups": settings}


def _read_header(header: dict[str, Any]) -> tuple[list[Member], dict[str, About]]:
    settings = [Settings.of(group) for group in header.get("groups", [])]
    members, about = [], {}
    for one in header["parameters"]:
        name, shape = str(one["name"]), tuple(map(int, one["shape"]))
        members.append(partial(Record, name, shape, rule=str(one.get("rule", ""))))
        if "group" in one:
            about[name] = About(str(one["dtype"]), bool(one["trainable"]), settings[one["group"]])
    return members, about


def _read_report(line: dict[str, Any], members: list[Member], about: dict[str, About]) -> Report:
    columns = [map(int if field.type == "int" else float, line[field.name]) for field in COLUMNS]
    records = tuple(member(*metrics) for member, *metrics in zip(members, *columns, strict=True))
    loss = line.get("loss")
    return Report(int(line["step"]), records, about, None if loss is None else float(loss))


def _rounded(value: float | None) -> float | str | None:
    """Keep as many digits as are worth it; write NaN and infinity as text, since JSON has no such numbers."""
    if value is None or isinstance(value, int):
        return value
    text = f"{value:.{DIGITS}g}"
    return float(text) if math.isfinite(value) else text
