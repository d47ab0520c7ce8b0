"""How a tensor lies in memory, and the way the loops go through it without a copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adafactor.layout import statistics_dtype

if TYPE_CHECKING:
    from adafactor.step import Update

UNIT = 2**15  # elements that are worth a thread's attention
STORED = {
    torch.float32: np.zeros(1, np.float32),
    torch.float64: np.zeros(1, np.float64),
    torch.bfloat16: np.zeros(1, np.uint16),
    torch.float16: np.zeros(1, np.int16),
}
Kind = tuple[Any, Any, Any]  # arrays of the types of X, G and the statistics, from which Numba knows what to compile
KINDS: dict[tuple[torch.dtype, torch.dtype], Kind] = {
    (x, g): (STORED[x], STORED[g], STORED[statistics_dtype(x)])
    for x, g in itertools.product(STORED, STORED)
    if g != torch.float64 or x == torch.float64
}


@dataclass(frozen=True)
class Path:
    """How a tensor is walked: B, P, S, Q, K of `native`, the strides of X and G along B, P and S, and its units."""

    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int, int]
    rows: int  # P's per unit
    cuts: int  # units per B
    groups: tuple[tuple[int, ...], ...]  # which axes, in the order of memory, are B, P, S and Q·K
    order: tuple[int, ...] = ()  # the axes in the order of memory
    axes: tuple[int, int] = (0, 0)  # which of them are P and Q

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The first columns of a job."""
        return (*self.sizes, *self.strides, self.rows, self.cuts)

    @property
    def carries(self) -> bool:
        """Can a step carry ΣX² over to the next?"""
        return bool(self.order) and self.sizes[4] == 1

    @cached_property
    def rows_in_all(self) -> int:
        """The length of R along P, over the whole batch."""
        b, p, s, _, k = self.sizes
        return b * p * s * k

    @cached_property
    def room(self) -> int:
        """Doubles that `native.furnish` will ask for."""
        b, p, s, q, k = self.sizes
        row, col, means = (b * p * s * k, b * s * q * k, b * s * k) if self.order else (0, 0, 0)
        return 2 * (row + col) + means + 2 * col * self.cuts + 3 * b * self.cuts

    @cached_property
    def plain(self) -> bool:
        """Does the walk take the axes in their own order?"""
        return self.order == tuple(range(len(self.order)))


def find_path(u: Update) -> Path | str:
    """The path through a parameter, or why there is none."""
    x, g, strides = u.x, u.g, u.x.stride()
    if not (x.is_cpu and g.is_cpu):
        return f"it is on {x.device}"
    if (x.dtype, g.dtype) not in KINDS:
        return f"there is no loop for a {x.dtype} parameter with a {g.dtype} gradient"
    for key in ("full", "momentum", "compensation"):
        if key in u.state and u.state[key].stride() != strides and x.numel() > 1:
            return "its state has another order in memory"
    if u.layout.row_axis is None or u.layout.col_axis is None:
        path = _flat_path(x.shape, strides, g.stride())
    else:
        path = _path(x.shape, strides, g.stride(), u.layout.row_axis, u.layout.col_axis)
    if u.rounding == "stochastic" and isinstance(path, Path) and numbering(path, x.shape, u.shape, u.place) is None:
        return "its elements, in the order of memory, are not numbered in even steps, as stochastic rounding needs"
    return path


@lru_cache(maxsize=4096)
def numbering(
    path: Path, part: tuple[int, ...], whole: tuple[int, ...], place: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The number in the whole of the part's first element, and what is added to it along B, P, S and Q·K."""
    row_by_row = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    steps = [_merge(part, row_by_row, axes) for axes in path.groups]
    origin = sum(step * start for step, start in zip(row_by_row, place or (), strict=False))
    return None if None in steps else (origin, *(step or 0 for step in steps))


@lru_cache(maxsize=4096)
def _flat_path(shape: tuple[int, ...], x: tuple[int, ...], g: tuple[int, ...]) -> Path | str:
    long = [axis for axis in range(len(shape)) if shape[axis] > 1]
    if any(x[axis] != g[axis] for axis in long):
        return "its gradient has another order in memory"
    width = 1
    for axis in sorted(long, key=lambda axis: x[axis]):
        if x[axis] != width:
            return "it has gaps in memory and its second moment is kept whole"
        width *= shape[axis]
    size = prod(shape)
    cuts = -(-size // UNIT)
    every = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -x[axis], axis)))
    return Path((1, size, 1, 1, 1), (0, 1, 0, 0, 1, 0), UNIT, cuts, ((), every, (), ()))


@lru_cache(maxsize=4096)
def _path(shape: tuple[int, ...], x: tuple[int, ...], g: tuple[int, ...], row: int, col: int) -> Path | str:
    # an axis of length 1 may have any stride: it goes first
    order = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -x[axis], axis)))
    first, second = sorted((order.index(row), order.index(col)))
    outer, middle, inner = order[:first], order[first + 1 : second], order[second + 1 :]
    p, q = shape[order[first]], shape[order[second]]
    b, s, k = (prod(shape[axis] for axis in axes) for axes in (outer, middle, inner))
    steps: list[int] = []
    for strides in (x, g):
        along = [_merge(shape, strides, axes) for axes in (outer, middle, order[second:])]
        if along[2] is None or (q * k > 1 and along[2] != 1):
            return "its lines have gaps in memory" if strides is x else "its gradient has another order in memory"
        if along[0] is None or along[1] is None:
            return "its batch axes have gaps in memory"
        steps += [along[0], strides[order[first]], along[1]]
    rows, cuts = _units(p, s * q * k)
    xb, xp, xs, gb, gp, gs = steps
    groups, axes = (outer, order[first : first + 1], middle, order[second:]), (order[first], order[second])
    return Path((b, p, s, q, k), (xb, xp, xs, gb, gp, gs), rows, cuts, groups, order, axes)


def _merge(shape: tuple[int, ...], strides: Sequence[int], axes: tuple[int, ...]) -> int | None:
    """The one stride of neighbouring axes taken together: 0 for none of them, None if they cannot be."""
    long = [axis for axis in axes if shape[axis] > 1]
    for outer, inner in zip(long, long[1:], strict=False):
        if strides[outer] != strides[inner] * shape[inner]:
            return None
    return strides[long[-1]] if long else 0


def _units(p: int, line: int) -> tuple[int, int]:
    """P's per unit and units: enough for many threads, few enough that their column sums stay a small part."""
    most = max(min(16, p // 64), min(32, p // 512), 1)
    cuts = max(1, min(most, p * line // UNIT))
    rows = -(-p // cuts)
    rows += -rows % 4
    return rows, -(-p // rows)
