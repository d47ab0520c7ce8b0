"""From a shape to the statistics that it needs: the one truth for the optimizer, the kernels and the planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch


@dataclass(frozen=True)
class Factoring:
    """Which axes of a tensor are factored, and the shape of each statistic.

    `row_axis` indexes the paper's rows and `col_axis` its columns; both are None for a tensor whose second
    moment is kept whole. All other axes are a batch: each of their slices is a matrix with factors of its own.
    """

    shape: tuple[int, ...]
    row_axis: int | None
    col_axis: int | None
    estimator: str  # "outer", "row", "column" or "full"

    @cached_property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @cached_property
    def statistics(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every second-moment statistic in the state."""
        if self.estimator == "full":
            return {"full": self.shape}
        assert self.row_axis is not None and self.col_axis is not None
        shapes = {"row": self._without(self.col_axis), "col": self._without(self.row_axis)}
        keys = {"outer": ("row", "col"), "row": ("row",), "column": ("col",)}[self.estimator]
        return {key: shapes[key] for key in keys}

    def state_bytes(self, dtype: torch.dtype, momentum: bool, compensation: bool = False) -> int:
        """The bytes of a parameter's state: statistics, momentum and compensation where used, and the step count."""
        elements = sum(prod(shape) for shape in self.statistics.values())
        elements += self.count if momentum else 0
        kept = self.count * dtype.itemsize if compensation and dtype.itemsize < 4 else 0
        return elements * statistics_dtype(dtype).itemsize + kept + STEP_DTYPE.itemsize

    def _without(self, axis: int) -> tuple[int, ...]:
        return self.shape[:axis] + self.shape[axis + 1 :]


STEP_DTYPE = torch.float32  # torch's own choice; exact up to 16 million steps


@lru_cache
def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every parameter up to float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The precision of scalars and sums: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@lru_cache(maxsize=4096)
def find_factoring(shape: tuple[int, ...], factored: str | bool, axes: tuple[int, int] | None = None) -> Factoring:
    """How a tensor of this shape is treated.

    Fewer than two axes: Algorithm 5. Two: Algorithm 4. More: the two largest are factored (of equals the
    later ones, so that stacked square layers stay a stack), unless `axes` names a (row, column) pair.
    An outer product with a side of length 1 is exact, so such a tensor is kept whole: same update, less state.
    """
    if factored is False or len(shape) < 2 or prod(shape) == 0:
        return Factoring(shape, None, None, "full")
    row, col = _largest_two(shape) if axes is None else _by_hand(shape, axes)
    if factored == "outer" and 1 in (shape[row], shape[col]):
        return Factoring(shape, None, None, "full")
    return Factoring(shape, row, col, str(factored))


def _largest_two(shape: tuple[int, ...]) -> tuple[int, int]:
    later_of_equals = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))
    row, col = sorted(later_of_equals[-2:])
    return row, col


def _by_hand(shape: tuple[int, ...], axes: tuple[int, int]) -> tuple[int, int]:
    if any(not -len(shape) <= axis < len(shape) for axis in axes):
        raise ValueError(f"axes={axes} must be axes of the tensor, whose shape is {shape}")
    row, col = (axis % len(shape) for axis in axes)
    if row == col:
        raise ValueError(f"axes={axes} must be two different axes of the tensor, whose shape is {shape}")
    return row, col
