"""A live table in the terminal, a row for each kind of layer, the interesting ones first; elsewhere a line a report."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from adafactor.core.record import Record
from adafactor.diagnostics.findings import diagnose
from adafactor.diagnostics.naming import group_with_title
from adafactor.diagnostics.report import Report, known_values

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

AROUND = 8  # lines that a table takes besides its rows


class Live:
    """Shows every report that a `Watch` hands it; `pip install "rich>=14.1"` brings what it needs.

    In a terminal it is a table that updates in place; in a file it is one line per report, and the table at the end.
    What `diagnose` says of the last ten reports stands below the table.

    Args:
        console: a `rich.console.Console`, to write elsewhere than to the standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Show nothing before the first report."""
        try:
            from rich import get_console
        except ImportError as missing:
            raise ImportError('the live table needs rich: `pip install "rich>=14.1"` brings it') from missing
        # by default that of rich's progress bars, so that the two know of each other
        self.console = get_console() if console is None else console
        self._recent: deque[Report] = deque(maxlen=10)
        self._live: Any = None

    def __call__(self, report: Report) -> None:
        """Show a report."""
        self._recent.append(report)
        if not self.console.is_terminal:
            self.console.print(summarize(report), soft_wrap=True, highlight=False, markup=False)
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
        elif self._recent:
            self.console.print(self._view())
        self._recent.clear()

    def _view(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        findings = diagnose(self._recent)
        heads = [f"{'!' if f.severity == 'warning' else '-'} {f.kind}: {f.where}" for f in findings[:4]]
        if len(findings) > 4:
            heads.append(f"... and {len(findings) - 4} more: print(*diagnose(optimizer))")
        room = self.console.height - AROUND - len(heads) if self.console.is_terminal else 1000
        lines = [Text(head, no_wrap=True, overflow="crop") for head in heads]
        return Group(table(self._recent[-1], self.console.width, max(room, 3)), *lines)


def rows(report: Report) -> tuple[str, dict[str, list[Record]]]:
    """Return a title, and records by kind of layer: skipped steps first, then those whose RMS(U) is far from 1."""
    title, kinds = group_with_title(report.records)
    order = sorted(kinds, key=lambda kind: (not any(r.skipped for r in kinds[kind]), -max(map(_distance, kinds[kind]))))
    return f"step {report.step}: {title}", {kind: kinds[kind] for kind in order}


def table(report: Report, width: int = 80, most: int = 1000) -> Table:
    """Show a report as a table of at most so many rows."""
    from rich.table import Table
    from rich.text import Text

    hidden = set() if width >= 100 else {"step size", "RMS(X)"}
    if not any(record.skipped for record in report.records):
        hidden.add("skipped")
    columns = [column for column in COLUMNS if column not in hidden]
    title, kinds = rows(report)
    cells = {label: [COLUMNS[column](kinds[label]) for column in columns] for label in list(kinds)[:most]}
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("parameter", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    room = width - 1 - sum(1 + max(map(len, column)) for column in zip(columns, *cells.values(), strict=True))
    for label, texts in cells.items():
        alarming = any(record.skipped or _distance(record) >= 2 for record in kinds[label])
        table.add_row(*map(Text, [_cut(label, room), *texts]), style="bold red" if alarming else None)
    if len(kinds) > most:
        table.add_row(Text(f"+ {len(kinds) - most} more kinds", style="dim"))
    return table


def summarize(report: Report) -> str:
    """Show a report in one line."""
    known = [record for record in report.records if not math.isnan(record.rms_update)]
    if not known:
        return f"step {report.step}: no parameter has been stepped"
    top = max(known, key=lambda record: record.rms_update)
    middle = median(record.rms_update for record in known)
    parts = [f"RMS(U) {_plain(middle)} in the median, {_plain(top.rms_update)} in {top.name}"]
    if rates := known_values(known, "clip_rate"):
        parts.append(f"clipped {sum(rates.values()) / len(rates):.0%}")
    if changes := known_values(known, "relative_change"):
        parts.append(f"change {median(changes.values()):.1e} a step")
    if skipped := sum(record.skipped > 0 for record in report.records):
        parts.append(f"{skipped} parameters with skipped steps")
    return f"step {report.step}: {'; '.join(parts)}"


def _distance(record: Record) -> float:
    """Return how far RMS(U) is from 1, in powers of two; less than nothing where there is none."""
    if math.isnan(record.rms_update):
        return -1.0
    return abs(math.log2(record.rms_update)) if 0 < record.rms_update < math.inf else math.inf


def _farthest(records: list[Record]) -> str:
    """Return the numbers of the layer whose RMS(U) is farthest from 1, where there are several layers."""
    name = max(records, key=_distance).name if len(records) > 1 else ""
    return ".".join(part for part in name.split(".") if part.isdigit())


def _span(records: list[Record], metric: str, form: Callable[[float], str], unit: str = "") -> str:
    """Write `0.81/1.32`, or one number where both would look the same."""
    values = known_values(records, metric).values()
    if not values:
        return "-"
    low, high = form(min(values)), form(max(values))
    return (low if low == high else f"{low}/{high}") + unit


def _plain(value: float) -> str:
    """Write two decimals, as long as these say something."""
    return f"{value:.2f}" if value == 0 or 0.095 <= value < 100 else _power(value)


def _power(value: float) -> str:
    """Write one digit and its power of ten: `1e-3`."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")


def _cut(text: str, room: int) -> str:
    """Cut a name in its middle: names differ at their ends."""
    room = max(room, 12)
    return text if len(text) <= room else f"{text[: room // 3]}...{text[-(room - room // 3 - 3) :]}"


COLUMNS: dict[str, Callable[[list[Record]], str]] = {  # what stands in the row of a kind of layer
    "": lambda records: f"x{len(records)}" if len(records) > 1 else "",
    "RMS(U)": lambda records: _span(records, "rms_update", _plain),
    "at": _farthest,
    "clipped": lambda records: _span(records, "clip_rate", lambda rate: f"{100 * rate:.0f}", "%"),
    "change": lambda records: _span(records, "relative_change", _power),
    "step size": lambda records: _span(records, "step_size", _power),
    "RMS(X)": lambda records: _span(records, "rms_parameter", _power),
    "skipped": lambda records: _span(records, "skipped", lambda count: f"{count:.0f}"),
}
