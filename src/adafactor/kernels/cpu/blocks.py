"""Which tensors are stepped block by block and not line by line, and tables of where their blocks lie."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from adafactor.core.contract import Parameter
from adafactor.core.momentum import BLOCK, Blocks, blocks_of
from adafactor.kernels.memory_order import WIDTH, MemoryOrder, draws_words, numbering

LONGEST_STEP = 2**32 // WIDTH  # from one element's number to the next: a stretch of a line spans 32 bits at most


def are_elsewhere(parameter: Parameter, order: MemoryOrder) -> bool:
    """Whether the blocks of an int8 momentum, or the numbers of random words, do not follow lines of memory."""
    x, state = parameter.x, parameter.state
    blocks = blocks_of(parameter.factoring, parameter.settings) if "momentum_scale" in state else None
    if blocks is not None:
        is_line = not order.factored or prod(order.sizes[3:]) == prod(x.shape[blocks.axis :])
        if not (is_line and x.is_contiguous() and state["momentum_scale"].is_contiguous()):
            return True
    if not draws_words(parameter):
        return False
    numbers = numbering(order, tuple(x.shape), parameter.shape, parameter.offset)
    return numbers is None or numbers[4 if order.factored else 2] >= LONGEST_STEP


def lay_out(job: Any, parameter: Parameter, order: MemoryOrder) -> tuple[Any, Any]:
    """Describe where blocks lie; return the tables: of the axes along which there are blocks, and of one block."""
    shape, whole = tuple(parameter.x.shape), parameter.shape
    blocks, scales = blocks_of(parameter.factoring, parameter.settings), [0] * len(shape)
    if blocks is not None and "momentum_scale" in parameter.state:
        scales[: blocks.axis + 1] = parameter.state["momentum_scale"].stride()
    else:
        blocks = _runs(shape, whole)
    axis, length = blocks
    behind, numbers = prod(shape[axis + 1 :]), [prod(whole[i + 1 :]) for i in range(len(whole))]
    vectors = _strides(shape, order, order.axes[1]), _strides(shape, order, order.axes[0])  # R along P, C along Q
    elements = parameter.x.stride(), parameter.gradient.stride, *vectors, numbers

    axes = [[shape[i], *(of[i] for of in elements), scales[i], 0] for i in range(axis)]
    along = (length * of[axis] for of in elements)
    axes.append([-(-shape[axis] // length), *along, scales[axis], length * behind])
    axes.sort(key=lambda row: -row[1])  # in the order of memory, so that neighbours come one after the other
    offsets = [offsets_of((length, *shape[axis + 1 :]), of[axis:]) for of in elements[:4]]
    tables = np.array(axes, np.int64), np.array(offsets, np.int64)
    job["blocks"], job["block"], job["block_line"] = prod(row[0] for row in axes), length * behind, shape[axis] * behind
    job["block_axes"], job["block_offsets"] = (table.ctypes.data for table in tables)
    job["block_axis_count"] = len(axes)
    job["origin"] = sum(step * start for step, start in zip(numbers, parameter.offset or (), strict=False))
    return tables


def _runs(shape: tuple[int, ...], whole: tuple[int, ...]) -> Blocks:
    """Blocks of at most BLOCK elements, where any will do whose elements are numbered one after the other."""
    axis = len(shape) - 1
    while axis > 0 and prod(shape[axis:]) < BLOCK and shape[axis:] == whole[axis:]:
        axis -= 1
    return Blocks(axis, max(1, BLOCK // prod(shape[axis + 1 :])))


def _strides(shape: tuple[int, ...], order: MemoryOrder, gone: int) -> list[int]:
    """The strides of a vector of the scratch, which lies in the order of memory without one axis."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order.order):
        if axis != gone:
            strides[axis], step = step, step * shape[axis]
    return strides


def offsets_of(sizes: Sequence[int], strides: Sequence[int]) -> Any:
    """Where the elements of a tensor, row by row, lie in its memory."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        offsets = np.add.outer(offsets, stride * np.arange(size)).reshape(-1)
    return offsets
