"""`diagnose`: what the rules say of all parameters, those with the same advice in one `Finding`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

from adafactor.core.record import Record
from adafactor.diagnostics.naming import shorten
from adafactor.diagnostics.report import Report
from adafactor.diagnostics.rules import RULES, Hit, loss_grows
from adafactor.diagnostics.series import Parameter, group_by_parameter


@dataclass(frozen=True)
class Finding:
    """Something that the metrics show; `str()` of it is to be read.

    Attributes:
        kind: `"out of date"`, `"lost to rounding"` and so on, for programs.
        severity: `"warning"`: it costs quality; `"note"`: it may be meant.
        what: what is wrong, in a sentence.
        parameters: the names of all that it is true of.
        where: the same in short.
        figure: the numbers that show it, of the worst of them.
        certainty: `"certain"`: counted or proved; `"likely"`; `"possible"`: of few reports, or seen now and then.
        change: what to do about it.
    """

    kind: str
    severity: str
    what: str
    parameters: tuple[str, ...]
    where: str
    figure: str
    certainty: str
    change: str

    def __str__(self) -> str:
        """Write four short paragraphs."""
        lines = [f"{self.severity}: {self.what}", f"where: {self.where}"]
        lines += [f"figure: {self.figure} ({self.certainty})", f"change: {self.change}"]
        return "\n  ".join(fill(line, 110, subsequent_indent="    ", break_long_words=False) for line in lines)


def diagnose(source: object, losses: Iterable[float] | None = None) -> list[Finding]:
    """Say in words what the reports show; an empty list is no promise that all is well.

    Args:
        source: the optimizer (of which a report is taken, so that clip rates start anew), a `History` or any other
            series of `Report`, one `Report`, or what `optimizer.report()` gave, once or several times. One report says
            less than several; plain records, which do not know dtypes and settings, less than a `Report`.
        losses: one a step, or now and then, in order; without them, those that `Watch.add_loss` gave to the reports.
    """
    reports = reports_of(source)
    parameters = group_by_parameter(reports)
    losses = [report.loss for report in reports if report.loss is not None] if losses is None else losses
    findings = []
    if hit := loss_grows([float(loss) for loss in losses]):
        where = "the whole model"
        findings.append(Finding("loss grows", hit.severity, hit.what, (), where, hit.figure, hit.certainty, hit.change))
    groups: dict[tuple[str, ...], dict[str, Hit]] = {}  # of parameters for which the same is to be done, by name
    for kind, rule in RULES.items():
        for p in parameters:
            if hit := rule(p):
                groups.setdefault((kind, hit.severity, hit.what, hit.change), {})[p.name] = hit
    findings += [_finding(kind, hits, parameters) for (kind, *_), hits in groups.items()]
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def _finding(kind: str, hits: dict[str, Hit], parameters: list[Parameter]) -> Finding:
    """Put what a rule says of several parameters into one."""
    name, worst = max(hits.items(), key=lambda pair: pair[1].weight)
    where, figure = shorten(hits, [p.records[-1] for p in parameters]), worst.figure
    if len(hits) > 1:
        where = f"{len(hits)} of {len(parameters)} tensors: {where}"
        figure += f", the worst of them ({name})"
    certainty = max((hit.certainty for hit in hits.values()), key=("possible", "likely", "certain").index)
    return Finding(kind, worst.severity, worst.what, tuple(hits), where, figure, certainty, worst.change)


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
