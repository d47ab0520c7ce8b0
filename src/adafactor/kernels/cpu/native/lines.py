"""The innermost loops over lines that step: all that is done with a single element of X and its momentum.

A `Scale` is that of a line, one number; where a line consists of short slices (K > 1), each with a scale of its own, it
is a tile of such numbers, as long as the stretch of the line that is looked at. `pick` takes both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from adafactor.kernels.cpu.native.compiling import as_written, exactly, summing
from adafactor.kernels.cpu.native.elements import is_remainder, mix, stochastic, stored
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, pick, root, view, widen
from adafactor.kernels.cpu.native.jobs import Job, Line, Stretch

Scale = float | Array
SPREAD = np.uint32(0x9E3779B1)  # spreads the upper half of an element's number, as in `rounding.random_words`


class Rates(NamedTuple):
    """The numbers of a step in the statistics' precision: X·decay − scale·U, or X·decay − rate·M."""

    scale: float
    w1: float  # of scale·U in M
    rate: float
    decay: float
    apply_factor: float  # of 1/√R: 0 in a step of length zero, else 1


class Draws(NamedTuple):
    """What the random words of a stretch are made of: the lower half of its first element's number, and what is added.

    The upper half makes the salt. It changes once in a stretch at most, where the lower half falls below the first: by
    `change`, which, unlike a choice of two salts, LLVM leaves in 32 bits.
    """

    low: np.uint32
    step: np.uint32
    salt: np.uint32
    change: np.uint32
    key2: np.uint32
    at_random: bool  # the momentum is rounded by them; else only X may be


@exactly
def update_of(g: Any, row: float, col: float, dtype: Any) -> float:
    """Return one element of U = G·r·c."""
    return widen(g, dtype) * row * col


# ---- steps


@exactly
def average(old: float, new: float, weight: float) -> float:
    """Return one element of a momentum."""
    return old + weight * (new - old)


@as_written
def scaled(m: float, rate: float) -> float:
    """Return one element of rate·M, rounded: where the rate is 1 it is M, and X·decay − M has one rounding."""
    return m * rate


@exactly
def stepped(x: float, decay: float, u: float) -> float:
    """Return one element of the new X."""
    return x * decay - u


@exactly
def blend(m: Array, g: Array, weight: float) -> None:
    """Average a gradient into its momentum."""
    for j in range(len(m)):
        m[j] = average(m[j], widen(g[j], weight), weight)


@as_written
def draws_of(job: Job, element: int, step: int) -> Draws:
    """Return what the random words of a stretch are made of."""
    high = element >> 32
    salt = np.uint32(np.uint32(np.uint32(high) * SPREAD) ^ np.uint32(job.key1))
    next_salt = np.uint32(np.uint32(np.uint32(high + 1) * SPREAD) ^ np.uint32(job.key1))
    low, change = np.uint32(element), np.uint32(salt ^ next_salt)
    return Draws(low, np.uint32(step), salt, change, np.uint32(job.key2), job.rounds_momentum_at_random != 0)


@as_written
def word_of(low: np.uint32, draws: Draws) -> Any:
    """Return the random word of the element with this lower half of its number."""
    change = draws.change if low < draws.low else np.uint32(0)
    return mix(np.uint32(np.uint32(low ^ draws.salt) ^ change), draws.key2)


@exactly
def descend(
    job: Job, part: Stretch, x: Array, m: Array, g: Array, row: Scale, averaged: bool, rates: Rates, draws: Draws
) -> None:
    """Step a stretch of a line: X·decay − scale·U, or X·decay − rate·M, where U is made of `g`, and `m` becomes M.

    The scale comes last: with 1/√R alone it may leave float32 where U does not.
    """
    col, decay, low = part.second, rates.decay, draws.low
    if averaged:
        for j in range(len(x)):
            u = update_of(g[j], pick(row, j), col[j], decay) * rates.scale
            new = average(widen(m[j], decay), u, rates.w1)
            m[j] = stored(new, word_of(low, draws), draws.at_random, m[j])
            low = np.uint32(low + draws.step)
            x[j] = narrow(stepped(widen(x[j], decay), decay, scaled(new, rates.rate)), x[j])
    else:
        for j in range(len(x)):
            u = update_of(g[j], pick(row, j), col[j], decay) * rates.scale
            x[j] = narrow(stepped(widen(x[j], decay), decay, u), x[j])


@summing
def descend_two(
    part0: Stretch,
    part1: Stretch,
    m0: Array,
    m1: Array,
    g0: Array,
    g1: Array,
    row0: Scale,
    row1: Scale,
    averaged: bool,
    rates: Rates,
    draws0: Draws,
    draws1: Draws,
) -> tuple[float, float]:
    """Step two lines that lie far apart, with momenta to compute with; return ΣX² before and after.

    The step is X·decay − scale·U, or X·decay − rate·M with scale·U averaged into M. With decay = 1 and all other
    factors 0 it has length zero, and the loop does nothing but sum.
    """
    x0, x1, col, decay = part0.x, part1.x, part0.second, rates.decay
    before, after, low0, low1 = narrow(0.0, decay), narrow(0.0, decay), draws0.low, draws1.low
    for j in range(len(col)):
        u0 = update_of(g0[j], pick(row0, j), col[j], decay) * rates.scale
        u1 = update_of(g1[j], pick(row1, j), col[j], decay) * rates.scale
        if averaged:
            u0 = average(widen(m0[j], decay), u0, rates.w1)
            u1 = average(widen(m1[j], decay), u1, rates.w1)
            m0[j] = stored(u0, word_of(low0, draws0), draws0.at_random, m0[j])
            m1[j] = stored(u1, word_of(low1, draws1), draws1.at_random, m1[j])
            low0, low1 = np.uint32(low0 + draws0.step), np.uint32(low1 + draws1.step)
            u0, u1 = u0 * rates.rate, u1 * rates.rate
        a, b = widen(x0[j], decay), widen(x1[j], decay)
        before += a * a + b * b
        a, b = stepped(a, decay, u0), stepped(b, decay, u1)
        x0[j], x1[j] = narrow(a, x0[j]), narrow(b, x1[j])
        after += a * a + b * b
    return before, after


