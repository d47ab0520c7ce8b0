"""A report every so many steps, handed to whoever wants it: a history, a table, a logger, any function."""

from __future__ import annotations

from statistics import fmean
from types import TracebackType

from torch import Tensor
from torch.nn import Module

from adafactor.diagnostics.report import Report, Sink, unwrap


class Watch:
    """Takes a report after every so many steps, and a last one at the end, and hands it to each sink.

    One report serves all sinks, since asking for one starts its clip rates anew: watch an optimizer once.

    Args:
        optimizer: an `Adafactor`, also as Accelerate or Lightning wrap it.
        sinks: `History`, `Live`, `to_tensorboard(writer)`, `to_callback(function)`, or any function of a `Report`.
        every: steps from report to report.
        model: where to take names from, if the optimizer was given parameters without.

    Examples:
        >>> with Watch(optimizer, history, Live(), every=50) as watch:
        ...     for batch in data:
        ...         loss = train(batch)
        ...         watch.add_loss(loss)  # if `diagnose` is to know it
    """

    def __init__(self, optimizer: object, *sinks: Sink, every: int = 100, model: Module | None = None) -> None:
        """Begin with the next step."""
        self.optimizer, self.model = unwrap(optimizer), model
        self.sinks = check_sinks(sinks)
        self.every = check_every(every)
        self._since = 0
        self._losses: list[float | Tensor] = []
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self.stepped())

    def stepped(self) -> None:
        """Count a step. The optimizer calls this itself, unless something else than `step()` does its steps."""
        self._since += 1
        if self._since >= self.every:
            self.report()

    def add_loss(self, loss: float | Tensor) -> None:
        """Let the next report have this loss, or the mean of several; a tensor is not read before."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def report(self) -> Report:
        """Take a report now."""
        loss = fmean(map(float, self._losses)) if self._losses else None
        self._since, self._losses = 0, []
        report = Report.of(self.optimizer, self.model, loss)
        for sink in self.sinks:
            sink(report)
        return report

    def close(self) -> None:
        """Stop, with a last report if steps were taken since the one before."""
        self._hook.remove()
        if self._since:
            self.report()
        for sink in self.sinks:
            if callable(close := getattr(sink, "close", None)):
                close()

    def __enter__(self) -> Watch:
        """Watch until the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last report is taken even if training has failed: that is when it is wanted."""
        self.close()


def check_every(every: int) -> int:
    """Refuse what is no positive number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be an integer of at least 1: the steps from report to report")
    return every


def check_sinks(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    """Refuse what cannot take a report."""
    if not sinks:
        raise ValueError("pass at least one sink, such as History(), Live() or to_callback(print)")
    for sink in sinks:
        if not callable(sink):
            raise TypeError(f"the sink {sink!r} must be a function of a report, not {type(sink).__name__}")
    return sinks
