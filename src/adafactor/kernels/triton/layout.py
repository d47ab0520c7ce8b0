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
from adafactor.core.factoring import Factored, statistics_dtype

LONGEST = 2**30  # elements of an axis: they are counted in 32 bits
ROW = 16384  # elements of the longest row that a program of the first pass has to itself
TILE, LINE = 2048, 512  # elements that a program of the last pass takes at a time, and of the longest line of them
Axes = tuple[int, ...]


class Strides(NamedTuple):
    """What is added to an address from a matrix, a row or a column to the next."""

    stack: int
    row: int
    col: int = 0


NO_STRIDES = Strides(0, 0)


class Layout(NamedTuple):
    """A stack of matrices; an unfactored tensor is one, mostly of `flat` memory: then m is the number of elements."""

    matrices: int
    n: int
    m: int
    x: Strides
    g: Strides
    number: int  # of the first element in the whole parameter
    numbers: Strides
    scale: Strides = NO_STRIDES  # of an int8 momentum's scales
    is_flat: bool = False
    axes: tuple[int, int] = (0, 0)  # of n and of m
    names: tuple[str, str] = ("", "")  # in the state, of the factors along n and along m; of an unfactored tensor none
    row: Strides = NO_STRIDES  # of these factors; `row` is that of an element
    col: Strides = NO_STRIDES

    @property
    def is_aligned(self) -> bool:
        """Whether a thread of the first pass can load 16 bytes at once."""
        return self.g.col == 1 and self.m % 16 == self.g.row % 16 == self.g.stack % 16 == 0


def layout_of(parameter: Parameter) -> Layout | str:
    """Describe a parameter, or say why it cannot be stepped here."""
    x, s, f = parameter.x, parameter.settings, parameter.factoring
    has_blocks = bool(s.beta1) and "momentum_scale" in parameter.state
    if has_blocks:
        blocks = momentum.blocks_of(f, s)
        is_plain = x.is_contiguous() and parameter.state["momentum_scale"].is_contiguous()
        if blocks is None or blocks != (x.dim() - 1, momentum.BLOCK) or not is_plain:
            return f"the blocks of its int8 momentum are not {momentum.BLOCK} elements of a row in memory"
    layout = _factored(parameter, has_blocks) if isinstance(f, Factored) else _unfactored(parameter, has_blocks)
    if isinstance(layout, Layout) and draws_words(parameter) and layout.numbers.col * LINE >= 2**31:
        return "its neighbours in memory are numbered too far apart for stochastic rounding"
    return layout


def draws_words(parameter: Parameter) -> bool:
    """Whether X or the momentum is rounded at random."""
    s, state = parameter.settings, parameter.state
    return parameter.rounding == "stochastic" or momentum.is_rounded(state, s, statistics_dtype(parameter.x.dtype))


def _unfactored(parameter: Parameter, has_blocks: bool) -> Layout | str:
    """Take it as it lies in memory; in rows where these have blocks."""
    x, shape = parameter.x, tuple(parameter.x.shape)
    long = [axis for axis in range(x.dim()) if shape[axis] > 1]
    if any(x.stride(axis) != parameter.gradient.stride[axis] for axis in long):
        return "its gradient has another order in memory"
    order = tuple(sorted(long, key=x.stride, reverse=True))
    if long and (x.stride(order[-1]) != 1 or merge(shape, x.stride(), order) is None):
        return "it has gaps in memory and its second moment is kept whole"
    steps, number = _numbering(parameter)
    step = merge(shape, steps, order)
    if step is None and draws_words(parameter):
        return "its elements, in the order of memory, are not numbered in even steps, as stochastic rounding needs"
    step = step or 0
    line = shape[-1] if has_blocks else line_of(x.numel())
    strides, numbers = Strides(0, line, 1), Strides(0, line * step, step)
    scale = Strides(0, -(-line // momentum.BLOCK)) if has_blocks else NO_STRIDES
    m = line if has_blocks else x.numel()
    return Layout(1, -(-x.numel() // line), m, strides, strides, number, numbers, scale, is_flat=not has_blocks)


def _factored(parameter: Parameter, has_blocks: bool) -> Layout | str:
    """Let the factored axis of the smaller stride be the columns, whichever the paper calls so."""
    x, shape, f = parameter.x, tuple(parameter.x.shape), parameter.factoring
    assert isinstance(f, Factored)
    p, q = sorted((f.row_axis, f.col_axis), key=lambda axis: (0 if has_blocks else -x.stride()[axis], axis))
    others = tuple(axis for axis in range(x.dim()) if axis not in (p, q))
    names = ("row", "col") if p == f.row_axis else ("col", "row")

    def strides_of(strides: Sequence[int], *axes: int) -> Strides | None:
        stack = merge(shape, strides, others)
        return None if stack is None else Strides(stack, *(strides[axis] for axis in axes))

    steps, number = _numbering(parameter)
    own = [strides_of(strides, p, q) for strides in (x.stride(), parameter.gradient.stride, steps)]
    factors = [parameter.state.get(name) for name in names]
    along = [NO_STRIDES if t is None else strides_of(t.stride(), axis) for t, axis in zip(factors, (p, q), strict=True)]
    scale = strides_of(parameter.state["momentum_scale"].stride(), p) if has_blocks else NO_STRIDES
    found = [strides for strides in (*own, scale, *along) if strides is not None]
    if len(found) < 6:
        return "its batch axes have gaps in memory"
    if max(shape) >= LONGEST or max(shape[q] * strides.col for strides in found[:2]) >= LONGEST:
        return "its axes are too long"
    if parameter.shard is not None and (shape[q] > ROW or names[0] == "col" or "rows" in parameter.shard.partial):
        return "its rows are too long for a sharded step, or cut between ranks"
    stack = prod(shape[axis] for axis in others)
    x_strides, g_strides, numbers, scale, row, col = found
    return Layout(
        stack, shape[p], shape[q], x_strides, g_strides, number, numbers, scale, False, (p, q), names, row, col
    )


def _numbering(parameter: Parameter) -> tuple[list[int], int]:
    """What is added to an element's number in the whole parameter along each axis, and the number of the first."""
    whole = parameter.shape
    steps = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    return steps, sum(map(int.__mul__, steps, parameter.offset or (0,) * len(whole)))


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
    parts: int
    unit: int
    units: int


@lru_cache(maxsize=4096)
def tiling(matrices: int, n: int, m: int) -> Tiling:
    """Hold 8192 elements with 8 warps, or 16384 with 16, of as many rows as fit; a thread loads 4 of them at once."""
    size, parts = max(8, 1 << (min(m, ROW) - 1).bit_length()), -(-m // ROW)
    warps = 16 if size > 8192 else 8
    rows, chunk, chunks = 4096 // size, size, 1
    if m > 128:
        rows = max(1, 8192 // size)
        chunk = 128 * warps // rows
        chunks = -(-m // (chunk * parts))
    unit = max(16, 4 * rows)
    while unit < n and matrices * -(-n // unit) > max(1, min(512, 2**23 // m)):  # of column sums: at most 64 MB
        unit *= 2
    return Tiling(rows, chunk, chunks, warps, parts, unit, -(-n // unit))
