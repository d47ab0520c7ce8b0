"""A report: the records of all parameters after a step, with what they have to be read with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from adafactor.core.record import Record, names_of
from adafactor.core.settings import Settings
from adafactor.optimizer import Adafactor


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
        loss: the mean of the losses since the last report; None if none was given.
    """

    step: int
    records: tuple[Record, ...]
    about: Mapping[str, About] = field(default_factory=dict)
    loss: float | None = None

    @classmethod
    def of(cls, optimizer: object, model: Module | None = None, loss: float | None = None) -> Report:
        """Ask the optimizer, which may be wrapped, now. As with `report()`, clip rates start anew.

        Args:
            optimizer: an `Adafactor`, also as Accelerate or Lightning wrap it.
            model: where to take names from, if the optimizer was given parameters without.
            loss: the mean of the losses since the last report, if it is known.
        """
        optimizer = unwrap(optimizer)
        records, about = [], {}
        settings = {id(group): Settings.of(group) for group in optimizer.param_groups}
        for record, (name, p, group) in zip(optimizer.report(), parameters(optimizer, model), strict=True):
            records.append(record if record.name == name else replace(record, name=name))
            about[name] = About(str(p.dtype).removeprefix("torch."), p.requires_grad, settings[id(group)])
        return cls(last_step(optimizer), tuple(records), about, loss)


Sink = Callable[[Report], None]


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
        for group, some in zip(groups, names_of(groups), strict=True)
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
