"""The three walks in plain torch, on any device, block by block so that extra memory stays bounded.

Sums are taken per block in the statistics' precision and over blocks in double, in an order that does not depend on the
number of threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adafactor import equations as eq
from adafactor.equations import Scalar
from adafactor.layout import scalar, statistics_dtype, wide
from adafactor.rounding import elements, lost, random_words, stochastic

if TYPE_CHECKING:
    from adafactor.step import Update

Block = tuple[slice, ...] | None  # None: the tensor is one block

BLOCK_CPU = 2**20  # elements: a float32 block is 4 MB and stays in a shared cache; smaller ones measured slower
BLOCK_DEVICE = 2**21  # elements: large enough to fill a GPU; four float32 blocks are 34 MB
SUM_ROW = 1024  # elements that one thread sums alone
SUM_ALONE = 2**15  # below this torch sums with one thread anyway


def obstacle(u: Update) -> str | None:
    """None: any tensor will do."""
    return None


def whole(bucket: list[Update]) -> tuple[list[Update], list[Update]]:
    """None of them: `step` leads from walk to walk."""
    return [], bucket


def moments(bucket: list[Update]) -> None:
    """Means of G² + ε₁ over the columns and over the rows, and whether G² is finite."""
    for u in bucket:
        _moments(u)


def factors(bucket: list[Update]) -> None:
    """Rₜ and Cₜ, kept in the state in its precision, and 1/√V̂ from them in the wider one of the sums."""
    for u in bucket:
        u.scales = _inverse_root(u, _averaged(u, "row", u.rows), _averaged(u, "col", u.cols))


def energy(bucket: list[Update]) -> None:
    """ΣU² and ΣX²; on the way V̂ₜ (Algorithm 5, line 5) and m̂ₜ (Algorithm 3, line 6) where they are kept whole."""
    for u in bucket:
        scratch = Scratch(u)
        for block in blocks(u.g):
            direction = _direction(u, block, u.scales, scratch, first=True)
            u.u2 = u.u2 + scratch.total(direction.square_())
        if u.measures_x:
            u.x2 = 0.0
            for block in blocks(u.x):
                x = scratch.load(_part(u.x, block))
                u.x2 = u.x2 + scratch.total(torch.mul(x, x, out=scratch.like(x)))


def apply_(bucket: list[Update]) -> None:
    """Xₜ = Xₜ₋₁·(1 − ρₜ·λ) − αₜ·Ûₜ, or minus the average of the αₜ·Ûₜ."""
    for u in bucket:
        scratch = Scratch(u)
        scales = [u.scales[0] * _cast(u.scale, u.scales[0]), *u.scales[1:]] if u.scales else [u.scale]
        for block in blocks(u.x):
            change = _direction(u, block, scales, scratch, first=False)
            _subtract(u, block, change, scratch)


def _moments(u: Update) -> None:
    row_axis, col_axis, shapes = u.layout.row_axis, u.layout.col_axis, u.layout.statistics
    scratch, largest = Scratch(u), None
    # G² fits float32 but a sum of it may not: a small tensor is summed in double, and a power of two keeps the sums of
    # a large one's blocks in range, exactly
    small = u.x.numel() <= SUM_ALONE
    shrink, dtype = (1.0, wide(u.x.device)) if small else (2.0 ** -max(u.shape).bit_length(), None)
    for block in blocks(u.g):
        g = scratch.load(_part(u.g, block))
        q = torch.addcmul(scratch.number(u.settings.eps[0]), g, g, out=scratch.like(g))  # G² + ε₁
        if row_axis is None or col_axis is None:
            largest = q.amax() if largest is None else torch.maximum(largest, q.amax())
            continue
        if not small:
            q.mul_(shrink)
        if "row" in shapes:
            u.rows = _add(u.rows, q.sum(col_axis, dtype=dtype), _drop(block, col_axis), u.state["row"].shape)
        if "col" in shapes:
            u.cols = _add(u.cols, q.sum(row_axis, dtype=dtype), _drop(block, row_axis), u.state["col"].shape)
    if u.rows is not None and col_axis is not None:
        u.rows /= shrink * u.layout.shape[col_axis]
    if u.cols is not None and row_axis is not None:
        u.cols /= shrink * u.layout.shape[row_axis]
    means = u.rows if u.rows is not None else u.cols
    # a sum of float32 means in double is finite unless one of them is not
    seen = scalar(means.sum() if means is not None else torch.as_tensor(largest))
    u.finite = seen.isfinite() if isinstance(seen, Tensor) else math.isfinite(seen)


def _averaged(u: Update, key: str, mean: Tensor | None) -> Tensor | None:
    if mean is None:
        return None
    new = eq.average(u.state[key], mean, u.beta2)
    u.state[key].copy_(new if u.mask is None else torch.where(u.mask, new, u.state[key]))
    return new


def _inverse_root(u: Update, row: Tensor | None, col: Tensor | None) -> list[Tensor]:
    """1/√V̂ as vectors that broadcast over X (Algorithm 4, lines 7–8; §3.2 for rows or columns alone)."""
    row_axis, col_axis, scales = u.layout.row_axis, u.layout.col_axis, []
    if row is not None and row_axis is not None and col_axis is not None:
        row = row.unsqueeze(col_axis)  # (…, n, 1)
        if u.layout.estimator == "outer":
            known = row.mean(row_axis, keepdim=True) if u.mean_row is None else u.mean_row.unsqueeze(col_axis)
            scales.append(eq.row_scale(row, known))
        else:
            scales.append(row.rsqrt())
    if col is not None and row_axis is not None:
        scales.append(col.unsqueeze(row_axis).rsqrt())  # (…, 1, m)
    return [scale.to(statistics_dtype(u.x.dtype)) for scale in scales]


def _direction(u: Update, block: Block, scales: list[Scalar] | list[Tensor], scratch: Scratch, first: bool) -> Tensor:
    """U of one block times what is folded into `scales`; the first walk also averages what is kept whole."""
    g = scratch.load(_part(u.g, block))
    averages = u.layout.estimator == "full" or bool(u.settings.beta1 and u.settings.momentum == "gradient")
    if first and averages and u.mask is not None:
        g = g.masked_fill(~u.mask, 0)  # even with a weight of zero, a NaN would reach the averages
    if u.layout.estimator == "full":
        v = _part(u.state["full"], block)
        if first:
            q = torch.addcmul(scratch.number(u.settings.eps[0]), g, g, out=scratch.like(g))  # G² + ε₁
            v.lerp_(q, _cast(u.w2, v))
    if u.settings.beta1 and u.settings.momentum == "gradient":
        m = _part(u.state["momentum"], block)
        if first:
            m.lerp_(g, _cast(u.w1, m))
        g = m
    if u.layout.estimator == "full":
        out = torch.rsqrt(v, out=scratch.like(g)).mul_(g)
    else:
        out = torch.mul(g, _cut(scales[0], block), out=scratch.like(g))
        scales = scales[1:]
    for scale in scales:
        out.mul_(_cut(scale, block))
    return out if first or u.mask is None else out.masked_fill_(~u.mask, 0)


def _subtract(u: Update, block: Block, change: Tensor, scratch: Scratch) -> None:
    if u.settings.beta1 and u.settings.momentum == "update":
        m = _part(u.state["momentum"], block)
        m.lerp_(change, _cast(u.w1, m))
        change = m if u.mask is None else m * u.mask
    old = _part(u.x, block)
    x = scratch.load(old)  # X itself where it has the statistics' precision
    if u.rounding == "kahan":
        x.add_(_part(u.state["compensation"], block))
    if u.settings.weight_decay:
        x.mul_(u.decay if u.mask is None else torch.where(u.mask, u.decay, 1.0))
    x.sub_(change)
    if u.rounding == "kahan":
        new = x.to(old.dtype)
        left = lost(x, new)
        kept = _part(u.state["compensation"], block)
        old.copy_(new if u.mask is None else torch.where(u.mask, new, old))
        kept.copy_(left if u.mask is None else torch.where(u.mask, left, kept))
    elif u.rounding == "stochastic":
        old.copy_(stochastic(x, old.dtype, random_words(_elements(u, block, old), u.keys)))
    elif x is not old:
        old.copy_(x)


def _elements(u: Update, block: Block, part: Tensor) -> Tensor:
    """The numbers of a block's elements in the whole parameter."""
    begin = [0] * part.dim() if block is None else [cut.start for cut in block]
    place = [a + b for a, b in zip(begin, u.place or (0,) * part.dim(), strict=True)]
    return elements(tuple(part.shape), u.shape, tuple(place), part.device)


