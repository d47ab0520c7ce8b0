"""A report every so many steps, handed to whoever wants it: a history, a table, a logger, any function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.nn import Module

from adafactor.diagnostics.record import Record
from adafactor.optimizer import Adafactor
from adafactor.settings import Settings


@dataclass(frozen=True)
class About:
    """What does not change from step to step, and what a figure has to be read with.

    Attributes:
        dtype: of the parameter: `"float32"`, `"bfloat16"`, …
        trainable: does it require gradients?
        settings: of its group.
    """

    dtype: str
    trainable: bool
    settings: Settings


@dataclass(frozen=True)
class Report:
    """All parameters' records after a step.

    Attributes:
        step: t, the number of the last step; 0 if it is not known.
        records: what `optimizer.report()` gave.
        about: each parameter's dtype and settings; empty where only the records are known.
    """

    step: int
    records: tuple[Record, ...]
    about: Mapping[str, About] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: object, model: Module | None = None) -> Report:
        """Ask the optimizer, which may be wrapped, now. As with `report()`, clip rates start anew.

        Args:
            optimizer: an `Adafactor`, also as Accelerate or Lightning wrap it.
            model: where to take names from, if the optimizer was given parameters without.
        """
        optimizer = unwrap(optimizer)
        records, about = [], {}
        settings = {id(group): Settings.of(group) for group in optimizer.param_groups}
        for record, (name, p, group) in zip(optimizer.report(), parameters(optimizer, model), strict=True):
            records.append(record if record.name == name else replace(record, name=name))
            about[name] = About(str(p.dtype).removeprefix("torch."), p.requires_grad, settings[id(group)])
        return cls(last_step(optimizer), tuple(records), about)


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
        >>> with Watch(optimizer, history, Live(), every=50):
        ...     train()
    """

    def __init__(self, optimizer: object, *sinks: Sink, every: int = 100, model: Module | None = None) -> None:
        """Begin with the next step."""
        self.optimizer, self.model = unwrap(optimizer), model
        self.sinks = check_sinks(sinks)
        self.every = check_every(every)
        self._since = 0
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self.stepped())

    def stepped(self) -> None:
        """Count a step. The optimizer calls this itself, unless something else than `step()` does its steps."""
        self._since += 1
        if self._since >= self.every:
            self.report()

    def report(self) -> Report:
        """Take a report now."""
        self._since = 0
        report = Report.of(self.optimizer, self.model)
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


def unwrap(optimizer: Any) -> Adafactor:
    """The `Adafactor` inside of what Accelerate, Lightning and others put around an optimizer.

    Raises:
        TypeError: there is none inside.
    """
    inner = optimizer
    while not isinstance(inner, Adafactor):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise TypeError(f"optimizer is {type(optimizer).__name__}; the diagnostics are of an adafactor.Adafactor")
    return inner


def parameters(optimizer: Adafactor, model: Module | None = None) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Every parameter with its name and group, in the order of `report()`; the model's name if it has one for it.

    Groups that were named each for itself may share names; these get the group's number.
    """
    known = {} if model is None else {p: name for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    names = [
        [known.get(p, name) for p, name in zip(group["params"], some, strict=True)]
        for group, some in zip(groups, optimizer._names(), strict=True)
    ]
    seen = Counter(name for some in names for name in some)
    return [
        (name if seen[name] == 1 else f"{name} (group {number})", p, group)
        for number, (group, some) in enumerate(zip(groups, names, strict=True))
        for p, name in zip(group["params"], some, strict=True)
    ]


def last_step(optimizer: Adafactor) -> int:
    """The number of the last step: the largest t of any parameter, since some may have been left out."""
    counts = [state["step"] for state in optimizer.state.values() if isinstance(state.get("step"), Tensor)]
    return max((int(count) for count in counts), default=0)


def check_every(every: int) -> int:
    """Refuse what is no positive number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be an integer of at least 1: the steps from report to report")
    return every


def check_sinks(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    """Refuse what cannot take a report."""
    if not sinks:
        raise ValueError("no sink was given; who shall have the reports? History(), Live(), to_callback(print) …")
    for sink in sinks:
        if not callable(sink):
            raise TypeError(f"the sink {sink!r} must be a function of a report, not {type(sink).__name__}")
    return sinks
