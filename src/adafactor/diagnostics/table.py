"""A live table in the terminal, a row for each kind of layer, the interesting ones first; elsewhere a line a report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from adafactor.core.record import Record
from adafactor.diagnostics.naming import common_prefix, grouped, numbers
from adafactor.diagnostics.report import Report
from adafactor.diagnostics.words import Finding, diagnose

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

WIDE = 100  # columns from which on step sizes and RMS(X) are shown too
AROUND = 8  # lines that a table takes besides its rows


class Live:
    """Shows every report that a `Watch` hands it; `pip install "rich>=14.1"` brings what it needs.

    In a terminal a table that stays in its place; where the output goes to a file, one line a report and the table at
    the end. What `diagnose` says of the last ten reports stands below the table.

    Args:
        console: a `rich.console.Console`, to write elsewhere than to the standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Nothing is shown before the first report."""
        self.console = _console() if console is None else console
        self._recent: list[Report] = []
        self._live: Any = None

    def __call__(self, report: Report) -> None:
        """Show a report."""
        self._recent = [*self._recent, report][-10:]
        if not self.console.is_terminal:
            self.console.print(summary(report), soft_wrap=True, highlight=False, markup=False)
            return
        if self._live is None:
            from rich.live import Live as RichLive

            self._live = RichLive(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(self._view(), refresh=True)

    def close(self) -> None:
        """Leave the last table where it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._recent and not self.console.is_terminal:
            self.console.print(self._view())
        self._recent = []

    def _view(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        findings = diagnose(self._recent)
        lines = [Text(_headline(f), no_wrap=True, overflow="crop") for f in findings[:4]]
        if len(findings) > 4:
            lines.append(Text(f"... and {len(findings) - 4} more: print(*diagnose(optimizer))"))
        room = self.console.height - AROUND - len(lines) if self.console.is_terminal else 1000
        return Group(table(self._recent[-1], self.console.width, max(room, 3)), *lines)


@dataclass(frozen=True)
class Row:
    """A kind of layer: parameters whose names differ in their numbers only."""

    label: str
    records: list[Record]

    def values(self, figure: str) -> list[float]:
        """A figure of each parameter that has it."""
        found = [float(getattr(record, figure)) for record in self.records]
        return [value for value in found if not math.isnan(value)]

    @property
    def interest(self) -> tuple[bool, float]:
        """Rows with skipped steps come first, then those whose RMS(U) is farthest from 1, up or down."""
        return any(record.skipped for record in self.records), max(map(_far, self.records))

    @property
    def farthest(self) -> str:
        """The numbers of the layer whose RMS(U) is farthest from 1, where there are several layers."""
        return ".".join(map(str, numbers(max(self.records, key=_far).name))) if len(self.records) > 1 else ""


def _far(record: Record) -> float:
    """How far RMS(U) is from 1, in powers of two; less than nothing where there is none."""
    if math.isnan(record.rms_update):
        return -1.0
    return abs(math.log2(record.rms_update)) if 0 < record.rms_update < math.inf else math.inf


def rows(report: Report) -> list[Row]:
    """The report's parameters by kind of layer, the interesting first."""
    by_name = {record.name: record for record in report.records}
    kinds = grouped((record.name, record.shape) for record in report.records)
    found = [Row(label, [by_name[name] for name in names]) for label, names in kinds.items()]
    return sorted(found, key=lambda row: row.interest, reverse=True)


def table(report: Report, width: int = 80, most: int = 1000) -> Table:
    """A report as a table of at most so many rows. Of several layers, the smallest and the largest figure."""
    from rich.table import Table
    from rich.text import Text

    found = rows(report)
    shown, left = found[:most], len(found) - most
    columns: dict[str, list[str]] = {
        "": [f"x{len(row.records)}" if len(row.records) > 1 else "" for row in shown],
        "RMS(U)": [_span(row.values("rms_update"), _plain) for row in shown],
        "at": [row.farthest for row in shown],
        "clipped": [_span(row.values("clip_rate"), lambda rate: f"{100 * rate:.0f}", "%") for row in shown],
        "change": [_span(row.values("relative_change"), _power) for row in shown],
    }
    if width >= WIDE:
        columns["step size"] = [_span(row.values("step_size"), _power) for row in shown]
        columns["RMS(X)"] = [_span(row.values("rms_parameter"), _power) for row in shown]
    if any(record.skipped for record in report.records):
        columns["skipped"] = [_span(row.values("skipped"), lambda count: f"{count:.0f}") for row in shown]
    prefix = common_prefix(record.name for record in report.records)
    title = f"step {report.step}: {len(report.records)} tensors" + (f" of {prefix.rstrip('.')}" if prefix else "")
    made = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    made.add_column("parameter", no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    room = width - 1 - sum(1 + max(map(len, [column, *cells])) for column, cells in columns.items())
    for i, row in enumerate(shown):
        styles = {"RMS(U)": _colour(row.values("rms_update")), "skipped": "bold red" if row.interest[0] else ""}
        cells = [Text(cells[i], style=styles.get(column, "")) for column, cells in columns.items()]
        made.add_row(Text(_middle_cut(row.label.removeprefix(prefix), room)), *cells)
    if left > 0:
        made.add_row(Text(f"+ {left} more kinds", style="dim"))
    return made


def summary(report: Report) -> str:
    """A report in one line."""
    known = [record for record in report.records if not math.isnan(record.rms_update)]
    if not known:
        return f"step {report.step}: no parameter has been stepped"
    top = max(known, key=lambda record: record.rms_update)
    rates = [record.clip_rate for record in known if not math.isnan(record.clip_rate)]
    changes = [record.relative_change for record in known if not math.isnan(record.relative_change)]
    middle = median(record.rms_update for record in known)
    parts = [f"RMS(U) {_plain(middle)} in the median, {_plain(top.rms_update)} in {top.name}"]
    parts += [f"clipped {sum(rates) / len(rates):.0%}"] if rates else []
    parts += [f"change {median(changes):.1e} a step"] if changes else []
    skipped = sum(record.skipped > 0 for record in report.records)
    parts += [f"{skipped} parameters with skipped steps"] if skipped else []
    return f"step {report.step}: {'; '.join(parts)}"


def _headline(finding: Finding) -> str:
    return f"{'!' if finding.severity == 'warning' else '-'} {finding.kind}: {finding.where}"


def _span(values: list[float], form: Callable[[float], str], unit: str = "") -> str:
    """`0.81/1.32`, or one number where both would look the same."""
    if not values:
        return "-"
    low, high = form(min(values)), form(max(values))
    return (low if low == high else f"{low}/{high}") + unit


def _plain(value: float) -> str:
    """With two decimals, as long as these say something."""
    return f"{value:.2f}" if value == 0 or 0.095 <= value < 100 else _power(value)


def _power(value: float) -> str:
    """One digit and its power of ten: `1e-3`."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")


def _colour(values: list[float]) -> str:
    if not values or (0.25 < min(values) and max(values) < 2):
        return ""
    return "bold red" if max(values) >= 4 else "yellow"


def _middle_cut(text: str, room: int) -> str:
    """Cut out of the middle: names differ at their ends."""
    room = max(room, 12)
    if len(text) <= room:
        return text
    return f"{text[: room // 3]}...{text[-(room - room // 3 - 3) :]}"


def _console() -> Console:
    try:
        from rich import get_console
    except ImportError as missing:
        raise ImportError('the live table needs rich: `pip install "rich>=14.1"` brings it') from missing
    return get_console()  # that of rich's progress bars, so that the two know of each other
