"""How a tensor lies in memory, and the order in which the compiled loops walk it without a copy.

Nothing here needs NumPy or Numba: the planner asks it for sizes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch

from adafactor.core.contract import Parameter
from adafactor.core.factoring import Factored, statistics_dtype
from adafactor.core.momentum import BUFFERS, is_rounded

CHUNK = 2**15  # elements: the least that a thread takes (measured: below it the hand-over costs more)
WIDTH = 2048  # numbers of a line that are summed in the statistics' precision; in double beyond
RESULTS = 4  # numbers that a chunk leaves for the end of a phase
STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # the types that there are loops for

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class MemoryOrder:
    """How a tensor is walked.

    Its axes are, in the order of memory, B × P × S × Q × K: P and Q are the two factored axes, P the outer one, and B,
    S, K are the other axes before, between and after them. An unfactored tensor is all P.
    """

    sizes: tuple[int, int, int, int, int]  # B, P, S, Q, K
    strides: tuple[int, int, int, int, int, int]  # of X along B, P, S, and of G
    rows: int  # P's per chunk
    chunks: int  # per B
    groups: tuple[tuple[int, ...], ...]  # which axes are B, P, S and Q·K
    order: tuple[int, ...] = ()  # the axes in the order of memory; () if unfactored
    axes: tuple[int, int] = (0, 0)  # which of them are P and Q

    @property
    def factored(self) -> bool:
        """Is the second moment factored?"""
        return bool(self.order)

    @property
    def can_carry_x2(self) -> bool:
        """Can a step carry ΣX² over to the next? X is summed two lines at a time, part by part or slice by slice."""
        return self.factored and self.sizes[1] > 1 and self.sizes[4] <= WIDTH

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the vectors that a step needs besides the state, its scratch, in doubles.

        They are R and C, 1/√R and 1/√C, mean(R) of every slice, and for every chunk sums and energies of its columns
        and RESULTS.
        """
        b, p, s, q, k = self.sizes
        batch = b * s * k if self.factored else 0
        row, col = p * batch, q * batch
        return row, col, row, col, batch, col * self.chunks, col * self.chunks, RESULTS * b * self.chunks

    @property
    def scratch(self) -> int:
        """The size of the scratch, in doubles."""
        return sum(self.lengths)


def find_memory_order(parameter: Parameter) -> MemoryOrder | str:
    """Find the order in which a parameter can be walked with gradients of the form it has, or say why there is none."""
    x, form, factoring = parameter.x, parameter.gradient, parameter.factoring
    if not stored(x.dtype, form.dtype):
        return f"there is no loop for a {x.dtype} parameter with a {form.dtype} gradient"
    for key in ("full", *BUFFERS, "compensation"):
        if key in parameter.state and parameter.state[key].stride() != x.stride() and x.numel() > 1:
            return "its state has another order in memory"
    shape = tuple(x.shape)
    if isinstance(factoring, Factored):
        return factored_order(shape, x.stride(), form.stride, factoring.row_axis, factoring.col_axis)
    return flat_order(shape, x.stride(), form.stride)


def draws_words(parameter: Parameter) -> bool:
    """Is X, or the momentum, rounded at random?"""
    return parameter.rounding == "stochastic" or has_rounded_momentum(parameter)


def has_rounded_momentum(parameter: Parameter) -> bool:
    """Is there a momentum, and stored with fewer bits than it is computed with?"""
    return is_rounded(parameter.state, parameter.settings, statistics_dtype(parameter.x.dtype))


@lru_cache(maxsize=4096)
def numbering(
    order: MemoryOrder, part: tuple[int, ...], whole: tuple[int, ...], place: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The number in the whole of the part's first element, and what is added to it along B, P, S and Q·K."""
    row_by_row = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    steps = [_merge(part, row_by_row, axes) for axes in order.groups]
    origin = sum(step * start for step, start in zip(row_by_row, place or (), strict=False))
    return None if None in steps else (origin, *(step or 0 for step in steps))


def stored(x: torch.dtype, g: torch.dtype) -> bool:
    """Are there loops for a parameter and a gradient of these types?"""
    return x in STORED and g in STORED and (g != torch.float64 or x == torch.float64)


@lru_cache(maxsize=4096)
def flat_order(shape: Sizes, x: Sizes, g: Sizes) -> MemoryOrder | str:
    """Find the order for an unfactored tensor, given the strides of X and G: all but gaps."""
    long = [axis for axis in range(len(shape)) if shape[axis] > 1]
    if any(x[axis] != g[axis] for axis in long):
        return "its gradient has another order in memory"
    width = 1
    for axis in sorted(long, key=lambda axis: x[axis]):
        if x[axis] != width:
            return "it has gaps in memory and its second moment is kept whole"
        width *= shape[axis]
    size = prod(shape)
    chunks = -(-size // CHUNK)
    every = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -x[axis], axis)))
    return MemoryOrder((1, size, 1, 1, 1), (0, 1, 0, 0, 1, 0), CHUNK, chunks, ((), every, (), ()))


@lru_cache(maxsize=4096)
def factored_order(shape: Sizes, x: Sizes, g: Sizes, row: int, col: int) -> MemoryOrder | str:
    """Find the order for a factored tensor, given the strides of X and G: that of memory."""
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
    rows, chunks = _chunks(p, s * q * k)
    xb, xp, xs, gb, gp, gs = steps
    groups, axes = (outer, order[first : first + 1], middle, order[second:]), (order[first], order[second])
    return MemoryOrder((b, p, s, q, k), (xb, xp, xs, gb, gp, gs), rows, chunks, groups, order, axes)


def _merge(shape: tuple[int, ...], strides: Sequence[int], axes: tuple[int, ...]) -> int | None:
    """The one stride of neighbouring axes taken together: 0 for none of them, None if they cannot be."""
    long = [axis for axis in axes if shape[axis] > 1]
    for outer, inner in zip(long, long[1:], strict=False):
        if strides[outer] != strides[inner] * shape[inner]:
            return None
    return strides[long[-1]] if long else 0


def _chunks(p: int, line: int) -> tuple[int, int]:
    """Choose the P's per chunk and the chunks: enough for many threads, few enough that their column sums stay small.

    Each chunk has column sums of its own, so it should be many lines high: 64, or 512 from 16 chunks on (measured).
    """
    most = max(min(16, p // 64), min(32, p // 512), 1)
    chunks = max(1, min(most, p * line // CHUNK))
    rows = -(-p // chunks)
    rows += -rows % 4
    return rows, -(-p // rows)
