"""From figures to words: what is wrong, with which parameters, how sure that is, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

from adafactor.core.record import Record
from adafactor.diagnostics.naming import Named, shortened
from adafactor.diagnostics.report import About, Report
from adafactor.diagnostics.rules import RULES, Hit, Parameter, loss_grows


@dataclass(frozen=True)
class Finding:
    """Something that the figures show; `str()` of it is to be read.

    Attributes:
        kind: `"out of date"`, `"lost to rounding"` and so on, for programs.
        severity: `"warning"`: it costs quality; `"note"`: it may be meant.
        what: what is wrong, in a sentence.
        parameters: the names of all that it is true of.
        where: the same in short.
        figure: of the worst of them.
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
        """Four short paragraphs."""
        lines = [f"{self.severity}: {self.what}", f"where: {self.where}"]
        lines += [f"figure: {self.figure} ({self.certainty})", f"change: {self.change}"]
        first, *rest = [fill(line, 110, subsequent_indent="    ", break_long_words=False) for line in lines]
        return "\n".join([first, *("  " + line for line in rest)])


def diagnose(source: object, losses: Iterable[float] | None = None) -> list[Finding]:
    """Tell in words what the reports show; an empty list if nothing is found, which is no promise that all is well.

    Args:
        source: the optimizer (of which a report is taken, so that clip rates start anew), a `History` or any other
            series of `Report`, one `Report`, or what `optimizer.report()` gave, once or several times. One report says
            less than several; plain records, which do not know dtypes and settings, less than a `Report`.
        losses: one a step, or now and then, in order; without them, those that `Watch.add_loss` gave to the reports.
    """
    reports = _reports(source)
    parameters = _parameters(reports)
    named: list[Named] = [(p.name, p.shape) for p in parameters]
    losses = [report.loss for report in reports if report.loss is not None] if losses is None else losses
    findings = []
    if hit := loss_grows([float(loss) for loss in losses]):
        where = "the whole model"
        findings.append(Finding("loss grows", hit.severity, hit.what, (), where, hit.figure, hit.certainty, hit.change))
    for kind, rule in RULES.items():
        # parameters for which the same is to be done are told together
        told: dict[tuple[str, str, str], list[Hit]] = {}
        for p in parameters:
            if hit := rule(p, parameters):
                told.setdefault((hit.severity, hit.what, hit.change), []).append(hit)
        for (severity, what, change), hits in told.items():
            names = tuple(hit.name for hit in hits)
            worst = max(hits, key=lambda hit: hit.weight)
            figure = worst.figure + (f", the worst of them ({worst.name})" if len(hits) > 1 else "")
            sure = max((hit.certainty for hit in hits), key=("possible", "likely", "certain").index)
            where = shortened(names, named)
            if len(names) > 1:
                where = f"{len(names)} of {len(named)} tensors: {where}"
            findings.append(Finding(kind, severity, what, names, where, figure, sure, change))
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def _reports(source: object) -> list[Report]:
    if isinstance(source, Report):
        return [source]
    if hasattr(source, "param_groups"):
        return [Report.of(source)]
    if not isinstance(source, Iterable):
        raise TypeError(f"source={source!r} must be an optimizer, a History, or reports, not {type(source).__name__}")
    items = list(source)
    if items and all(isinstance(item, Record) for item in items):
        return [Report(0, tuple(items))]
    return [item if isinstance(item, Report) else Report(0, _records(item)) for item in items]


def _records(items: object) -> tuple[Record, ...]:
    if isinstance(items, Iterable):
        records = tuple(items)
        if all(isinstance(record, Record) for record in records):
            return records
    raise TypeError(f"a report must be a Report or a list of records, as optimizer.report() gives, not {items!r}")


def _parameters(reports: list[Report]) -> list[Parameter]:
    """The reports turned round: each parameter with all its records."""
    seen: dict[str, list[tuple[int, Record]]] = {}
    about: dict[str, About] = {}
    for report in reports:
        about.update(report.about)
        for record in report.records:
            seen.setdefault(record.name, []).append((report.step, record))
    return [
        Parameter(name, found[-1][1].shape, tuple(t for t, _ in found), tuple(r for _, r in found), about.get(name))
        for name, found in seen.items()
    ]
