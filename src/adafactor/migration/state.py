"""State dicts of torch optimizers, and what they say of a parameter in nobody's format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adafactor.core.factoring import STEP_DTYPE

Shape = tuple[int, ...]
Axes = tuple[int, int]  # of rows and of columns
Rule = Callable[[Shape], Axes | None]  # the axes over which a tensor of this shape is factored
Arguments = Mapping[str, Any]
Entry = Mapping[str, Any]  # the state of one parameter
StateDict = dict[str, Any]
Means = dict[int | None, Tensor]  # axis → mean of V over it, which keeps the axis with length 1; None → V itself

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float64, torch.float32, *HALF)
# what values of the wrong type or size lead to
DAMAGE = (TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)


@contextmanager
def refuse_damage(what: str) -> Iterator[None]:
    """Raise a ValueError for any damage in a state or in arguments: those from a file may hold anything anywhere."""
    try:
        yield
    except DAMAGE as wrong:
        raise ValueError(f"{what} cannot be converted ({type(wrong).__name__}: {wrong})") from wrong


@dataclass
class Moments:
    """One parameter's statistics: the second moment V itself, or its means over each of two axes."""

    shape: Shape
    step: int
    means: Means  # of V itself, or over the column axis (R) and then over the row axis (C)
    momentum: Tensor | None = None

    @property
    def axes(self) -> Axes | None:
        """The axes of rows and columns; None if the second moment is unfactored."""
        axes = [axis for axis in self.means if axis is not None]
        return (axes[1], axes[0]) if axes else None

    def mean(self, axis: int | None) -> Tensor:
        """Return the mean of V over an axis, or for None V itself."""
        if axis is not None and self.axes is None:
            return self.means[None].mean(axis, keepdim=True)
        if axis is None and self.axes is not None:  # one of the two has length 1, and the mean over it is V
            axis = min(self.axes, key=lambda axis: self.shape[axis])
        return self.means[axis]


@dataclass
class Member:
    """A parameter on its way from one optimizer to another."""

    name: str  # for messages; its own if it is named
    item: Any  # what its group holds: a number, a name, a tensor, or a (name, tensor) pair
    is_named: bool
    shape: Shape | None = None  # None if it is unknown
    entry: Entry = field(default_factory=dict)  # its state as it was found; empty if it has taken no step
    moments: Moments | None = None  # what that says


def one_step_count(step: int) -> dict[str, Any]:
    """The count of steps as torch's optimizers and ours keep it."""
    return {"step": torch.tensor(float(step), dtype=STEP_DTYPE)}


@dataclass(frozen=True)
class Format:
    """How an optimizer's state holds the moments of a parameter."""

    full: str
    row: str
    col: str
    momentum: str
    keeps_axes: bool = True  # the axis of a mean stays, with length 1; without it, they are means over the last two
    count: Callable[[int], dict[str, Any]] = one_step_count

    def read(self, member: Member, rule: Rule) -> Moments:
        """Read the moments of a parameter of an optimizer that factors by this rule.

        Its shape follows from them, and must be the one that is known, if any.
        """
        entry, name = member.entry, member.name
        if self.row in entry or self.col in entry:
            shape, means = self._factors(member, rule)
        elif self.full in entry:
            means = {None: _statistic(member, self.full)}
            shape = tuple(means[None].shape)
        else:
            raise ValueError(f"the state of {name} has neither {self.row!r} nor {self.full!r}; it has {_list(entry)}")
        if member.shape not in (None, shape):
            raise ValueError(f"{name} has the shape {member.shape}, its state is of the shape {shape}")
        momentum = _read_tensor(member, self.momentum) if self.momentum in entry else None
        if momentum is not None and (tuple(momentum.shape) != shape or not momentum.isfinite().all()):
            raise ValueError(f"{self.momentum!r} of {name} must be finite, and of the shape {shape}")
        return Moments(shape, count_steps(entry.get("step"), f"'step' of {name}"), means, momentum)

    def write(self, moments: Moments, axes: Axes | None) -> dict[str, Any]:
        """Return the entry of a parameter that is factored over these axes: copies, since the source may go on."""
        means = {self.full: None} if axes is None else {self.row: axes[1], self.col: axes[0]}
        state = self.count(moments.step)
        for key, axis in means.items():
            mean = moments.mean(axis)
            state[key] = (mean if axis is None or self.keeps_axes else mean.squeeze(axis)).clone()
        return state if moments.momentum is None else {**state, self.momentum: moments.momentum.clone()}

    def _factors(self, member: Member, rule: Rule) -> tuple[Shape, Means]:
        """Find the shape for which the optimizer would keep factors of these shapes, and check that they belong."""
        row, col = _statistic(member, self.row), _statistic(member, self.col)
        r, c = (row, col) if self.keeps_axes else (row.unsqueeze(-1), col.unsqueeze(-2) if col.dim() else col)
        shape = tuple(map(max, r.shape, c.shape)) if r.dim() == c.dim() else ()
        axes = rule(shape)
        if axes is None or [tuple(r.shape), tuple(c.shape)] != [_without(shape, axes[1]), _without(shape, axes[0])]:
            raise ValueError(
                f"{self.row!r} and {self.col!r} of {member.name} are {tuple(row.shape)} and {tuple(col.shape)}, "
                "not the means of rows and of columns of one tensor"
            )
        low, high = sorted(float(t.double().mean()) for t in (row, col))  # NaN of no elements
        is_half = any(member.entry[key].dtype in HALF for key in (self.row, self.col))
        gap = 0.5 if is_half else 0.02  # averages in half precision drift
        if high > 1e-30 and low < high * (1 - gap):
            raise ValueError(
                f"the row and column statistics of {member.name} have the means {low:.3g} and {high:.3g}, which are "
                "equal in every Adafactor: the state is damaged or of another optimizer"
            )
        return shape, {axes[1]: r, axes[0]: c}


