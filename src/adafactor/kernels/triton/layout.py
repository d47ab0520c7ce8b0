"""How a parameter lies in memory: what the tables of the kernels say of it, and whether it is aligned."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from adafactor.core.contract import Parameter
from adafactor.core.factoring import Factored
from adafactor.core.momentum import BLOCK
from adafactor.kernels.memory_order import MemoryOrder, flat_order
from adafactor.kernels.triton.sizes import ALIGNMENT

LIKE_X = ("full", "momentum", "momentum_int8", "compensation")  # in the state, of X's shape


def factored_axes(parameter: Parameter) -> tuple[int, int]:
    """P and Q: the factored axes in the order of memory, the outer one first."""
    assert isinstance(parameter.factoring, Factored)
    row, col = parameter.factoring.row_axis, parameter.factoring.col_axis
    stride = parameter.x.stride()
    return (col, row) if stride[row] < stride[col] else (row, col)


def matrix_shape(parameter: Parameter) -> tuple[int, int] | None:
    """The lengths of P and Q; None: the parameter is unfactored."""
    if not isinstance(parameter.factoring, Factored):
        return None
    p, q = factored_axes(parameter)
    return parameter.x.shape[p], parameter.x.shape[q]


def factors_along(parameter: Parameter) -> tuple[str, str]:
    """The names in the state of the factors along P and Q: the paper's rows may be either axis."""
    assert isinstance(parameter.factoring, Factored)
    is_row = factored_axes(parameter)[0] == parameter.factoring.row_axis
    return ("row", "col") if is_row else ("col", "row")


def has_even_blocks(parameter: Parameter) -> bool:
    """Whether every block of an int8 momentum is BLOCK elements in a row, but for the last one of a row."""
    x, scale = parameter.x, parameter.state["momentum_scale"]
    axis = scale.dim() - 1
    if prod(x.shape[axis + 1 :]) > 1:  # a block is a few indices, with all that follows
        return False
    if isinstance(parameter.factoring, Factored):
        return factored_axes(parameter)[1] == axis and scale.stride(axis) == 1
    is_even = x.shape[axis] in (x.numel(), x.shape[axis] // BLOCK * BLOCK)
    return is_even and x.is_contiguous() and scale.is_contiguous()


def memory_order(parameter: Parameter) -> MemoryOrder | str:
    """The order of memory of an unfactored tensor, or why there is none."""
    return flat_order(tuple(parameter.x.shape), parameter.x.stride(), parameter.gradient.stride)


def number_strides(shape: Sequence[int]) -> list[int]:
    """What is added to an element's number along each axis of the whole parameter."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def matrix_offsets(shape: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Where each matrix of a stack begins, along these axes."""
    found = torch.zeros((), dtype=torch.int64)
    for axis in axes:
        found = found.unsqueeze(-1) + torch.arange(shape[axis]) * strides[axis]
    offsets: list[int] = found.reshape(-1).tolist()
    return offsets


def is_aligned(parameter: Parameter) -> bool:
    """Whether 16 bytes can be read at once everywhere, as far as it does not depend on the gradient's address."""
    x, form, state = parameter.x, parameter.gradient, parameter.state
    same_shape = [state[key] for key in LIKE_X if key in state]
    if any(t.data_ptr() % ALIGNMENT for t in (x, *same_shape)):
        return False
    if not isinstance(parameter.factoring, Factored):
        return x.numel() % 16 == 0
    q = factored_axes(parameter)[1]
    return x.shape[q] % 16 == 0 and all(
        stride[axis] == 1 if axis == q else stride[axis] % 16 == 0 or x.shape[axis] == 1
        for stride in (x.stride(), form.stride)
        for axis in range(x.dim())
    )
