"""The step in plain torch, on any device.

First the mathematics: pure functions of tensors, one for each line of Algorithms 4 and 5. Then the walks, which apply
them block by block, in the order of `step.walk`. `scalars.py` has what lies between: rates, step sizes, which steps are
taken.

Shapes: a matrix is (…, n, m), where n and m stand for the two factored axes wherever they are and … for the others; its
R is (…, n), its C is (…, m), and both are unsqueezed to broadcast over the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core import sums
from adafactor.core.bucket import Parameter
from adafactor.core.equations import Scalar
from adafactor.core.factoring import Factoring, statistics_dtype
from adafactor.core.rounding import elements, lost, random_words, remainder, stochastic
from adafactor.core.step import Update
from adafactor.kernels.eager.blocks import Block, Scratch, add, blocks, part, part_of_scale, shrink_of, without
from adafactor.kernels.eager.scalars import keep_and_fade, where

# ---- Algorithms 4 and 5 -----------------------------------------------------------------------------------------


def means_of_squares(sum_: Tensor, count: int, whole: int, eps1: float, shrink: float) -> Tensor:
    """Mean of G² + ε₁ over an axis (line 5): (ΣG² + count·ε₁)/whole, where `count` of `whole` entries are here."""
    return (sum_ / shrink + count * eps1) / whole


def inverse_root(shapes: Factoring, row: Tensor | None, col: Tensor | None, mean_row: Tensor | None) -> list[Tensor]:
    """1/√V̂ as vectors that broadcast over X (lines 7–8; §3.2 for rows or columns alone).

    `row` is Rₜ (…, n), `col` is Cₜ (…, m), `mean_row` the mean of R over n if R is not whole here.
    """
    row_axis, col_axis, scales = shapes.row_axis, shapes.col_axis, []
    if row is not None and row_axis is not None and col_axis is not None:
        row = row.unsqueeze(col_axis)  # (…, n, 1)
        if shapes.estimator == "outer":
            if mean_row is None:
                mean = sums.sum_along(row, row_axis).unsqueeze(row_axis) / shapes.shape[row_axis]  # (…, 1, 1)
            else:
                mean = mean_row.unsqueeze(col_axis)
            scales.append(eq.row_scale(row, mean))
        else:
            scales.append(row.rsqrt())
    if col is not None and row_axis is not None:
        scales.append(col.unsqueeze(row_axis).rsqrt())  # (…, 1, m)
    return scales


def direction(g: Tensor, scales: Sequence[Scalar], out: Tensor) -> Tensor:
    """U = G·r·c (line 8), from left to right: r·c alone may leave float32 where the product with G does not."""
    torch.mul(g, scales[0], out=out)
    for scale in scales[1:]:
        out.mul_(scale)
    return out


def average_(old: Tensor, new: Tensor, decay: Scalar, weight: Scalar) -> Tensor:
    """β̂·old + (1 − β̂)·new, in place of `old` (Algorithm 5, line 5), with all digits in float32.

    β̂ is split into keep − fade: in float32, β̂ near 1 and 1 − β̂ would no longer add up to 1, and a long run would drift.
    """
    keep, fade = keep_and_fade(decay, weight)
    if isinstance(weight, Tensor) and isinstance(keep, Tensor) and isinstance(fade, Tensor):
        old.mul_(keep.to(old.dtype)).addcmul_(old, fade.to(old.dtype), value=-1)
        return old.addcmul_(new, weight.to(old.dtype))
    if keep != 1:
        old.mul_(keep)
    return old.sub_(old, alpha=float(fade)).add_(new, alpha=float(weight))


def descend_(x: Tensor, change: Tensor, decay: Scalar) -> Tensor:
    """X·(1 − ρₜ·λ) − αₜ·Ûₜ, in place of X (line 10)."""
    if isinstance(decay, Tensor) or decay != 1:
        x.mul_(_cast(decay, x))
    return x.sub_(change)


# ---- the walks ------------------------------------------------------------------------------------------------------


def moments(u: Update) -> None:
    """First walk: sums of G² over the columns and over the rows, or the largest G².

    G² fits float32 but a sum of it may not: a power of two keeps sums in range, exactly.
    """
    p, row_axis, col_axis = u.parameter, u.parameter.factoring.row_axis, u.parameter.factoring.col_axis
    scratch, shrink = Scratch(p.x), shrink_of(p.shape)
    for block in blocks(u.g):
        g = scratch.load(part(u.g, block))
        q = torch.mul(g, g, out=scratch.like(g))  # G²
        if row_axis is None or col_axis is None:
            u.largest = q.amax() if u.largest is None else torch.maximum(u.largest, q.amax())
            continue
        q.mul_(shrink)
        if "row" in p.state:
            u.rows = add(u.rows, sums.sum_along(q, col_axis), without(block, col_axis), p.state["row"].shape)
        if "col" in p.state:
            u.cols = add(u.cols, sums.sum_along(q, row_axis), without(block, row_axis), p.state["col"].shape)


def means(u: Update) -> None:
    """From the sums to means of G² + ε₁, in double, where ε₁ cannot be lost; and whether G² is finite."""
    p, row_axis, col_axis = u.parameter, u.parameter.factoring.row_axis, u.parameter.factoring.col_axis
    shrink, eps1, seen = shrink_of(p.shape), p.settings.eps[0], u.largest
    if u.rows is not None and col_axis is not None:
        u.rows = means_of_squares(u.rows, p.x.shape[col_axis], p.shape[col_axis], eps1, shrink)
        seen = u.rows.sum()
    if u.cols is not None and row_axis is not None:
        u.cols = means_of_squares(u.cols, p.x.shape[row_axis], p.shape[row_axis], eps1, shrink)
        seen = u.cols.sum()
    assert seen is not None
    finite = seen.isfinite()
    u.finite = bool(finite) if sums.on_host(finite) else finite


def factors(u: Update) -> None:
    """Rₜ and Cₜ, kept in the state in its precision, and 1/√V̂ from them in the wider one of the sums."""
    p = u.parameter
    row, col = _averaged(u, "row", u.rows), _averaged(u, "col", u.cols)
    dtype = statistics_dtype(p.x.dtype)
    u.scales = [scale.to(dtype) for scale in inverse_root(p.factoring, row, col, u.mean_row)]


def energy(u: Update) -> None:
    """Second walk: ΣU² and ΣX²; on the way V̂ₜ (Algorithm 5, line 5) and m̂ₜ (Algorithm 3, line 6) where kept whole."""
    p, scratch, u2 = u.parameter, Scratch(u.parameter.x), []
    for block in blocks(u.g):
        g = _average_what_is_whole(u, block, scratch)
        u2.append(sums.sum_of_squares(scratch.flat(_direction(u, g, block, scratch))))
    u.u2 = sums.total(u2)
    if p.measures_x:
        parts = (sums.in_memory_order(scratch.load(part(p.x, block))) for block in blocks(p.x))
        u.x2 = sums.total([sums.sum_of_squares(flat) for flat in parts])


def apply_(u: Update) -> None:
    """Third walk: Xₜ = Xₜ₋₁·(1 − ρₜ·λ) − αₜ·Ûₜ, or minus the average of the αₜ·Ûₜ."""
    p, scratch, scale = u.parameter, Scratch(u.parameter.x), _cast(u.scale, u.parameter.x)
    for block in blocks(p.x):
        g = scratch.load(part(u.g, block))
        if _averages_gradients(p):
            g = part(p.state["momentum"], block)
        change = _direction(u, g, block, scratch).mul_(scale)  # last: α·r alone may leave float32
        if u.not_taken is not None:
            change.masked_fill_(u.not_taken, 0)
        if p.settings.beta1 and p.settings.momentum_of == "update":
            m = part(p.state["momentum"], block)
            m.lerp_(change, _cast(u.w1, m))
            change = m if u.mask is None else m * u.mask
        _write(u, block, change, scratch)


def _averaged(u: Update, key: str, mean: Tensor | None) -> Tensor | None:
    if mean is None:
        return None
    old = u.parameter.state[key]
    new = eq.average(old, mean, u.beta2, u.w2)
    if u.mask is not None:
        new = torch.where(u.mask, new, old)
    old.copy_(new)
    return new


def _average_what_is_whole(u: Update, block: Block, scratch: Scratch) -> Tensor:
    """V̂ and the momentum of a block of G, where they are kept whole; what U is made of: G or its average."""
    p = u.parameter
    g = scratch.load(part(u.g, block))
    full, averages = p.factoring.estimator == "full", _averages_gradients(p)
    if (full or averages) and u.not_taken is not None:
        g = g.masked_fill(u.not_taken, 0)  # even with a weight of zero, a NaN would reach the averages
    if full:
        v = part(p.state["full"], block)
        q = torch.mul(g, g, out=scratch.like(g)).add_(p.settings.eps[0])  # G² + ε₁
        average_(v, q, u.beta2, u.w2)
    if averages:
        m = part(p.state["momentum"], block)
        m.lerp_(g, _cast(u.w1, m))
        g = m
    return g


def _direction(u: Update, g: Tensor, block: Block, scratch: Scratch) -> Tensor:
    """U of one block."""
    out = scratch.like(g)
    if u.parameter.factoring.estimator == "full":
        return torch.rsqrt(part(u.parameter.state["full"], block), out=out).mul_(g)
    return direction(g, [part_of_scale(scale, block) for scale in u.scales], out)


def _write(u: Update, block: Block, change: Tensor, scratch: Scratch) -> None:
    """X of a block, rounded as the settings say."""
    p, old = u.parameter, part(u.parameter.x, block)
    x = scratch.load(old)  # X itself where it has the statistics' precision
    kept = part(p.state["compensation"], block) if p.rounding == "kahan" else None
    if kept is not None:
        x.add_(remainder(kept, x))
    descend_(x, change, _decay(u))
    if kept is not None:
        new = x.to(old.dtype)
        left = lost(x, new)
        old.copy_(new if u.mask is None else torch.where(u.mask, new, old))
        kept.copy_(left if u.mask is None else torch.where(u.mask, left, kept))
    elif p.rounding == "stochastic":
        old.copy_(stochastic(x, old.dtype, random_words(_elements(p, block, old), u.keys)))
    elif x is not old:
        old.copy_(x)


def _decay(u: Update) -> Scalar:
    if u.mask is None or not isinstance(u.decay, Tensor):
        return u.decay if u.mask is None or u.decay == 1 else where(u.mask, u.decay, 1.0)
    return where(u.mask, u.decay, 1.0)


def _elements(p: Parameter, block: Block, piece: Tensor) -> Tensor:
    """The numbers of a block's elements in the whole parameter."""
    begin = [0] * piece.dim() if block is None else [cut.start for cut in block]
    start = [a + b for a, b in zip(begin, p.offset or (0,) * piece.dim(), strict=True)]
    return elements(tuple(piece.shape), p.shape, tuple(start), piece.device)


def _averages_gradients(p: Parameter) -> bool:
    return bool(p.settings.beta1) and p.settings.momentum_of == "gradient"


def _cast(value: Scalar, like: Tensor) -> Scalar:
    """A scalar in the precision of the tensor that it is for, which torch's in-place operations insist on."""
    return value.to(statistics_dtype(like.dtype)) if isinstance(value, Tensor) else value


def _number(weight: Scalar) -> float:
    return 1.0 if isinstance(weight, Tensor) else weight
