"""A `Watch` takes a report every so many steps and hands it to functions: loggers, a list, your own."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.nn import Module

from adafactor.core.report import Report
from adafactor.optimizer import Adafactor

Sink = Callable[[Report], object]


class Watch:
    """Takes a report after every so many steps, and a last one at the end, and hands it to each sink.

    Its records count the steps since the report before.

    Args:
        optimizer: an `Adafactor`, also as Accelerate or Lightning wrap it.
        sinks: functions of a `Report`, such as `reports.append`, `to_tensorboard(writer)` or `to_callback(wandb.log)`.
        every: steps from report to report.
        model: where to take names from, if the optimizer was given parameters without.

    Examples:
        >>> reports = []
        >>> with Watch(optimizer, reports.append, every=50) as watch:
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
        self._before = self.optimizer.report(model)
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        self._since += 1
        if self._since >= self.every:
            self.report()

    def add_loss(self, loss: float | Tensor) -> None:
        """Let the next report have this loss, or the mean of several; a tensor is not read before."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def report(self) -> None:
        """Take a report now."""
        now = self.optimizer.report(self.model)
        report = now.since(self._before)
        report.loss = fmean(map(float, self._losses)) if self._losses else None
        self._since, self._losses, self._before = 0, [], now
        for sink in self.sinks:
            sink(report)

    def close(self) -> None:
        """Stop, with a last report if steps were taken since the one before."""
        self._hook.remove()
        if self._since:
            self.report()

    def __enter__(self) -> Watch:
        """Watch until the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the last report even if training has failed: that is when it is wanted."""
        self.close()


def check_every(every: int) -> int:
    """Refuse what is no positive number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be an integer of at least 1: the steps from report to report")
    return every


def check_sinks(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    """Refuse what cannot take a report."""
    if not sinks:
        raise ValueError("pass at least one sink, such as reports.append, to_callback(wandb.log) or print")
    for sink in sinks:
        if not callable(sink):
            raise TypeError(f"the sink {sink!r} must be a function of a report, not {type(sink).__name__}")
    return sinks


def unwrap(optimizer: Any) -> Adafactor:
    """Return the `Adafactor` inside of what Accelerate, Lightning and others put around an optimizer.

    Raises:
        TypeError: there is none inside.
    """
    inner = optimizer
    while not isinstance(inner, Adafactor):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise TypeError(f"optimizer is {type(optimizer).__name__}; the diagnostics are of an adafactor.Adafactor")
    return inner
