"""The innermost loops, over one line or several: all that is done with an element."""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.native.elements import exactly, narrow, random_word, stochastic, summing, widen
from adafactor.kernels.native.job import OF_GRADIENT, OF_UPDATE, WIDTH


@summing
def squares(g: Any, col: Any) -> Any:
    """Add G² of one line to the columns; return its sum."""
    total = narrow(0.0, col[0])
    for j in range(len(g)):
        a = widen(g[j], col[0])
        q = a * a
        total += q
        col[j] += q
    return total


@summing
def squares_of_four(g0: Any, g1: Any, g2: Any, g3: Any, col: Any) -> Any:
    """The same for four lines that lie apart: memory answers four streams at once."""
    zero = narrow(0.0, col[0])
    t0, t1, t2, t3 = zero, zero, zero, zero
    for j in range(len(col)):
        a0, a1, a2, a3 = widen(g0[j], zero), widen(g1[j], zero), widen(g2[j], zero), widen(g3[j], zero)
        q0, q1, q2, q3 = a0 * a0, a1 * a1, a2 * a2, a3 * a3
        t0 += q0
        t1 += q1
        t2 += q2
        t3 += q3
        col[j] += (q0 + q1) + (q2 + q3)
    return t0, t1, t2, t3


@summing
def squares_in_tiles(g: Any, col: Any, row: Any) -> None:
    """The same for a line of short batch slices: `row` is a whole number of slices long and takes their sums."""
    for start in range(0, len(g), len(row)):
        part, sums = g[start : start + len(row)], col[start : start + len(row)]
        for j in range(len(part)):
            a = widen(part[j], row[0])
            q = a * a
            row[j] += q
            sums[j] += q


@summing
def squares_of_four_tiles(
    g0: Any, g1: Any, g2: Any, g3: Any, col: Any, row0: Any, row1: Any, row2: Any, row3: Any
) -> None:
    """The same for parts of four lines that lie apart, no longer than a tile."""
    for j in range(len(col)):
        a0, a1, a2, a3 = widen(g0[j], col[j]), widen(g1[j], col[j]), widen(g2[j], col[j]), widen(g3[j], col[j])
        q0, q1, q2, q3 = a0 * a0, a1 * a1, a2 * a2, a3 * a3
        row0[j] += q0
        row1[j] += q1
        row2[j] += q2
        row3[j] += q3
        col[j] += (q0 + q1) + (q2 + q3)


@summing
def sum_of_squares(x: Any, like: Any) -> Any:
    """Σx² of a line."""
    total = narrow(0.0, like[0])
    for j in range(len(x)):
        a = widen(x[j], like[0])
        total += a * a
    return total


@exactly
def scaled(g: Any, row: Any, col: Any) -> Any:
    """One element of U."""
    return widen(g, col) * row * col


@summing
def energy_of(g: Any, row: Any, col: Any) -> Any:
    """ΣU² of a line."""
    total = narrow(0.0, row)
    for j in range(len(g)):
        u = scaled(g[j], row, col[j])
        total += u * u
    return total


@summing
def energy_of_tile(g: Any, row: Any, col: Any) -> Any:
    """The same for a part of a line over which the row's scale changes too."""
    total = narrow(0.0, col[0])
    for j in range(len(g)):
        u = scaled(g[j], row[j], col[j])
        total += u * u
    return total


@summing
def heat_of(g: Any, row: Any, heat: Any) -> None:
    """Add (G·r)² of one line to the columns."""
    for j in range(len(g)):
        u = widen(g[j], row) * row
        heat[j] += u * u


@summing
def heat_of_tile(g: Any, row: Any, heat: Any) -> None:
    """The same for a part of a line over which the row's scale changes too."""
    for j in range(len(g)):
        u = widen(g[j], row[j]) * row[j]
        heat[j] += u * u


