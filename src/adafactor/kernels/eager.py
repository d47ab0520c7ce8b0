"""The three walks in plain torch, on any device, block by block so that extra memory stays bounded.

A block is small enough to stay in a CPU's cache from one operation to the next. Sums are taken per block in the
statistics' precision and over blocks in double, in an order that does not depend on the number of threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adafactor.layout import statistics_dtype, wide

if TYPE_CHECKING:
    from adafactor.step import Update

Block = tuple[slice, ...]

BLOCK_CPU = 2**20  # elements: a float32 block is 4 MB and stays in a shared cache; smaller ones measured slower
BLOCK_DEVICE = 2**21  # elements: large enough to fill a GPU; four float32 blocks are 34 MB
SUM_ROW = 1024  # elements that one thread sums alone


def moments(bucket: list[Update]) -> None:
    """Means of G² over the columns and over the rows, ΣX², and whether G² is finite."""
    for u in bucket:
        _moments(u)


def energy(bucket: list[Update]) -> None:
    """ΣU²; on the way V̂ₜ (Algorithm 5, line 5) and m̂ₜ (Algorithm 3, line 6) where they are kept whole."""
    for u in bucket:
        u.u2 = _zeros(u, ())
        scratch = Scratch(u)
        for block in blocks(u.g):
            direction = _direction(u, block, u.scales, scratch, first=True)
            u.u2 += scratch.total(direction.square_())


def apply_(bucket: list[Update]) -> None:
    """Xₜ = Xₜ₋₁·(1 − ρₜ·λ) − αₜ·Ûₜ, or minus the average of the αₜ·Ûₜ."""
    for u in bucket:
        assert u.scale is not None
        scratch = Scratch(u)
        scale = u.scale.to(scratch.dtype)
        scales = [u.scales[0] * scale, *u.scales[1:]] if u.scales else [scale]
        for block in blocks(u.x):
            change = _direction(u, block, scales, scratch, first=False)
            _subtract(u, block, change, scratch)


def _moments(u: Update) -> None:
    layout, scratch = u.layout, Scratch(u)
    u.x2 = _zeros(u, ()) if u.settings.relative else None
    rows = _zeros(u, layout.statistics["row"]) if "row" in layout.statistics else None
    cols = _zeros(u, layout.statistics["col"]) if "col" in layout.statistics else None
    largest = _zeros(u, ())
    # G² fits float32 but a sum of it may not: a power of two keeps the sums of a block in range, exactly
    shrink = 2.0 ** -max(layout.shape, default=1).bit_length()
    for block in blocks(u.g):
        g = scratch.load(u.g[block])
        q = torch.mul(g, g, out=scratch.like(g))  # G²
        if layout.estimator == "full":
            largest = torch.maximum(largest, q.amax())  # a NaN stays one
            continue
        q.mul_(shrink)
        if rows is not None:
            rows[_drop(block, layout.col_axis)] += q.sum(layout.col_axis)
        if cols is not None:
            cols[_drop(block, layout.row_axis)] += q.sum(layout.row_axis)
    if u.x2 is not None:
        for block in blocks(u.x):
            x = u.x[block]
            u.x2 += scratch.total(scratch.like(x).copy_(x).square_())
    if rows is not None and layout.col_axis is not None:
        u.rows = rows / (shrink * layout.shape[layout.col_axis])
    if cols is not None and layout.row_axis is not None:
        u.cols = cols / (shrink * layout.shape[layout.row_axis])
    seen = u.rows if u.rows is not None else u.cols if u.cols is not None else largest
    u.finite = seen.sum().isfinite()


def _direction(u: Update, block: Block, scales: list[Tensor], scratch: Scratch, first: bool) -> Tensor:
    """U of one block times what is folded into `scales`; the first walk also averages what is kept whole."""
    assert u.w1 is not None and u.w2 is not None
    g = scratch.load(u.g[block])
    if u.mask is not None:
        g = g.masked_fill(~u.mask, 0)
    if u.layout.estimator == "full":
        v = u.state["full"][block]
        if first:
            q = torch.addcmul(v.new_full((), u.settings.eps[0]), g, g, out=scratch.like(g))  # G² + ε₁
            v.lerp_(q, u.w2.to(v.dtype))
    if u.settings.beta1 and u.settings.momentum == "gradient":
        m = u.state["momentum"][block]
        if first:
            m.lerp_(g, u.w1.to(m.dtype))
        g = m
    if u.layout.estimator == "full":
        out = torch.rsqrt(v, out=scratch.like(g)).mul_(g)
    else:
        out = torch.mul(g, _cut(scales[0], block), out=scratch.like(g))
        scales = scales[1:]
    for scale in scales:
        out.mul_(_cut(scale, block))
    return out if u.mask is None else out.masked_fill_(~u.mask, 0)


def _subtract(u: Update, block: Block, change: Tensor, scratch: Scratch) -> None:
    assert u.w1 is not None and u.decay is not None
    if u.settings.beta1 and u.settings.momentum == "update":
        m = u.state["momentum"][block]
        m.lerp_(change, u.w1.to(m.dtype))
        change = m if u.mask is None else m * u.mask
    x = scratch.load(u.x[block])  # X itself where it has the statistics' precision
    if u.settings.weight_decay:
        x.mul_(u.decay if u.mask is None else torch.where(u.mask, u.decay, 1.0))
    x.sub_(change)
    if x.dtype != u.x.dtype:
        u.x[block].copy_(x)


class Scratch:
    """Two reusable blocks of memory: one to compute in, one for what must be converted first."""

    def __init__(self, u: Update):
        """Reserve them in the precision of the statistics, no larger than the parameter."""
        self.dtype = statistics_dtype(u.x.dtype)
        size = min(block_size(u.x), u.x.numel())
        self._room = torch.empty(size, dtype=self.dtype, device=u.x.device)
        low = u.x.dtype != self.dtype or u.g.dtype != self.dtype
        self._converted = torch.empty(size if low else 0, dtype=self.dtype, device=u.x.device)

    def like(self, t: Tensor) -> Tensor:
        """The computing block in the shape and stride order of `t`."""
        return _arrange(self._room, t)

    def load(self, t: Tensor) -> Tensor:
        """`t` in the statistics' precision: itself, or a copy in the other block."""
        return t if t.dtype == self.dtype else _arrange(self._converted, t).copy_(t)

    def total(self, t: Tensor) -> Tensor:
        """Σ of the computing block, of which `t` is the view: in rows that one thread sums, then in double."""
        flat = self._room[: t.numel()]
        whole = flat.numel() - flat.numel() % SUM_ROW
        sums = flat[:whole].view(-1, SUM_ROW).sum(1)
        return torch.cat([sums, flat[whole:]]).to(wide(t.device)).sum()


