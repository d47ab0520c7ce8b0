"""A torch optimizer's state dict, what it remembers of a parameter in nobody's format, and how a peer is described."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Axes = tuple[int, int]
Arguments = Mapping[str, Any]
StateDict = dict[str, Any]
Named = list[tuple[str | None, Shape]]  # the parameters in order, some or all with names

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float64, torch.float32, *HALF)
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

    def mean(self, axis: int) -> Tensor:
        """The mean of V over an axis."""
        return self.over[axis] if self.whole is None else self.whole.mean(axis)

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
    """One other implementation. `factored` is None where every tensor of two axes or more is factored over `axes`."""

    name: str
    defaults: Arguments
    translate: Callable[[Arguments, int | None], Translation]  # of a group; the step, or None for a new optimizer
    read: Callable[[Arguments, Mapping[str, Any], Shape | None, str], Moments] | None = None
    factored: Callable[[Arguments, Shape, str], Axes | None] | None = None
    axes: Axes | None = (-2, -1)  # None: as ours does by itself
    internal: frozenset[str] = frozenset()  # what its groups hold besides its arguments
    unsaved: tuple[str, ...] = ()  # arguments that its state dicts do not hold
    anew: tuple[str, ...] = ("lr",)  # arguments that may be given although its state dicts hold them
    doubt: str = ""  # what no state dict can tell


def tensor(entry: Mapping[str, Any], key: str, where: str) -> Tensor:
    """A statistic of an entry of the state, in float32 or float64."""
    if key not in entry:
        raise ValueError(f"the state of {where} has no {key!r}; it has {_listed(entry)}")
    value = entry[key]
    if not isinstance(value, Tensor) or value.dtype not in FLOATS:
        raise ValueError(f"{key!r} of {where} is {_kind(value)}, not a floating-point tensor of 16, 32 or 64 bits")
    return whole(value, f"{key!r} of {where}").detach().to(torch.promote_types(value.dtype, torch.float32))


def whole(value: Tensor, where: str) -> Tensor:
    """The tensor itself, if all its elements are there: a file of 2 kB can claim 10¹² of them by strides of 0."""
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        raise ValueError(f"{where} is {'nested' if value.is_nested else value.layout} on {value.device}, not dense")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"{where} has the shape {tuple(value.shape)}, but not as many elements")
    return value


def count(entry: Mapping[str, Any], key: str, where: str) -> int:
    """The number of steps taken."""
    value = entry.get(key)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = whole(value, f"{key!r} of {where}").item()
    # NaN is not in the range either
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
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


def checked(state_dict: Any) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """The groups and the state of a torch optimizer's state dict, if it is one."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("not an optimizer's state dict: it needs 'state' and 'param_groups'")
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise ValueError("not an optimizer's state dict: 'state' must be a dict and 'param_groups' a list")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not _are(group.get("params"), int, str):
            raise ValueError(f"group {number} of the state dict has no list 'params' of numbers or names")
        if "param_names" in group and not _are(group["param_names"], str):
            raise ValueError(f"group {number} of the state dict has 'param_names' that are no list of names")
        if len(names(group)) != len(group["params"]):
            raise ValueError(f"group {number} of the state dict has another number of 'param_names' than of 'params'")
    keys = [key for group in groups for key in group["params"]]
    if len(set(keys)) != len(keys):
        raise ValueError("the state dict has a parameter in two groups")
    if extra := [key for key in state if key not in set(keys)]:
        raise ValueError(f"the state dict has a state for parameter {extra[0]!r}, which is in no group")
    return [dict(group) for group in groups], state


def _are(values: Any, *types: type) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, types) for value in values)


def names(group: Mapping[str, Any]) -> Sequence[str | None]:
    """The names in a group, or None for each parameter; in a distributed checkpoint, names stand for numbers."""
    return group.get("param_names") or [key if isinstance(key, str) else None for key in group["params"]]


def match(groups: list[dict[str, Any]], shapes: Named | None) -> dict[Any, Shape]:
    """The shape of each parameter of the state dict: by name where both sides have names, else in order."""
    if shapes is None:
        return {}
    keys = [key for group in groups for key in group["params"]]
    saved = [name for group in groups for name in names(group)]
    given = [name for name, _ in shapes]
    if None not in saved and None not in given:
        for missing, where in ((set(given) - set(saved), "the state dict"), (set(saved) - set(given), "params")):
            if missing:
                raise ValueError(f"{where} lacks {min(str(name) for name in missing)!r}")
        by_name = dict(shapes)
        return {key: by_name[name] for key, name in zip(keys, saved, strict=True)}
    if len(keys) != len(shapes):
        raise ValueError(f"the state dict has {len(keys)} parameters, params has {len(shapes)}")
    return {key: shape for key, (_, shape) in zip(keys, shapes, strict=True)}
