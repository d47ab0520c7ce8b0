"""State dicts of torch optimizers, and what they say of a parameter in nobody's format."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adafactor.core.factoring import STEP_DTYPE, Factored, drop, find_factoring

Shape = tuple[int, ...]
Axes = tuple[int, int]  # of rows and of columns
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
        axis = min(self.means, key=lambda axis: (self.shape[axis], -axis))
        return self.means[axis].unsqueeze(axis)

    def permute(self, order: tuple[int, ...]) -> Moments:
        """Return the same for the parameter `permute(order)`."""
        means = {}
        for axis, mean in self.means.items():
            rest = [a - (a > axis) for a in order if a != axis]
            means[order.index(axis)] = mean.permute(rest)
        full, momentum = (None if t is None else t.permute(order) for t in (self.full, self.momentum))
        return Moments(tuple(self.shape[a] for a in order), self.step, full, means, momentum)

    def check(self, half: bool, name: str) -> None:
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


@dataclass(frozen=True)
class Format:
    """How an optimizer's state holds the moments of a parameter."""

    full: str
    row: str
    col: str
    momentum: str
    keeps_axes: bool = False  # the axis of a mean stays, with length 1
    count: Callable[[int], dict[str, Any]] = lambda step: {"step": torch.tensor(float(step), dtype=STEP_DTYPE)}

    def read(
        self, entry: Entry, axes_of: Callable[[Shape], Axes | None], shape: Shape | None, step: Any, name: str
    ) -> Moments:
        """Read the moments of a parameter whose optimizer factors each shape over known axes.

        Its own shape follows from that, and must be the one that is given, if any; the step is for an entry without.
        """
        steps = count_steps(entry.get("step", step), f"'step' of {name}")
        momentum = _read_tensor(entry, self.momentum, name) if self.momentum in entry else None
        if self.row in entry or self.col in entry:
            row, col = _read_tensor(entry, self.row, name), _read_tensor(entry, self.col, name)
            found, means = self._locate(row, col, axes_of, shape, name)
            moments = Moments(found, steps, means=means, momentum=momentum)
        elif self.full in entry:
            full = _read_tensor(entry, self.full, name)
            moments = Moments(tuple(full.shape), steps, full, momentum=momentum)
        else:
            raise ValueError(f"the state of {name} has neither {self.row!r} nor {self.full!r}; it has {_list(entry)}")
        if shape is not None and moments.shape != shape:
            raise ValueError(f"{name} has the shape {shape}, its state is of the shape {moments.shape}")
        # averages of second moments in half precision drift
        dtypes = {value.dtype for key, value in entry.items() if isinstance(value, Tensor) and key != self.momentum}
        moments.check(not dtypes.isdisjoint(HALF), name)
        return moments

    def write(self, moments: Moments, axes: Axes | None) -> dict[str, Any]:
        """Return the entry of a parameter that is factored over these axes: copies, since the source may go on."""
        if axes is None:
            state = {self.full: moments.unfactored()}
        else:
            state = {self.row: moments.mean(axes[1]), self.col: moments.mean(axes[0])}
            if self.keeps_axes:
                state = {key: t.unsqueeze(axis) for (key, t), axis in zip(state.items(), axes[::-1], strict=True)}
        if moments.momentum is not None:
            state[self.momentum] = moments.momentum
        return self.count(moments.step) | {key: t.clone() for key, t in state.items()}

    def _locate(
        self, row: Tensor, col: Tensor, axes_of: Callable[[Shape], Axes | None], given: Shape | None, name: str
    ) -> tuple[Shape, dict[int, Tensor]]:
        """Find the shape, and the two axes, for which the optimizer would keep statistics of these shapes."""
        fitting: list[tuple[Shape, dict[int, Tensor]]] = []
        dims = row.dim() + (not self.keeps_axes) if row.dim() == col.dim() else 0
        for row_axis, col_axis in itertools.permutations(range(dims), 2):
            r, c = row, col
            if self.keeps_axes:
                if not row.shape[col_axis] == col.shape[row_axis] == 1:
                    continue
                r, c = row.squeeze(col_axis), col.squeeze(row_axis)
            length = c.shape[col_axis - (col_axis > row_axis)]
            shape = (*r.shape[:col_axis], length, *r.shape[col_axis:])
            if tuple(c.shape) == drop(shape, row_axis) and axes_of(shape) == (row_axis, col_axis):
                fitting.append((shape, {col_axis: r, row_axis: c}))
        fitting = [one for one in fitting if one[0] == given] or fitting
        if len(fitting) != 1:
            raise ValueError(
                f"{self.row!r} and {self.col!r} of {name} are {tuple(row.shape)} and {tuple(col.shape)}, not the means "
                f"of rows and of columns of one tensor{'' if given is None else f' of shape {given}'}"
            )
        return fitting[0]


OURS = Format("full", "row", "col", "momentum")


def _read_tensor(entry: Entry, key: str, name: str) -> Tensor:
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


def count_steps(value: Any, name: str) -> int:
    """Return a number of steps as an integer."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = require_elements(value, name).item()
    # NaN is not in the range either
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{name} is {_describe(value)}, not a number of steps")
    return int(value)


def factored_axes(shape: Shape, keywords: Arguments) -> Axes | None:
    """Return the row and the column axis of a tensor with these keywords of ours; None if it is unfactored."""
    names = ("factored", "axes", "min_factored", "per_slice")
    factoring = find_factoring(shape, *(keywords[name] for name in names))
    return (factoring.row_axis, factoring.col_axis) if isinstance(factoring, Factored) else None


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
