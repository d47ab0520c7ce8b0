"""State dicts of torch optimizers, and what they say of a parameter in nobody's format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adafactor.core.factoring import STEP_DTYPE, Factored, find_factoring

Shape = tuple[int, ...]
Axes = tuple[int, int]
Arguments = Mapping[str, Any]
Entry = Mapping[str, Any]  # the state of one parameter
StateDict = dict[str, Any]
NamedShapes = list[tuple[str | None, Shape]]  # of the parameters in order, some or all with names

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float64, torch.float32, *HALF)
ALLOWED_GAP = {True: 0.5, False: 0.02}  # between the means of the two factors: half precision or not


@dataclass
class Moments:
    """One parameter's statistics: the second moment unfactored, or its means over each of two axes."""

    shape: Shape
    step: int
    full: Tensor | None = None  # V, in the parameter's shape
    # axis → mean of V over it, in the shape without it; rows are means over the column axis, and come first
    means: dict[int, Tensor] = field(default_factory=dict)
    momentum: Tensor | None = None

    @property
    def axes(self) -> Axes | None:
        """The axes of rows and columns; None if the second moment is unfactored."""
        if not self.means:
            return None
        col, row = self.means
        return row, col

    def mean(self, axis: int) -> Tensor:
        """Return the mean of V over an axis."""
        return self.means[axis] if self.full is None else self.full.mean(axis)

    def unfactored(self) -> Tensor:
        """Return V; of factors, one of the two axes has length 1, and the mean over it is V itself."""
        if self.full is not None:
            return self.full
        axis = next(axis for axis in sorted(self.means, reverse=True) if self.shape[axis] == 1)
        return self.means[axis].unsqueeze(axis)

    def permute(self, order: tuple[int, ...]) -> Moments:
        """Return the same for the parameter `permute(order)`."""
        means = {}
        for axis, mean in self.means.items():
            rest = [a - (a > axis) for a in order if a != axis]
            means[order.index(axis)] = mean.permute(rest)
        full, momentum = (None if t is None else t.permute(order) for t in (self.full, self.momentum))
        return Moments(tuple(self.shape[a] for a in order), self.step, full, means, momentum)

    def check(self, half: bool, name: str) -> Moments:
        """Refuse what cannot be the statistics of one gradient: both factors have the same mean, whatever the peer."""
        if self.momentum is not None and tuple(self.momentum.shape) != self.shape:
            raise ValueError(f"{name} of shape {self.shape} has a momentum of shape {tuple(self.momentum.shape)}")
        means = [float(t.double().mean()) for t in self.means.values() if t.numel()]
        if len(means) == 2 and all(map(math.isfinite, means)) and max(means) > 1e-30:
            if min(means) < max(means) * (1 - ALLOWED_GAP[half]):
                raise ValueError(
                    f"the row and column statistics of {name} have the means {means[0]:.3g} and {means[1]:.3g}, which "
                    "are equal in every Adafactor: the state is damaged or of another optimizer"
                )
        return self


# the shape of a parameter, the two axes that are factored, and the means in the shape without one of them, from an
# entry's row and column statistics
Locate = Callable[[Arguments, Tensor, Tensor, str], tuple[Shape, Axes, Tensor, Tensor]]


def read_moments(args: Arguments, entry: Entry, name: str, keys: tuple[str, str, str], locate: Locate) -> Moments:
    """Read an entry whose second moment has the first of the keys if it is unfactored, else the other two."""
    step = read_step(args, entry, name)
    momentum = read_tensor(entry, "exp_avg", name) if "exp_avg" in entry else None
    statistics = read_statistics(entry, keys, name)
    if len(statistics) == 1:
        return Moments(tuple(statistics[0].shape), step, statistics[0], momentum=momentum)
    shape, axes, row, col = locate(args, statistics[0], statistics[1], name)
    return Moments(shape, step, means=find_means(shape, axes, row, col, name), momentum=momentum)


def read_statistics(entry: Entry, keys: tuple[str, str, str], name: str) -> list[Tensor]:
    """Read the second moment of an entry: what is under the first key, or under the second and the third."""
    full, row, col = keys
    if row in entry or col in entry:
        return [read_tensor(entry, row, name), read_tensor(entry, col, name)]
    if full in entry:
        return [read_tensor(entry, full, name)]
    raise ValueError(f"the state of {name} has neither {row!r} nor {full!r}; it has {_list(entry)}")


def read_tensor(entry: Entry, key: str, name: str) -> Tensor:
    """Read a statistic of an entry, in float32 or float64."""
    if key not in entry:
        raise ValueError(f"the state of {name} has no {key!r}; it has {_list(entry)}")
    value = entry[key]
    if not isinstance(value, Tensor) or value.dtype not in FLOATS:
        raise ValueError(f"{key!r} of {name} is {_describe(value)}, not a floating-point tensor of 16, 32 or 64 bits")
    return require_elements(value, f"{key!r} of {name}").detach().to(torch.promote_types(value.dtype, torch.float32))