@summing
def heat_of_four(g0: Any, g1: Any, g2: Any, g3: Any, r0: Any, r1: Any, r2: Any, r3: Any, heat: Any) -> None:
    """The same for four lines that lie apart."""
    for j in range(len(heat)):
        u0, u1, u2, u3 = widen(g0[j], r0) * r0, widen(g1[j], r1) * r1, widen(g2[j], r2) * r2, widen(g3[j], r3) * r3
        heat[j] += (u0 * u0 + u1 * u1) + (u2 * u2 + u3 * u3)


@summing
def heat_of_four_tiles(
    g0: Any, g1: Any, g2: Any, g3: Any, row0: Any, row1: Any, row2: Any, row3: Any, heat: Any
) -> None:
    """The same for parts of them over which the rows' scales change too."""
    for j in range(len(heat)):
        u0, u1 = widen(g0[j], row0[j]) * row0[j], widen(g1[j], row1[j]) * row1[j]
        u2, u3 = widen(g2[j], row2[j]) * row2[j], widen(g3[j], row3[j]) * row3[j]
        heat[j] += (u0 * u0 + u1 * u1) + (u2 * u2 + u3 * u3)


@exactly
def average(old: Any, new: Any, weight: Any) -> Any:
    """One element of an average."""
    return old + weight * (new - old)


@exactly
def go(x: Any, decay: Any, u: Any) -> Any:
    """One element of X."""
    return x * decay - u


@exactly
def blend(m: Any, g: Any, weight: Any) -> None:
    """Average a gradient into its momentum."""
    for j in range(len(m)):
        m[j] = average(m[j], widen(g[j], weight), weight)


@exactly
def descend(x: Any, g: Any, row: Any, col: Any, decay: Any) -> None:
    """X·decay − U."""
    for j in range(len(x)):
        x[j] = narrow(go(widen(x[j], decay), decay, scaled(g[j], row, col[j])), x[j])


@exactly
def descend_tile(x: Any, g: Any, row: Any, col: Any, decay: Any) -> None:
    """The same where the row's scale changes too."""
    for j in range(len(x)):
        x[j] = narrow(go(widen(x[j], decay), decay, scaled(g[j], row[j], col[j])), x[j])


@exactly
def descend_averaged(x: Any, m: Any, g: Any, row: Any, col: Any, weight: Any, decay: Any) -> None:
    """X·decay − M, with U averaged into M."""
    for j in range(len(x)):
        m[j] = average(m[j], scaled(g[j], row, col[j]), weight)
        x[j] = narrow(go(widen(x[j], decay), decay, m[j]), x[j])


@exactly
def descend_averaged_tile(x: Any, m: Any, g: Any, row: Any, col: Any, weight: Any, decay: Any) -> None:
    """The same where the row's scale changes too."""
    for j in range(len(x)):
        m[j] = average(m[j], scaled(g[j], row[j], col[j]), weight)
        x[j] = narrow(go(widen(x[j], decay), decay, m[j]), x[j])


@summing
def descend_two(
    x0: Any, x1: Any, m0: Any, m1: Any, g0: Any, g1: Any, r0: Any, r1: Any, col: Any,
    averaged: bool, w1: Any, decay: Any, reach: Any,
) -> Any:  # fmt: skip
    """X·decay − U or M·reach of two lines that lie apart; returns ΣX² as found and as left."""
    found, left = narrow(0.0, decay), narrow(0.0, decay)
    for j in range(len(col)):
        u0, u1 = scaled(g0[j], r0, col[j]), scaled(g1[j], r1, col[j])
        if averaged:
            u0, u1 = average(m0[j], u0, w1), average(m1[j], u1, w1)
            m0[j], m1[j] = u0, u1
            u0, u1 = u0 * reach, u1 * reach
        a, b = widen(x0[j], decay), widen(x1[j], decay)
        found += a * a + b * b
        a, b = go(a, decay, u0), go(b, decay, u1)
        x0[j], x1[j] = narrow(a, x0[j]), narrow(b, x1[j])
        left += a * a + b * b
    return found, left


