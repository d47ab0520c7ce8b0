"""How a parameter lies in memory: what the tables of the kernels say of it, and whether it is aligned."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from adafactor.core.contract import Parameter
from adafactor.core.factoring import Factored
from adafactor.core.momentum import BLOCK, BUFFERS, blocks_of
from adafactor.kernels.memory_order import MemoryOrder, flat_order
from adafactor.kernels.triton.sizes import ALIGNMENT, LINE, LINES, NARROW

LIKE_X = ("full", *BUFFERS, "compensation")  # in the state, of X's shape


def factored_axes(parameter: Parameter) -> tuple[int, int]:
    """P and Q: the factored axes in the order of memory, the outer one first; blocks of int8 lie along Q, always."""
    assert isinstance(parameter.factoring, Factored)
    row, col = parameter.factoring.row_axis, parameter.factoring.col_axis
    stride = parameter.x.stride()
    if has_blocks(parameter):
        return min(row, col), max(row, col)
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


def has_blocks(parameter: Parameter) -> bool:
    """Whether there is a momentum in int8, and it is used."""
    return bool(parameter.settings.beta1) and "momentum_scale" in parameter.state


def block_shape(parameter: Parameter) -> tuple[int, int]:
    """The columns of a block of an int8 momentum, and the matrices of a stack that it reaches over, side by side.

    A block is some indices along Q, with all axes that follow. Of an unfactored tensor it is a run of memory.
    """
    blocks = blocks_of(parameter.factoring, parameter.settings)
    if blocks is None or not has_blocks(parameter):
        return BLOCK, 1
    behind = prod(parameter.x.shape[blocks.axis + 1 :])
    return (blocks.length, behind) if isinstance(parameter.factoring, Factored) else (blocks.length * behind, 1)


def block_lanes(parameter: Parameter) -> int:
    """A power of two, of lanes for a block that is no run of BLOCK columns; 0: every block is one, or there is none."""
    columns, matrices = block_shape(parameter)
    is_even = columns == BLOCK and matrices == 1
    if has_blocks(parameter) and not isinstance(parameter.factoring, Factored):
        row = _block_row(parameter)
        is_even &= row == parameter.x.numel() or row % BLOCK == 0
    return 0 if is_even else max(BLOCK, 1 << (columns * matrices - 1).bit_length())


def memory_rows(parameter: Parameter) -> tuple[int, int, int]:
    """The rows of an unfactored tensor for the last pass, their columns, and from where to where they are.

    They are lines of its memory, and its elements one row of columns; or the rows that blocks of any length divide.
    """
    size = parameter.x.numel()
    if block_lanes(parameter):
        row = _block_row(parameter)
        return size // row, row, row
    return -(-size // LINE), size, LINE


def _block_row(parameter: Parameter) -> int:
    """The elements of an unfactored tensor that are divided into blocks together."""
    return prod(parameter.x.shape[parameter.state["momentum_scale"].dim() - 1 :])


def tile_shape(parameter: Parameter) -> tuple[int, int]:
    """The rows and columns of a tile of the last pass; a row that has blocks of int8 begins a line."""
    shape = matrix_shape(parameter)
    if lanes := block_lanes(parameter):
        return LINES, LINE // lanes * block_shape(parameter)[0]
    if shape is None:
        return LINES, parameter.x.numel()
    return (LINES * (LINE // shape[1]), shape[1]) if shape[1] <= NARROW and not has_blocks(parameter) else (LINES, LINE)


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
    if block_lanes(parameter):
        return False
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