def require_elements(value: Tensor, name: str) -> Tensor:
    """Return the tensor if all its elements are there: a file of 2 kB can claim 10¹² of them by strides of 0."""
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        raise ValueError(f"{name} is {'nested' if value.is_nested else value.layout} on {value.device}, not dense")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, but not as many elements")
    return value


def read_step(args: Arguments, entry: Entry, name: str) -> int:
    """Read the number of steps taken, which some optimizers count in the group."""
    return count_steps(entry.get("step", args.get("step")), f"'step' of {name}")


def count_steps(value: Any, name: str) -> int:
    """Return a number of steps as an integer."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = require_elements(value, name).item()
    # NaN is not in the range either
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{name} is {_describe(value)}, not a number of steps")
    return int(value)


def find_means(shape: Shape, axes: Axes, row: Tensor, col: Tensor, name: str) -> dict[int, Tensor]:
    """Return the means over the second and over the first of the axes, if they fit the shape and each other."""
    first, second = (axis % len(shape) for axis in axes)
    for mean, axis, key in ((row, second, "row"), (col, first, "column")):
        needed = shape[:axis] + shape[axis + 1 :]
        if tuple(mean.shape) != needed:
            raise ValueError(
                f"{name} of shape {shape} needs {key} statistics of shape {needed}, but has {tuple(mean.shape)}"
            )
    return {second: row, first: col}


def is_half(entry: Entry) -> bool:
    """Return whether the entry has second moments in half precision, whose averages drift."""
    return any(isinstance(v, Tensor) and v.dtype in HALF for key, v in entry.items() if key != "exp_avg")


def factored_axes(shape: Shape, factored: str | bool, axes: Axes | None) -> Axes | None:
    """Return the row and the column axis of a tensor with these keywords of ours; None if it is unfactored."""
    factoring = find_factoring(shape, factored, axes)
    return (factoring.row_axis, factoring.col_axis) if isinstance(factoring, Factored) else None


def our_state(moments: Moments, keywords: Arguments, step: int, momentum_scale: float, name: str) -> dict[str, Tensor]:
    """Make our state of a parameter in a group with these keywords."""
    axes = factored_axes(moments.shape, keywords["factored"], keywords["axes"])
    state = {"step": torch.tensor(float(step), dtype=STEP_DTYPE)}
    if axes is None:
        state["full"] = moments.unfactored()
    else:
        state |= {"row": moments.mean(axes[1]), "col": moments.mean(axes[0])}
    if keywords["beta1"]:
        if moments.momentum is None:
            raise ValueError(f"the state of {name} has no momentum, but its group has one")
        state["momentum"] = moments.momentum * momentum_scale
    return {key: value.to(torch.promote_types(value.dtype, torch.float32)).clone() for key, value in state.items()}


def check_state_dict(state_dict: Any) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """Return the groups and the state of a torch optimizer's state dict, if it is one."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("not an optimizer's state dict: it needs 'state' and 'param_groups'")
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise ValueError("not an optimizer's state dict: 'state' must be a dict and 'param_groups' a list")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not _is_list(group.get("params"), int, str):
            raise ValueError(f"group {number} of the state dict has no list 'params' of numbers or names")
        if "param_names" in group and not _is_list(group["param_names"], str):
            raise ValueError(f"group {number} of the state dict has 'param_names' that are no list of names")
        if len(names_in(group)) != len(group["params"]):
            raise ValueError(f"group {number} of the state dict has another number of 'param_names' than of 'params'")
    keys = [key for group in groups for key in group["params"]]
    if len(set(keys)) != len(keys):
        raise ValueError("the state dict has a parameter in two groups")
    if extra := [key for key in state if key not in set(keys)]:
        raise ValueError(f"the state dict has a state for parameter {extra[0]!r}, which is in no group")
    return [dict(group) for group in groups], state


def names_in(group: Mapping[str, Any]) -> Sequence[str | None]:
    """Return the names in a group, or None for each; in a distributed checkpoint, names stand for numbers."""
    return group.get("param_names") or [key if isinstance(key, str) else None for key in group["params"]]


def match_shapes(groups: list[dict[str, Any]], shapes: NamedShapes | None) -> dict[Any, Shape]:
    """Find the shape of each parameter of the state dict: by name where both sides have names, else in order."""
    if shapes is None:
        return {}
    keys = [key for group in groups for key in group["params"]]
    own_names = [name for group in groups for name in names_in(group)]
    names = [name for name, _ in shapes]
    if None not in own_names and None not in names:
        for place, has, needs in (("the state dict", own_names, names), ("params", names, own_names)):
            if missing := set(needs) - set(has):
                raise ValueError(f"{place} lacks {min(map(str, missing))!r}")
        by_name = dict(shapes)
        return {key: by_name[name] for key, name in zip(keys, own_names, strict=True)}
    if len(keys) != len(shapes):
        raise ValueError(f"the state dict has {len(keys)} parameters, params has {len(shapes)}")
    return {key: shape for key, (_, shape) in zip(keys, shapes, strict=True)}


def _is_list(values: Any, *types: type) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, types) for value in values)


def _list(entry: Entry) -> str:
    return ", ".join(repr(key) for key in entry) or "nothing"


def _describe(value: Any) -> str:
    return f"of dtype {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
