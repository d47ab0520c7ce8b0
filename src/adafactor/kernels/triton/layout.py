"""How a parameter lies in memory, as a stack of n × m matrices, and how these are divided among programs.

Both follow from a tensor's own shape, dtypes and strides, so its bits do not depend on what steps beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from adafactor.core import momentum
from adafactor.core.contract import Parameter
from adafactor.core.factoring import Factored

LONGEST = 2**30  # elements of an axis: they are counted in 32 bits
ROW = 16384  # elements of the longest row: a program of the first pass has it to itself
LINE = 512  # elements of the longest line that a program of the last pass takes at a time
Axes = tuple[int, ...]


class Strides(NamedTuple):
    """What is added to an address from a matrix, a row or a column to the next."""

    stack: int
    row: int
    col: int = 0


NO_STRIDES = Strides(0, 0)


class Layout(NamedTuple):
    """A stack of matrices; an unfactored tensor is n lines of memory, the last of which may be shorter, and m is all.

    `x` and `g` are strides of X and G, `numbers` those of an element's number in the whole parameter.
    """

    matrices: int
    n: int
    m: int
    x: Strides
    g: Strides
    numbers: Strides
    number: int  # of the first element
    axes: tuple[int, int] = (0, 0)  # of n and of m
    names: tuple[str, str] = ("", "")  # in the state, of the factors along n and along m; of an unfactored tensor none
    row: Strides = NO_STRIDES  # of these factors; `row` is that of an element
    col: Strides = NO_STRIDES
    scale: Strides = NO_STRIDES  # of an int8 momentum's scales


class Refused(Exception):
    """Why a parameter cannot be stepped here."""


def layout_of(parameter: Parameter) -> Layout:
    """Describe a parameter, or raise Refused."""
    return _factored(parameter) if isinstance(parameter.factoring, Factored) else _unfactored(parameter)


def _unfactored(parameter: Parameter) -> Layout:
    """Take it line by line, as it lies in memory."""
    x, strides = parameter.x, zip(parameter.x.shape, parameter.x.stride(), parameter.gradient.stride, strict=True)
    if not x.is_contiguous() or any(length > 1 and own != other for length, own, other in strides):
        raise Refused("its second moment is kept whole, and it or its gradient is not contiguous")
    if parameter.settings.beta1 and "momentum_scale" in parameter.state:
        raise Refused("its second moment is kept whole, and its momentum in int8")
    if x.shape[1:] != parameter.shape[1:]:
        raise Refused("its second moment is kept whole, and cut between ranks along another axis than the first")
    line = line_of(x.numel())
    lines = Strides(0, line, 1)
    return Layout(1, -(-x.numel() // line), x.numel(), lines, lines, lines, _numbering(parameter)[1])


def _factored(parameter: Parameter) -> Layout:
    """Let the factored axis of the smaller stride be the columns, whichever the paper calls so."""
    x, shape, f, state = parameter.x, tuple(parameter.x.shape), parameter.factoring, parameter.state
    assert isinstance(f, Factored)
    p, q = sorted((f.row_axis, f.col_axis), key=lambda axis: (-x.stride()[axis], axis))
    others = tuple(axis for axis in range(x.dim()) if axis not in (p, q))
    names = ("row", "col") if p == f.row_axis else ("col", "row")
    scale = state.get("momentum_scale") if parameter.settings.beta1 else None
    if scale is not None:
        blocks, is_plain = momentum.blocks_of(f, parameter.settings), x.is_contiguous() and scale.is_contiguous()
        if not is_plain or q != x.dim() - 1 or blocks != (q, momentum.BLOCK):
            raise Refused(f"the blocks of its int8 momentum are not {momentum.BLOCK} elements of a row in memory")
    if shape[q] > ROW:
        raise Refused(f"its rows have more than {ROW:,} elements")
    partial = {"rows", "cols" if names[0] == "col" else "rows"}  # where rows in memory are cut, the means along them
    if parameter.shard is not None and partial & set(parameter.shard.partial):
        raise Refused("its rows are cut between ranks")

    def strides_of(strides: Sequence[int], *axes: int) -> Strides:
        if (stack := merge(shape, strides, others)) is None:
            raise Refused("its batch axes have gaps in memory")
        return Strides(stack, *(strides[axis] for axis in axes))

    steps, number = _numbering(parameter)
    own = [strides_of(strides, p, q) for strides in (x.stride(), parameter.gradient.stride, steps)]
    if max(shape) >= LONGEST or max(shape[q] * strides.col for strides in own) >= LONGEST:
        raise Refused("its axes are too long")
    beside = (state.get(names[0]), p), (state.get(names[1]), q), (scale, p)
    along = [NO_STRIDES if t is None else strides_of(t.stride(), axis) for t, axis in beside]
    stack = prod(shape[axis] for axis in others)
    (x_strides, g_strides, numbers), (row, col, scales) = own, along
    return Layout(stack, shape[p], shape[q], x_strides, g_strides, numbers, number, (p, q), names, row, col, scales)


def _numbering(parameter: Parameter) -> tuple[list[int], int]:
    """What is added to an element's number in the whole parameter along each axis, and the number of the first."""
    steps = [prod(parameter.shape[axis + 1 :]) for axis in range(len(parameter.shape))]
    return steps, sum(map(int.__mul__, steps, parameter.offset or (0,) * len(steps)))


def merge(shape: Axes, strides: Sequence[int], axes: Axes) -> int | None:
    """Return the one stride of several axes taken together: 0 for none of them, None if they cannot be."""
    long = [axis for axis in axes if shape[axis] > 1]
    for outer, inner in zip(long, long[1:], strict=False):
        if strides[outer] != strides[inner] * shape[inner]:
            return None
    return strides[long[-1]] if long else 0


def line_of(m: int) -> int:
    """Return the columns of a tile of the last pass, of so many of a matrix."""
    return min(LINE, max(8, 1 << (m - 1).bit_length()))


class Tiling(NamedTuple):
    """How the first pass holds rows: what it is compiled for, and how rows are divided among programs."""

    rows: int
    chunk: int
    chunks: int
    warps: int
    unit: int
    units: int


@lru_cache(maxsize=4096)
def tiling(matrices: int, n: int, m: int) -> Tiling:
    """Hold 8192 elements with 8 warps, or 16384 with 16, of as many rows as fit; a thread loads 4 of them at once."""
    size = max(8, 1 << (m - 1).bit_length())
    warps = 16 if size > 8192 else 8
    rows, chunk, chunks = 4096 // size, size, 1
    if m > 128:
        rows = max(1, 8192 // size)
        chunk = 128 * warps // rows
        chunks = -(-m // chunk)
    unit = max(16, 4 * rows)
    while unit < n and matrices * -(-n // unit) > max(1, min(512, 2**23 // m)):  # of column sums: at most 64 MB
        unit *= 2
    return Tiling(rows, chunk, chunks, warps, unit, -(-n // unit))