def count_steps(value: Any, name: str) -> int:
    """Return a number of steps as an integer."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = _require_elements(value, name).item()
    # NaN is not in the range either
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{name} is {_describe(value)}, not a number of steps")
    return int(value)


def read_groups(state_dict: Any, params: list[Member] | None) -> list[tuple[dict[str, Any], list[Member]]]:
    """Return the groups of a torch optimizer's state dict, if it is one, each with its parameters.

    These have their states, and their shapes where `params` are given.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("not an optimizer's state dict: it needs 'state' and 'param_groups'")
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise ValueError("not an optimizer's state dict: 'state' must be a dict and 'param_groups' a list")
    result = [(dict(group), _members(group, number, state)) for number, group in enumerate(groups)]
    members = [member for _, members in result for member in members]
    keys = {member.item for member in members}
    if len(keys) != len(members):
        raise ValueError("the state dict has a parameter in two groups")
    if extra := [key for key in state if key not in keys]:
        raise ValueError(f"the state dict has a state for parameter {extra[0]!r}, which is in no group")
    if params is not None:
        _match_shapes(members, params)
    return result


def _members(group: Any, number: int, state: Mapping[Any, Any]) -> list[Member]:
    """Return the parameters of a group with their states; in a distributed checkpoint, names stand for numbers."""
    if not isinstance(group, Mapping) or not _is_list(group.get("params"), int, str):
        raise ValueError(f"group {number} of the state dict has no list 'params' of numbers or names")
    names = group.get("param_names") or [key if isinstance(key, str) else "" for key in group["params"]]
    if not _is_list(names, str) or len(names) != len(group["params"]):
        raise ValueError(f"group {number} of the state dict has 'param_names' that are not a name for each of 'params'")
    members = []
    for key, name in zip(group["params"], names, strict=True):
        entry = state.get(key) or {}
        if not isinstance(entry, Mapping):
            raise ValueError(f"the state of {name or key} is {type(entry).__name__}, not a dict")
        members.append(Member(name or f"parameter {key}", key, bool(name), entry=entry))
    return members


def _match_shapes(members: list[Member], params: list[Member]) -> None:
    """Give each parameter of a state dict its shape: by name where both sides have names, else in order."""
    if all(member.is_named for member in (*members, *params)):
        own, given = ({member.name: member for member in side} for side in (members, params))
        for place, lacking in (("the state dict", given.keys() - own), ("params", own.keys() - given)):
            if lacking:
                raise ValueError(f"{place} lacks {min(lacking)!r}")
        params = [given[member.name] for member in members]
    if len(members) != len(params):
        raise ValueError(f"the state dict has {len(members)} parameters, params has {len(params)}")
    for member, param in zip(members, params, strict=True):
        member.shape = param.shape


def _statistic(member: Member, key: str) -> Tensor:
    """Read a mean of squares: no number is below 0, and an infinite one would make X NaN at the next step."""
    value = _read_tensor(member, key)
    if value.numel() and not (value.min() >= 0 and value.max() < math.inf):
        raise ValueError(f"{key!r} of {member.name} has elements that are negative, infinite or NaN")
    return value


def _read_tensor(member: Member, key: str) -> Tensor:
    """Read a tensor of a parameter's state, in float32 or float64."""
    name = f"{key!r} of {member.name}"
    if key not in member.entry:
        raise ValueError(f"the state of {member.name} has no {key!r}; it has {_list(member.entry)}")
    value = member.entry[key]
    if not isinstance(value, Tensor) or value.dtype not in FLOATS:
        raise ValueError(f"{name} is {_describe(value)}, not a floating-point tensor of 16, 32 or 64 bits")
    return _require_elements(value, name).detach().to(torch.promote_types(value.dtype, torch.float32))


def _require_elements(value: Tensor, name: str) -> Tensor:
    """Return the tensor if all its elements are there: a file of 2 kB can claim 10¹² of them by strides of 0."""
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        raise ValueError(f"{name} is {'nested' if value.is_nested else value.layout} on {value.device}, not dense")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, but not as many elements")
    return value


def _without(shape: Shape, axis: int) -> Shape:
    """The shape of a mean over an axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _is_list(values: Any, *types: type) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, types) for value in values)


def _list(entry: Entry) -> str:
    return ", ".join(repr(key) for key in entry) or "nothing"


def _describe(value: Any) -> str:
    return f"of dtype {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
