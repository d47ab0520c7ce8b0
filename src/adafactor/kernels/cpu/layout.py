"""How a tensor lies in memory, as the compiled loops see it: `batch` × `rows` × `parts` lines without gaps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from adafactor.core.contract import Parameter
from adafactor.core.factoring import Factored, Shape
from adafactor.core.momentum import Blocks, blocks_of, buffer

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TILE = 512  # numbers that the loops work on at a time
MOST_NUMBERS = 2**32  # random words are computed of the lower half of a number

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The order of a tensor's axes in memory, and what they are to the loops.

    A line is `cols` numbers side by side, of one row where `period` is 1, else of that many rows in turn.
    """

    order: Axes  # the slowest first
    groups: tuple[Axes, Axes, Axes, Axes]  # the axes of batch, rows, parts and lines
    batch: int
    rows: int
    parts: int
    cols: int
    period: int
    swapped: bool  # the paper's R is along a line, and C along the rows

    def in_order(self, t: Tensor) -> Tensor:
        """A view of a tensor in X's shape, or in that of a factor, whose axes are in the order of memory."""
        return t.permute(self.order)


def find_layout(parameter: Parameter) -> Layout | str:
    """Find how a parameter is walked with gradients of the form it has, or say what is in the way."""
    x, form, state = parameter.x, parameter.gradient, parameter.state
    if x.dtype not in TYPES or form.dtype not in TYPES:
        return f"there is no loop for a {x.dtype} parameter with a {form.dtype} gradient"
    momentum = buffer(state) if parameter.settings.beta1 else None
    for t in (state.get("full"), momentum, state.get("compensation")):
        if t is not None and _strides(x.shape, t.stride()) != _strides(x.shape, x.stride()):
            return "its state has another order in memory"
    if _strides(x.shape, form.stride) != _strides(x.shape, x.stride()):
        return "its gradient has another order in memory"
    factoring = parameter.factoring
    axes = (factoring.row_axis, factoring.col_axis) if isinstance(factoring, Factored) else None
    layout = layout_of(tuple(x.shape), x.stride(), axes)
    if layout is None:
        return "it has gaps in memory"
    if layout.period > TILE:
        return f"its factored axes come before {layout.period} numbers of others"
    return _find_words(parameter, layout) or _find_blocks(parameter, layout) or layout


def numbers_of(parameter: Parameter, layout: Layout) -> tuple[int, int, int, int] | None:
    """The number in the whole of the first element, and what is added to it along batch, rows and parts.

    None: numbers side by side in memory are not so in the whole.
    """
    whole, place = parameter.shape, parameter.offset or (0,) * len(parameter.shape)
    row_by_row = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    steps = [_merged(tuple(parameter.x.shape), row_by_row, axes) for axes in layout.groups]
    if None in steps or steps[3] not in (0, 1):
        return None
    batch, rows, parts = (step or 0 for step in steps[:3])
    return sum(step * start for step, start in zip(row_by_row, place, strict=True)), batch, rows, parts


def block_of(parameter: Parameter) -> int:
    """The numbers side by side that have one scale of an int8 momentum; 0 if it is not kept so."""
    blocks = _blocks_of(parameter)
    return 0 if blocks is None else blocks.length * prod(parameter.x.shape[blocks.axis + 1 :])


def offsets_of(factor: Tensor, layout: Layout) -> Tensor | None:
    """Where the entries of a factor lie, in the order in which the loops want them; None: as they want them."""
    in_order = layout.in_order(factor)
    if in_order.is_contiguous():
        return None
    return layout.in_order(torch.arange(factor.numel()).view(factor.shape)).contiguous()


@lru_cache(maxsize=4096)
def layout_of(shape: Shape, strides: Axes, axes: tuple[int, int] | None) -> Layout | None:
    """The layout of a tensor; None if it has gaps. An axis of length 1 may have any stride: it goes first."""
    order = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -strides[axis], axis)))
    if _merged(shape, strides, order) not in (0, 1):
        return None
    if axes is None:
        return Layout(order, ((), (), (), order), 1, 1, 1, prod(shape), 1, False)
    first, second = sorted(map(order.index, axes))
    groups = order[:first], order[first : first + 1], order[first + 1 : second], order[second:]
    batch, rows, parts, cols = (prod(shape[axis] for axis in group) for group in groups)
    return Layout(order, groups, batch, rows, parts, cols, cols // shape[order[second]], axes[0] == order[second])


def _find_words(parameter: Parameter, layout: Layout) -> str | None:
    """What keeps random words from being computed along a line."""
    if parameter.rounding != "stochastic" and not rounds_momentum(parameter):
        return None
    if numbers_of(parameter, layout) is None:
        return "it is rounded at random, and its elements are not in their own order in memory"
    if parameter.factoring.count > MOST_NUMBERS:
        return "it is rounded at random, and has more than 2³² elements"
    return None


def _find_blocks(parameter: Parameter, layout: Layout) -> str | None:
    """What keeps the blocks of an int8 momentum from being stretches of a line."""
    block, blocks = block_of(parameter), _blocks_of(parameter)
    if blocks is None:
        return None
    long = [axis for axis in layout.order if parameter.x.shape[axis] > 1]
    if long != sorted(long):
        return "blocks of its int8 momentum are not in one piece in memory"
    line = prod(parameter.x.shape[blocks.axis :])
    if isinstance(parameter.factoring, Factored):
        fits = line == layout.cols
    else:  # one line of all numbers: no block may end before its length but the last one
        fits = TILE % block == 0 and (line % block == 0 or line == layout.cols)
    if block > TILE or not fits:
        return "blocks of its int8 momentum do not fit into what the loops work on at a time"
    return None


def rounds_momentum(parameter: Parameter) -> bool:
    """Whether there is a momentum, kept in fewer bits than it is computed in: it is rounded at random."""
    momentum = buffer(parameter.state) if parameter.settings.beta1 else None
    return momentum is not None and momentum.dtype != torch.float32


def _blocks_of(parameter: Parameter) -> Blocks | None:
    return blocks_of(parameter.factoring, parameter.settings) if parameter.settings.beta1 else None


def _strides(shape: Shape, strides: Axes) -> Axes:
    """Strides without those of axes that have one index only."""
    return tuple(stride for size, stride in zip(shape, strides, strict=True) if size > 1)


def _merged(shape: Shape, strides: Axes | list[int], axes: Axes) -> int | None:
    """The one stride of neighbouring axes taken together: 0 for none of them, None if they cannot be."""
    long = [axis for axis in axes if shape[axis] > 1]
    for outer, inner in zip(long, long[1:], strict=False):
        if strides[outer] != strides[inner] * shape[inner]:
            return None
    return strides[long[-1]] if long else 0