# ---- numbers that are not stored as they are computed


@exactly
def load(values: Array, x: Array) -> None:
    """Convert 16-bit numbers to numbers to compute with."""
    for j in range(len(values)):
        values[j] = widen(x[j], values[j])


@exactly
def load_compensated(values: Array, x: Array, c: Array) -> None:
    """Convert X to numbers to compute with, and add what rounding took away before, unless X is another by now."""
    for j in range(len(values)):
        a, rest = widen(x[j], values[j]), widen(c[j], values[j])
        values[j] = a + rest if is_remainder(rest, a, x[j]) else a


@exactly
def store_stochastic(x: Array, values: Array, draws: Draws) -> None:
    """Round each number to one neighbour or the other, as its random word says."""
    low = draws.low
    if np.int64(low) + np.int64(draws.step) * (len(values) - 1) < 2**32:  # nearly always: the salt does not change
        for j in range(len(values)):
            x[j] = stochastic(values[j], mix(np.uint32(low ^ draws.salt), draws.key2), x[j])
            low = np.uint32(low + draws.step)
        return
    for j in range(len(values)):
        x[j] = stochastic(values[j], word_of(low, draws), x[j])
        low = np.uint32(low + draws.step)


@exactly
def store_compensated(x: Array, c: Array, values: Array) -> None:
    """Round to nearest, and keep what that takes away."""
    for j in range(len(values)):
        x[j] = narrow(values[j], x[j])
        rounded = widen(x[j], values[j])
        c[j] = narrow(values[j] - rounded if np.isfinite(rounded) else narrow(0.0, values[j]), c[j])


# ---- unfactored tensors


@exactly
def averaged_square(v: float, a: float, keep: float, fade: float, w2: float, eps1: float) -> float:
    """Return one element of V̂: β̂₂·v + (1 − β̂₂)·(a² + ε₁), with β̂₂·v as keep·v − fade·v (see `keep_and_fade`)."""
    return (keep * v - fade * v) + w2 * (a * a + eps1)


@exactly
def keep_and_fade(job: Job, stat: Any) -> tuple[float, float]:
    """Split β̂₂ into keep − fade, such that neither β̂₂ near 0 nor 1 − β̂₂ near 0 is lost in float32.

    The first term of the average stays positive, and exactly 0 at β̂₂ = 0.
    """
    if job.beta2 < 0.5:
        return narrow(job.beta2, stat), narrow(0.0, stat)
    return narrow(1.0, stat), narrow(job.w2, stat)


@exactly
def descend_unfactored(
    job: Job, part: Stretch, x: Array, m: Array, g: Array, row: Scale, averaged: bool, rates: Rates, draws: Draws
) -> None:
    """Do the same to a stretch of an unfactored tensor, and step V̂ on the way."""
    v, low, w2, eps1 = part.second, draws.low, narrow(job.w2, rates.scale), narrow(job.eps1, rates.scale)
    keep, fade = keep_and_fade(job, eps1)
    for j in range(len(v)):
        a, of_u = widen(part.g[j], eps1), widen(g[j], eps1)
        v[j] = averaged_square(v[j], a, keep, fade, w2, eps1)
        u = of_u / root(v[j]) * rates.scale
        if averaged:
            u = average(widen(m[j], eps1), u, rates.w1)
            m[j] = stored(u, word_of(low, draws), draws.at_random, m[j])
            low = np.uint32(low + draws.step)
            u = scaled(u, rates.rate)
        x[j] = narrow(stepped(widen(x[j], eps1), rates.decay, u), x[j])


# ---- vectors


@exactly
def repeat(values: Array, factor: float, out: Array) -> None:
    """Fill `out`, which holds a power of two of slices, with copies of the values of a slice × `factor`."""
    for k in range(len(values)):
        out[k] = values[k] * factor
    size = len(values)
    while size < len(out):
        upper = out[size : 2 * size]
        for k in range(size):
            upper[k] = out[k]
        size *= 2


@exactly
def scale_of_line(job: Job, line: Line, factor: float, tile: Array, stat: Any) -> float:
    """Return 1/√R of a line × `factor`."""
    scale: float = view(job.scratch + job.row_scale, line.number, 1, stat)[0] * factor
    return scale


@exactly
def scales_of_slices(job: Job, line: Line, factor: float, tile: Array, stat: Any) -> Array:
    """Fill a tile with 1/√R of a line's slices × `factor`, and return it."""
    repeat(view(job.scratch + job.row_scale, line.number * job.K, job.K, stat), factor, tile)
    return tile


@exactly
def gather_slices(tile: Array, count: int, row: Array, first: int) -> None:
    """Add up the slices of a tile, a power of two of them, and add the sum to the row."""
    size = len(tile) // 2
    while size >= count:
        upper = tile[size : 2 * size]
        for k in range(size):
            tile[k] += upper[k]
        size //= 2
    for k in range(count):
        row[first + k] += tile[k]


@exactly
def fill(values: Array, number: float) -> None:
    """Set all values to a number."""
    for j in range(len(values)):
        values[j] = number


@exactly
def add(total: Array, values: Array) -> None:
    """Add the values to the totals."""
    for j in range(len(values)):
        total[j] += values[j]
