"""`diagnose`: what the rules say of all parameters, those with the same advice in one `Finding`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from textwrap import fill

from adafactor.diagnostics.naming import shortened
from adafactor.diagnostics.rules import RULES, Hit
from adafactor.diagnostics.series import Parameter, reports_of, turn


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
    parameters = turn(reports)
    losses = [report.loss for report in reports if report.loss is not None] if losses is None else losses
    findings = []
    if hit := loss_grows([float(loss) for loss in losses]):
        findings.append(_finding("loss grows", [("", hit)], []))
    for kind, rule in RULES.items():
        groups: dict[tuple[str, str, str], list[tuple[str, Hit]]] = {}  # for which the same is to be done
        for p in parameters:
            if hit := rule(p):
                groups.setdefault((hit.severity, hit.what, hit.change), []).append((p.name, hit))
        findings += [_finding(kind, hits, parameters) for hits in groups.values()]
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def loss_grows(losses: Sequence[float]) -> Hit | None:
    """The loss has come up by more than half of what it had gone down, and by more than it wavers."""
    if len(losses) < 5:
        return None
    if bad := sum(not math.isfinite(loss) for loss in losses):
        change = "Look at the batches and the loss; lower lr or warm it up."
        return Hit("The loss is not a finite number.", f"NaN or infinite in {bad} of {len(losses)} losses", change)
    size = max(2, len(losses) // 10)
    means = [fmean(losses[i : i + size]) for i in range(len(losses) % size, len(losses), size)]
    least, last = min(losses[0], *means), means[-1]
    wavers = median(abs(b - (a + c) / 2) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False))
    if last - least <= max((losses[0] - least) / 2, 5 * wavers, abs(least) / 50):
        return None
    change = (
        "Other findings say why. Without any, look at the data from there on and at the sign of the loss; else go back "
        "to a checkpoint from before and lower lr."
    )
    figure = f"{losses[0]:.3g} at first, {least:.3g} at its least, {last:.3g} at the end"
    return Hit("The loss grows.", figure, change)


def _finding(kind: str, hits: list[tuple[str, Hit]], parameters: list[Parameter]) -> Finding:
    """Put what a rule says of several parameters into one; without parameters it is about the whole model."""
    name, worst = max(hits, key=lambda pair: pair[1].weight)
    names = tuple(name for name, _ in hits) if parameters else ()
    where = shortened(names, [(p.name, p.shape) for p in parameters]) if names else "the whole model"
    figure = worst.figure
    if len(names) > 1:
        where = f"{len(names)} of {len(parameters)} tensors: {where}"
        figure += f", the worst of them ({name})"
    certainty = max((hit.certainty for _, hit in hits), key=("possible", "likely", "certain").index)
    return Finding(kind, worst.severity, worst.what, names, where, figure, certainty, worst.change)