@exactly
def take(values: Any, x: Any) -> None:
    """X as numbers to compute with."""
    for j in range(len(values)):
        values[j] = widen(x[j], values[j])


@exactly
def take_compensated(values: Any, x: Any, c: Any) -> None:
    """The same, with what rounding took away before."""
    for j in range(len(values)):
        values[j] = widen(x[j], values[j]) + widen(c[j], values[j])


@exactly
def put_stochastic(x: Any, values: Any, first: int, step: int, key1: Any, key2: Any) -> None:
    """Round to one neighbour or the other; the elements are numbered from `first` on."""
    for j in range(len(values)):
        x[j] = stochastic(values[j], random_word(first + j * step, key1, key2), x[j])


@exactly
def put_compensated(x: Any, c: Any, values: Any) -> None:
    """Round to nearest, and keep what that takes away."""
    for j in range(len(values)):
        x[j] = narrow(values[j], x[j])
        rounded = widen(x[j], values[j])
        c[j] = narrow(values[j] - rounded if np.isfinite(rounded) else narrow(0.0, values[j]), c[j])


@summing
def energy_of_whole(g: Any, v: Any, m: Any, averaged: bool, w1: Any, w2: Any, eps: Any) -> Any:
    """Σ of U² and of a share of V̂, with V̂ and m̂ as they will be; nothing is written."""
    energy, seen = narrow(0.0, eps), narrow(0.0, eps)
    share = narrow(1.0 / WIDTH, eps)  # keeps the sum of V̂ in range
    for j in range(len(v)):
        a = widen(g[j], eps)
        new = v[j] + w2 * ((a * a + eps) - v[j])
        u = m[j] + w1 * (a - m[j]) if averaged else a
        energy += u * u / new
        seen += new * share
    return energy, seen


@exactly
def descend_whole(x: Any, g: Any, v: Any, m: Any, job: Any) -> None:
    """V̂ and the momentum as the state keeps them, and X."""
    w1, w2, eps = narrow(job.w1, v[0]), narrow(job.w2, v[0]), narrow(job.eps, v[0])
    scale, decay, momentum = narrow(job.scale, v[0]), narrow(job.decay, v[0]), job.momentum
    for j in range(len(v)):
        a = widen(g[j], eps)
        v[j] += w2 * ((a * a + eps) - v[j])
        if momentum == OF_GRADIENT:
            a = m[j] + w1 * (a - m[j])
            m[j] = a
        u = a / np.sqrt(v[j]) * scale
        if momentum == OF_UPDATE:
            u = m[j] + w1 * (u - m[j])
            m[j] = u
        x[j] = narrow(widen(x[j], eps) * decay - u, x[j])


@exactly
def repeat(values: Any, first: int, count: int, factor: Any, out: Any) -> None:
    """Fill `out` with copies of `count` values × `factor`, one after the other; it holds a power of two of them."""
    for k in range(count):
        out[k] = values[first + k] * factor
    size = count
    while size < len(out):
        there = out[size : 2 * size]
        for k in range(size):
            there[k] = out[k]
        size *= 2


@exactly
def gather_slices(tile: Any, count: int, row: Any, first: int) -> None:
    """Add up the slices of a tile, a power of two of them, and add the sum to the row."""
    size = len(tile) // 2
    while size >= count:
        there = tile[size : 2 * size]
        for k in range(size):
            tile[k] += there[k]
        size //= 2
    for k in range(count):
        row[first + k] += tile[k]


@exactly
def fill(values: Any, first: int, last: int, number: Any) -> None:
    """Set some of the values to a number."""
    for j in range(first, last):
        values[j] = number


@exactly
def add(total: Any, values: Any) -> None:
    """Add the values to the totals."""
    for j in range(len(values)):
        total[j] += values[j]