class Scratch:
    """Two reusable blocks of memory: one to compute in, one for what must be converted first."""

    def __init__(self, u: Update):
        """Reserve them in the precision of the statistics, no larger than the parameter."""
        self.dtype = statistics_dtype(u.x.dtype)
        self._room = u.x.new_empty(min(block_size(u.x), u.x.numel()), dtype=self.dtype)
        self._view = self._room  # as it was last arranged

    def like(self, t: Tensor) -> Tensor:
        """The computing block in the shape and stride order of `t`."""
        if self._view.shape != t.shape or self._view.stride() != t.stride():
            self._view = _arrange(self._room, t)
        return self._view

    def load(self, t: Tensor) -> Tensor:
        """`t` in the statistics' precision: itself, or a copy in the other block."""
        return t if t.dtype == self.dtype else _arrange(self._other, t).copy_(t)

    def number(self, value: float) -> Tensor:
        """A number as a 0-d tensor, for operations that take no other."""
        return self._room.new_full((), value)

    @cached_property
    def _other(self) -> Tensor:
        return torch.empty_like(self._room)

    def total(self, t: Tensor) -> Scalar:
        """Σ of the computing block, of which `t` is the view: in rows that one thread sums, then in double."""
        if t.numel() <= SUM_ALONE:
            return scalar(t.sum())
        flat = self._room[: t.numel()]
        whole = flat.numel() - flat.numel() % SUM_ROW
        return scalar(torch.cat([flat[:whole].view(-1, SUM_ROW).sum(1), flat[whole:]]).to(wide(t.device)).sum())