def block_size(t: Tensor) -> int:
    """How many elements one block may have."""
    return BLOCK_CPU if t.is_cpu else BLOCK_DEVICE


def blocks(t: Tensor) -> Iterator[Block]:
    """Cut a tensor into blocks that follow its memory: the axes of the longest strides are cut first."""
    chunk = list(t.shape)
    room, inner = block_size(t), t.numel()
    for axis in sorted(range(t.dim()), key=t.stride, reverse=True):
        if inner <= room:
            break
        inner //= t.shape[axis]
        chunk[axis] = max(1, room // inner)
    cuts = [
        [slice(start, min(start + width, size)) for start in range(0, size, max(1, width))]
        for size, width in zip(t.shape, chunk, strict=True)
    ]
    return itertools.product(*cuts)


def _arrange(room: Tensor, t: Tensor) -> Tensor:
    strides, width = [0] * t.dim(), 1
    for axis in sorted(range(t.dim()), key=t.stride):
        strides[axis], width = width, width * t.shape[axis]
    return room.as_strided(t.shape, strides)


def _zeros(u: Update, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=wide(u.x.device), device=u.x.device)


def _drop(block: Block, axis: int | None) -> Block:
    assert axis is not None
    return block[:axis] + block[axis + 1 :]


def _cut(scale: Tensor, block: Block) -> Tensor:
    """The part of a broadcast vector that meets the block: an axis of length 1 stays whole."""
    if scale.dim() == 0:
        return scale
    return scale[tuple(s if n > 1 else slice(None) for s, n in zip(block, scale.shape, strict=True))]
