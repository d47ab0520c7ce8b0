"""`diagnose`: what the rules say of all parameters, those with the same advice in one `Finding`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from textwrap import fill

from adafactor.core.report import Report
from adafactor.diagnostics.rules import RULES, Hit, loss_grows
from adafactor.diagnostics.series import group_by_parameter
from adafactor.diagnostics.watch import unwrap

MOST = 4  # names in a finding


@dataclass(frozen=True)
class Finding:
    """Something that the metrics show; `str()` of it is to be read.

    Attributes:
        kind: `"out of date"`, `"lost to rounding"` and so on, for programs.
        severity: `"warning"`: it costs quality; `"note"`: it may be meant.
        what: what is wrong, in a sentence.
        parameters: the names of all that it is true of.
        where: the first of them, and how many they are.
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
        return "\n  ".join(fill(line, 98, subsequent_indent="    ", break_long_words=False) for line in lines)


def diagnose(source: object, losses: Iterable[float] | None = None) -> list[Finding]:
    """Say in words what the reports show, warnings first, causes before what comes of them.

    An empty list is no promise that all is well.

    Args:
        source: an optimizer, one `Report`, or several in order, as a `Watch` hands them to `reports.append`. One
            report says less than several.
        losses: one a step, or now and then, in order; without them, those that `Watch.add_loss` gave to the reports.
    """
    reports = _reports_of(source)
    parameters = group_by_parameter(reports)
    groups: dict[tuple[str, ...], dict[str, Hit]] = {}  # of parameters for which the same is to be done, by name
    for kind, rule in RULES.items():
        for p in parameters:
            if hit := rule(p):
                groups.setdefault((kind, hit.severity, hit.what, hit.change), {})[p.name] = hit
    findings = [_finding(kind, hits, len(parameters)) for (kind, *_), hits in groups.items()]
    losses = [report.loss for report in reports if report.loss is not None] if losses is None else losses
    if hit := loss_grows([float(loss) for loss in losses]):
        where = "the whole model"
        findings.append(Finding("loss grows", hit.severity, hit.what, (), where, hit.figure, hit.certainty, hit.change))
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def _finding(kind: str, hits: dict[str, Hit], tensors: int) -> Finding:
    """Put what a rule says of several parameters into one."""
    name, worst = max(hits.items(), key=lambda pair: pair[1].weight)
    where, figure = _list(hits), worst.figure
    if len(hits) > 1:
        where = f"{len(hits)} of {tensors} tensors: {where}"
        figure += f", the worst of them ({name})"
    certainty = max((hit.certainty for hit in hits.values()), key=("possible", "likely", "certain").index)
    return Finding(kind, worst.severity, worst.what, tuple(hits), where, figure, certainty, worst.change)


def _list(names: Collection[str]) -> str:
    more = len(names) - MOST
    return ", ".join(list(names)[:MOST] + ([f"and {more} more"] if more > 0 else []))


def _reports_of(source: object) -> list[Report]:
    if hasattr(source, "param_groups"):
        return [unwrap(source).report()]
    reports = [source] if isinstance(source, Report) else list(source) if isinstance(source, Iterable) else None
    if reports is None or not all(isinstance(report, Report) for report in reports):
        raise TypeError(f"source must be an optimizer, a Report or a list of Reports, not {str(source)[:80]}")
    return reports