def block_size(t: Tensor) -> int:
    """How many elements one block may have."""
    return BLOCK_CPU if t.is_cpu else BLOCK_DEVICE


def blocks(t: Tensor) -> Iterator[Block]:
    """Cut a tensor into blocks that follow its memory: the axes of the longest strides are cut first."""
    room, inner = block_size(t), t.numel()
    if inner <= room:
        return iter([None])
    chunk = list(t.shape)
    for axis in sorted(range(t.dim()), key=t.stride, reverse=True):
        if inner <= room:
            break
        inner //= t.shape[axis]
        chunk[axis] = max(1, room // inner)
    cuts = [
        [slice(start, min(start + width, size)) for start in range(0, size, width)]
        for size, width in zip(t.shape, chunk, strict=True)
    ]
    return itertools.product(*cuts)


def _part(t: Tensor, block: Block) -> Tensor:
    return t if block is None else t[block]


def _add(total: Tensor | None, values: Tensor, block: Block, shape: tuple[int, ...]) -> Tensor:
    """Add a block's sums to those of the blocks before it."""
    if block is None:
        return values.to(wide(values.device))
    if total is None:
        total = torch.zeros(shape, dtype=wide(values.device), device=values.device)
    total[block] += values
    return total


def _drop(block: Block, axis: int) -> Block:
    return None if block is None else block[:axis] + block[axis + 1 :]


def _cut(scale: Scalar, block: Block) -> Scalar:
    """The part of a broadcast vector that meets the block: an axis of length 1 stays whole."""
    if block is None or not isinstance(scale, Tensor) or scale.dim() == 0:
        return scale
    return scale[tuple(s if n > 1 else slice(None) for s, n in zip(block, scale.shape, strict=True))]


def _cast(value: Scalar, like: Tensor) -> Scalar:
    """A weight in the precision of the tensor that it is for, which `lerp_` insists on."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def _arrange(room: Tensor, t: Tensor) -> Tensor:
    """The first elements of a flat room as a dense tensor in the shape and stride order of `t`."""
    if t.is_contiguous():
        return room[: t.numel()].view(t.shape)
    strides, width = [0] * t.dim(), 1
    for axis in sorted(range(t.dim()), key=t.stride):
        strides[axis], width = width, width * t.shape[axis]
    return room.as_strided(t.shape, strides)
