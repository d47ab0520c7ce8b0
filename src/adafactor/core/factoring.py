"""From a shape to the statistics that it needs: the one truth for the optimizer, the kernels and the planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import ClassVar

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factored:
    """A tensor (…, n, m) whose second moment is kept as row means (…, n, 1) and column means (…, 1, m) (Algorithm 4).

    `row_axis` indexes the paper's rows and `col_axis` its columns. All other axes are a batch: each of their slices is
    a matrix with factors of its own.
    """

    shape: Shape
    row_axis: int
    col_axis: int
    estimator: str  # "outer", "row" or "column"

    @cached_property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @cached_property
    def statistics(self) -> dict[str, Shape]:
        """The name and shape of every second-moment statistic in the state."""
        keys = {"outer": ("row", "col"), "row": ("row",), "column": ("col",)}[self.estimator]
        return {key: summed(self.shape, self.summed_axis(key)) for key in keys}

    def summed_axis(self, key: str) -> int:
        """The axis over which `state[key]` is a mean, and in which it has length 1: columns for R, rows for C."""
        return self.col_axis if key == "row" else self.row_axis


@dataclass(frozen=True)
class Unfactored:
    """A tensor whose second moment has its own shape (Algorithm 5)."""

    shape: Shape
    estimator: ClassVar[str] = "full"

    @cached_property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @cached_property
    def statistics(self) -> dict[str, Shape]:
        """The name and shape of the second-moment statistic in the state."""
        return {"full": self.shape}


Factoring = Factored | Unfactored

STEP_DTYPE = torch.float32  # torch's own choice; exact up to 16 million steps


@lru_cache
def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every parameter up to float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The precision of scalars and sums: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@lru_cache(maxsize=4096)
def find_factoring(
    shape: Shape,
    factored: str | bool,
    axes: tuple[int, int] | None = None,
    min_factored: int = 0,
    per_slice: bool = False,
) -> Factoring:
    """How a tensor of this shape is treated.

    Fewer than two axes: Algorithm 5. Two: Algorithm 4. More: the two largest are factored (of equals the
    later ones, so that stacked square layers stay a stack), unless `axes` names a (row, column) pair.
    An outer product with a side of length 1 is exact, so such a tensor is unfactored: same update, less state. So is
    one with a factored axis shorter than `min_factored`. A stack of slices is factored as each of them is.
    """
    if per_slice and is_stack(shape):
        one = find_factoring(shape[1:], factored, axes, min_factored)
        if not isinstance(one, Factored):
            return Unfactored(shape)
        return Factored(shape, one.row_axis + 1, one.col_axis + 1, one.estimator)
    if factored is False or len(shape) < 2 or prod(shape) == 0:
        return Unfactored(shape)
    row, col = _largest_two(shape) if axes is None else _by_hand(shape, axes)
    shorter = min(shape[row], shape[col])
    if shorter < min_factored or (factored == "outer" and shorter == 1):
        return Unfactored(shape)
    return Factored(shape, row, col, str(factored))


def is_stack(shape: Shape) -> bool:
    """Whether there are slices to step by themselves: a matrix is no stack of vectors, and nothing is no stack."""
    return len(shape) > 2 and prod(shape) > 0


def summed(shape: Shape, axis: int) -> Shape:
    """The shape of a sum over one axis, which stays with length 1."""
    return *shape[:axis], 1, *shape[axis + 1 :]


def _largest_two(shape: Shape) -> tuple[int, int]:
    later_of_equals = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))
    row, col = sorted(later_of_equals[-2:])
    return row, col


def _by_hand(shape: Shape, axes: tuple[int, int]) -> tuple[int, int]:
    if any(not -len(shape) <= axis < len(shape) for axis in axes):
        raise ValueError(f"axes={axes} must be axes of the tensor, whose shape is {shape}")
    row, col = (axis % len(shape) for axis in axes)
    if row == col:
        raise ValueError(f"axes={axes} must be two different axes of the tensor, whose shape is {shape}")
    return row, col
