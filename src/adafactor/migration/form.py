"""What every Adafactor remembers of a parameter, in nobody's format, and how a peer is described."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Axes = tuple[int, int]
Arguments = Mapping[str, Any]

HALF = (torch.float16, torch.bfloat16)
ALLOWED_GAP = {True: 0.5, False: 0.02}  # between the means of the two factors: half precision or not


class MigrationWarning(UserWarning):
    """A difference between the steps of the original and ours, in one sentence with its measured size."""


@dataclass
class Moments:
    """One parameter's statistics: the second moment whole, or its means over each of two axes."""

    shape: Shape
    step: int
    whole: Tensor | None = None  # V, in the parameter's shape
    over: dict[int, Tensor] = field(default_factory=dict)  # axis → mean of V over it, in the shape without it
    momentum: Tensor | None = None

    def permuted(self, order: tuple[int, ...]) -> Moments:
        """The same for the parameter `permute(order)`."""
        over = {}
        for axis, mean in self.over.items():
            rest = [a - (a > axis) for a in order if a != axis]
            over[order.index(axis)] = mean.permute(rest)
        whole, momentum = (None if t is None else t.permute(order) for t in (self.whole, self.momentum))
        return Moments(tuple(self.shape[a] for a in order), self.step, whole, over, momentum)


@dataclass
class Translation:
    """A group's arguments in our words."""

    keywords: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    keeps_lr: bool = True  # our lr is theirs, so that a scheduler's `initial_lr` stays
    momentum_scale: float = 1.0  # our momentum is theirs times this
    step_offset: int = 0  # our step is theirs minus this


@dataclass(frozen=True)
class Peer:
    """One other implementation. `factored` is None where every tensor of two axes or more is factored over its last."""

    name: str
    defaults: Arguments
    translate: Callable[[Arguments, int | None], Translation]  # of a group; the step, or None for a new optimizer
    read: Callable[[Arguments, Mapping[str, Any], Shape | None, str], Moments] | None = None
    factored: Callable[[Arguments, Shape, str], Axes | None] | None = None
    internal: frozenset[str] = frozenset()  # what its groups hold besides its arguments
    unsaved: tuple[str, ...] = ()  # arguments that its state dicts do not hold
    doubt: str = ""  # what no state dict can tell


def tensor(entry: Mapping[str, Any], key: str, where: str) -> Tensor:
    """A statistic of an entry of the state, in float32 or float64."""
    if key not in entry:
        raise ValueError(f"the state of {where} has no {key!r}; it has {_listed(entry)}")
    value = entry[key]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{key!r} of {where} is {_kind(value)}, not a floating-point tensor")
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def count(entry: Mapping[str, Any], key: str, where: str) -> int:
    """The number of steps taken."""
    value = entry.get(key)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise ValueError(f"{key!r} of {where} is {_kind(value)}, not a number of steps")
    return int(value)


def factors(shape: Shape, axes: Axes, row: Tensor, col: Tensor, where: str) -> dict[int, Tensor]:
    """The means over the second and over the first of the axes, if they fit the shape and each other."""
    first, second = (axis % len(shape) for axis in axes)
    for mean, axis, key in ((row, second, "row"), (col, first, "column")):
        needed = shape[:axis] + shape[axis + 1 :]
        if tuple(mean.shape) != needed:
            raise ValueError(
                f"{where} of shape {shape} needs {key} statistics of shape {needed}, but has {tuple(mean.shape)}"
            )
    return {second: row, first: col}


def check(moments: Moments, half: bool, where: str) -> Moments:
    """Refuse what cannot be the statistics of one gradient: both factors have the same mean, whatever the peer."""
    if moments.momentum is not None and tuple(moments.momentum.shape) != moments.shape:
        raise ValueError(f"{where} of shape {moments.shape} has a momentum of shape {tuple(moments.momentum.shape)}")
    means = [float(t.double().mean()) for t in moments.over.values() if t.numel()]
    if len(means) == 2 and all(map(math.isfinite, means)) and max(means) > 1e-30:
        if min(means) < max(means) * (1 - ALLOWED_GAP[half]):
            raise ValueError(
                f"the row and column statistics of {where} have the means {means[0]:.3g} and {means[1]:.3g}, which "
                "are equal in every Adafactor: the state is damaged or of another optimizer"
            )
    return moments


def statistics(entry: Mapping[str, Any], keys: tuple[str, str, str], where: str) -> list[Tensor]:
    """The second moment of an entry: what is under the first key, or under the second and the third."""
    whole, row, col = keys
    if row in entry or col in entry:
        return [tensor(entry, row, where), tensor(entry, col, where)]
    if whole in entry:
        return [tensor(entry, whole, where)]
    raise ValueError(f"the state of {where} has neither {row!r} nor {whole!r}; it has {_listed(entry)}")


def is_half(entry: Mapping[str, Any]) -> bool:
    """Does the entry hold second moments in half precision, whose averages drift?"""
    return any(isinstance(v, Tensor) and v.dtype in HALF for key, v in entry.items() if key != "exp_avg")


def _listed(entry: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in entry) or "nothing"


def _kind(value: Any) -> str:
    return f"of dtype {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
