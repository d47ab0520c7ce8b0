"""A report has the records of all parameters after a step; a `Watch` takes one every so many steps, for its sinks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.nn import Module

from adafactor.core.dtensor import local
from adafactor.core.record import Record, entries_of, slices_of
from adafactor.core.settings import Settings
from adafactor.optimizer import Adafactor


@dataclass(frozen=True)
class About:
    """What does not change from step to step, and what a metric has to be read with."""

    dtype: str  # of the parameter: "float32", "bfloat16", …
    trainable: bool  # does it require gradients?
    settings: Settings  # of its group


@dataclass(frozen=True)
class Report:
    """All parameters' records after a step.

    Attributes:
        step: t, the number of the last step; 0 if it is not known.
        records: what `optimizer.report()` gave.
        about: each parameter's dtype and settings; empty where only the records are known.
        loss: the mean of the losses since the last report; None if none was given.
    """

    step: int
    records: tuple[Record, ...]
    about: Mapping[str, About] = field(default_factory=dict)
    loss: float | None = None

    @classmethod
    def of(cls, optimizer: object, model: Module | None = None, loss: float | None = None) -> Report:
        """Ask the optimizer now. As with `report()`, clip rates start anew.

        Args:
            optimizer: an `Adafactor`, also as Accelerate or Lightning wrap it.
            model: where to take names from, if the optimizer was given parameters without.
            loss: the mean of the losses since the last report, if it is known.
        """
        optimizer = unwrap(optimizer)
        settings = [Settings.of(group) for group in optimizer.param_groups]
        members = [
            (part.name, p, settings[group])
            for name, p, group in parameters(optimizer, model)
            for part in slices_of(p, name, settings[group].per_slice)
        ]
        records = [replace(record, name=name) for record, (name, _, _) in zip(optimizer.report(), members, strict=True)]
        about = {name: About(str(p.dtype).removeprefix("torch."), p.requires_grad, its) for name, p, its in members}
        # the largest t of any parameter, since some may have been left out
        counts = [state["step"] for state in optimizer.state.values() if isinstance(state.get("step"), Tensor)]
        steps = [int(step) for count in counts for step in local(count).reshape(-1).tolist()]
        return cls(max(steps, default=0), tuple(records), about, loss)


Sink = Callable[[Report], None]


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
        raise ValueError("pass at least one sink, such as History(), Live() or to_callback(print)")
    for sink in sinks:
        if not callable(sink):
            raise TypeError(f"the sink {sink!r} must be a function of a report, not {type(sink).__name__}")
    return sinks


def known_values(records: Iterable[Record], metric: str) -> dict[str, float]:
    """Return a metric of every parameter that has it, by name."""
    values = {record.name: float(getattr(record, metric)) for record in records}
    return {name: value for name, value in values.items() if not math.isnan(value)}


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


def parameters(optimizer: Adafactor, model: Module | None = None) -> list[tuple[str, Tensor, int]]:
    """Return every parameter with its name and its group's number, by the model's name if it has one.

    Groups may share names if each was named for itself; such a name gets the group's number.
    """
    known: dict[Tensor, str] = {} if model is None else {p: name for name, p in model.named_parameters()}
    members = [(known.get(entry.p, entry.name), entry.p, entry.group) for entry in entries_of(optimizer.param_groups)]
    count = Counter(name for name, _, _ in members)
    return [(name if count[name] == 1 else f"{name} (group {group})", p, group) for name, p, group in members]
