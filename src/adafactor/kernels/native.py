"""The loops of the `cpu` backend, compiled by Numba: plain Python to read, native to run.

A *job* is one tensor in the order of its memory: B × P × S × Q × K, where P and Q are its two factored axes, P the
outer, and B, S, K are the other axes before, between and after them. A *line* is Q·K numbers side by side; a *unit* is
consecutive lines, the smallest piece that one thread takes. What is kept whole is one line, cut anywhere.

Sums are taken in the statistics' precision over at most `WIDTH` numbers (or `TALL` rows) and in double beyond. Units
do not depend on the number of threads and their sums are added in one order, so neither does the result.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload, register_jitable

WIDTH = 2048  # numbers of a line that are summed in the statistics' precision
TALL = 64  # rows that are summed in the statistics' precision

OUTER, ROW, COLUMN, FULL = range(4)
NONE, OF_UPDATE, OF_GRADIENT = range(3)
NEAREST, STOCHASTIC, KAHAN = range(3)

JOB = np.dtype(
    [(name, np.int64) for name in "B P S Q K xb xp xs gb gp gs".split()]  # sizes; strides of X and G along B, P, S
    + [(name, np.int64) for name in "rows cuts start".split()]  # P's per unit, units per B, first element in the bucket
    + [(name, np.int64) for name in "estimator swapped momentum early relative measures ignore".split()]
    + [(name, np.int64) for name in "x g v m c t".split()]  # addresses of X, G, V̂, momentum, compensation, step count
    + [(name, np.int64) for name in "row_state col_state mean".split()]  # addresses of R, C and the known mean of R
    # the keys of the random numbers; the number of X's first element, and what is added to it along B, P, S, Q·K
    + [(name, np.int64) for name in "rounding key1 key2 origin nb np ns nq".split()]
    # addresses of scratch
    + [(name, np.int64) for name in "row col row_scale col_scale means partial heat units".split()]
    + [(name, np.int64) for name in "taken carries steady looks clips steps clipped skipped".split()]
    + [(name, np.float64) for name in "n_rows n_cols eps eps2 clip count sign".split()]
    + [(name, np.float64) for name in "beta2 w1 w2 rho scale decay".split()]
    + [(name, np.float64) for name in "u2 x2 finite left".split()]  # `left`: ΣX² as the last step left it
    + [(name, np.float64) for name in "noted_beta2 rms_x alpha rms_u".split()]  # of the last step that was taken
)
MOMENTS, ENERGY, MEASURE, APPLY, ALL = range(5)  # the walks

# Multiply-adds may be fused and sums reordered, but never products: G·r·c stays in range only from left to right.
# NaN, infinities and denormals keep their meaning.
_exactly = njit(nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
_summing = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
# What Python calls is kept on disk, with all that it calls itself.
_entry = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
_as_written = njit(nogil=True, error_model="numpy")  # each operation rounded on its own


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An integer as an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def _adding(context: Any, address: Any, number: Any) -> Any:
    """Add to the integer at an address, as one thing among threads; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


_add: Any = intrinsic(_adding)
_rest: Any = types.ExternalFunction("sched_yield", types.intc()) if os.name == "posix" else register_jitable(lambda: 0)


@register_jitable
def at(address: int, size: int, like: Any) -> Any:
    """`size` numbers at an address, of the type of the array `like`."""
    return carray(_pointer(address), (size,), like.dtype)  # type: ignore[call-arg]


def widen(value: Any, like: Any) -> Any:
    """A stored number as one to compute with, in the type of `like`; bfloat16 comes as uint16, float16 as int16."""


def narrow(value: Any, like: Any) -> Any:
    """A computed number as one to store, in the type of `like`, rounded to nearest even."""


@overload(widen, strict=False)
def _widen(value: Any, like: Any) -> Any:
    if value == types.uint16:  # bfloat16: the upper half of a float32
        return lambda value, like: narrow(np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32), like)
    if value == types.int16:
        return lambda value, like: narrow(_half(value), like)
    return lambda value, like: narrow(value, like)


@register_jitable
def _half(value: Any) -> Any:
    sign = np.uint32(np.uint32(value) & np.uint32(0x8000)) << np.uint32(16)
    rest = np.uint32(np.uint32(np.uint32(value) & np.uint32(0x7FFF)) << np.uint32(13))
    number = np.float32(rest.view(np.float32) * np.float32(2.0**112))  # from float16's exponent bias to float32's
    bits = number.view(np.uint32)
    if rest >= np.uint32(0x0F800000):  # infinity and NaN
        bits = np.uint32(rest | np.uint32(0x7F800000))
    return np.uint32(bits | sign).view(np.float32)


@overload(narrow, strict=False)
def _narrow(value: Any, like: Any) -> Any:
    if like == types.uint16:
        return _narrow_bfloat16
    if like == types.int16:
        return _narrow_half
    if like == types.float32:
        return lambda value, like: np.float32(value)
    return lambda value, like: np.float64(value)


def _narrow_bfloat16(value: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    upper = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(upper) if value == value else np.uint16(0x7FC0)


def _narrow_half(value: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
    # the exponent bias changes by 112; adding just below half of what is cut off rounds to even
    normal = np.uint32(size - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    rounded = np.float32(size.view(np.float32) + np.float32(0.5))  # to 2^−24, float16's smallest
    small = np.uint32(rounded.view(np.uint32) - np.uint32(0x3F000000))
    half = small if size < np.uint32(0x38800000) else normal
    if size >= np.uint32(0x477FF000):  # what rounds to 65536 and beyond
        half = np.uint32(0x7C00)
    if value != value:
        half = np.uint32(0x7E00)
    return np.int16(np.uint16(half | sign))


def stochastic(value: Any, word: Any, like: Any) -> Any:
    """`rounding.stochastic` of one number, given its random word."""


@overload(stochastic, strict=False)
def _stochastic(value: Any, word: Any, like: Any) -> Any:
    if like == types.uint16:
        return _stochastic_bfloat16
    if like == types.int16:
        return _stochastic_half
    return lambda value, word, like: value  # whole numbers have nothing to lose


def _stochastic_bfloat16(value: Any, word: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    up = np.uint16(np.uint32(bits + np.uint32(word & np.uint32(0xFFFF))) >> np.uint32(16))
    beyond = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F7F0000)
    return narrow(value, like) if beyond else up


def _stochastic_half(value: Any, word: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if size > np.uint32(0x477FE000):  # beyond 65504
        return narrow(value, like)
    half = np.uint32(size - np.uint32(112 << 23) + np.uint32(word & np.uint32(0x1FFF))) >> np.uint32(13)
    if size < np.uint32(0x38800000):
        units = np.float32(size.view(np.float32) * np.float32(2.0**24))
        below = np.floor(units)
        up = np.float32(np.uint32(word >> np.uint32(8))) * np.float32(2.0**-24) < units - below
        half = np.uint32(below) + np.uint32(up)
    return np.int16(np.uint16(half | sign))


@register_jitable
def random_word(element: Any, key1: Any, key2: Any) -> Any:
    """`rounding.random_words` of one element."""
    h = np.uint32(np.uint32(element) ^ np.uint32(np.uint32(element >> 32) * np.uint32(0x9E3779B1)))
    h = np.uint32(h ^ key1)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ key2)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


# ---- lines ------------------------------------------------------------------------------------------------------


@_summing
def squares(g: Any, col: Any) -> Any:
    """Add G² of one line to the columns; return its sum."""
    total = narrow(0.0, col[0])
    for j in range(len(g)):
        a = widen(g[j], col[0])
        q = a * a
        total += q
        col[j] += q
    return total


@_summing
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


@_summing
def squares_in_tiles(g: Any, col: Any, row: Any) -> None:
    """The same for a line of short batch slices: `row` is a whole number of slices long and takes their sums."""
    for start in range(0, len(g), len(row)):
        part, sums = g[start : start + len(row)], col[start : start + len(row)]
        for j in range(len(part)):
            a = widen(part[j], row[0])
            q = a * a
            row[j] += q
            sums[j] += q


@_summing
def sum_of_squares(x: Any, like: Any) -> Any:
    """Σx² of a line."""
    total = narrow(0.0, like[0])
    for j in range(len(x)):
        a = widen(x[j], like[0])
        total += a * a
    return total


@_exactly
def scaled(g: Any, row: Any, col: Any) -> Any:
    """One element of U."""
    return widen(g, col) * row * col


@_summing
def energy_of(g: Any, row: Any, col: Any) -> Any:
    """ΣU² of a line."""
    total = narrow(0.0, row)
    for j in range(len(g)):
        u = scaled(g[j], row, col[j])
        total += u * u
    return total


@_summing
def energy_of_tile(g: Any, row: Any, col: Any) -> Any:
    """The same for a part of a line over which the row's scale changes too."""
    total = narrow(0.0, col[0])
    for j in range(len(g)):
        u = scaled(g[j], row[j], col[j])
        total += u * u
    return total


@_summing
def heat_of(g: Any, row: Any, heat: Any) -> None:
    """Add (G·r)² of one line to the columns."""
    for j in range(len(g)):
        u = widen(g[j], row) * row
        heat[j] += u * u


@_summing
def heat_of_tile(g: Any, row: Any, heat: Any) -> None:
    """The same for a part of a line over which the row's scale changes too."""
    for j in range(len(g)):
        u = widen(g[j], row[j]) * row[j]
        heat[j] += u * u


@_summing
def heat_of_four(g0: Any, g1: Any, g2: Any, g3: Any, r0: Any, r1: Any, r2: Any, r3: Any, heat: Any) -> None:
    """The same for four lines that lie apart."""
    for j in range(len(heat)):
        u0, u1, u2, u3 = widen(g0[j], r0) * r0, widen(g1[j], r1) * r1, widen(g2[j], r2) * r2, widen(g3[j], r3) * r3
        heat[j] += (u0 * u0 + u1 * u1) + (u2 * u2 + u3 * u3)


@_exactly
def average(old: Any, new: Any, weight: Any) -> Any:
    """One element of an average."""
    return old + weight * (new - old)


@_exactly
def go(x: Any, decay: Any, u: Any) -> Any:
    """One element of X."""
    return x * decay - u


@_exactly
def blend(m: Any, g: Any, weight: Any) -> None:
    """Average a gradient into its momentum."""
    for j in range(len(m)):
        m[j] = average(m[j], widen(g[j], weight), weight)


@_exactly
def descend(x: Any, g: Any, row: Any, col: Any, decay: Any) -> None:
    """X·decay − U."""
    for j in range(len(x)):
        x[j] = narrow(go(widen(x[j], decay), decay, scaled(g[j], row, col[j])), x[j])


@_exactly
def descend_tile(x: Any, g: Any, row: Any, col: Any, decay: Any) -> None:
    """The same where the row's scale changes too."""
    for j in range(len(x)):
        x[j] = narrow(go(widen(x[j], decay), decay, scaled(g[j], row[j], col[j])), x[j])


@_exactly
def descend_averaged(x: Any, m: Any, g: Any, row: Any, col: Any, weight: Any, decay: Any) -> None:
    """X·decay − M, with U averaged into M."""
    for j in range(len(x)):
        m[j] = average(m[j], scaled(g[j], row, col[j]), weight)
        x[j] = narrow(go(widen(x[j], decay), decay, m[j]), x[j])


@_exactly
def descend_averaged_tile(x: Any, m: Any, g: Any, row: Any, col: Any, weight: Any, decay: Any) -> None:
    """The same where the row's scale changes too."""
    for j in range(len(x)):
        m[j] = average(m[j], scaled(g[j], row[j], col[j]), weight)
        x[j] = narrow(go(widen(x[j], decay), decay, m[j]), x[j])


@_as_written
def in_order(values: Any) -> Any:
    """Their sum."""
    total = 0.0
    for j in range(len(values)):
        total += values[j]
    return total


@_summing
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


@_exactly
def take(values: Any, x: Any) -> None:
    """X as numbers to compute with."""
    for j in range(len(values)):
        values[j] = widen(x[j], values[j])


@_exactly
def take_compensated(values: Any, x: Any, c: Any) -> None:
    """The same, with what rounding took away before."""
    for j in range(len(values)):
        values[j] = widen(x[j], values[j]) + widen(c[j], values[j])


@_exactly
def put_stochastic(x: Any, values: Any, first: int, step: int, key1: Any, key2: Any) -> None:
    """Round to one neighbour or the other; the elements are numbered from `first` on."""
    for j in range(len(values)):
        x[j] = stochastic(values[j], random_word(first + j * step, key1, key2), x[j])


@_exactly
def put_compensated(x: Any, c: Any, values: Any) -> None:
    """Round to nearest, and keep what that takes away."""
    for j in range(len(values)):
        x[j] = narrow(values[j], x[j])
        rounded = widen(x[j], values[j])
        c[j] = narrow(values[j] - rounded if np.isfinite(rounded) else narrow(0.0, values[j]), c[j])


@_summing
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


@_exactly
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


@_exactly
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


@_exactly
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


@_exactly
def fill(values: Any, first: int, last: int, number: Any) -> None:
    """Set some of the values to a number."""
    for j in range(first, last):
        values[j] = number


@_exactly
def add(total: Any, values: Any) -> None:
    """Add the values to the totals."""
    for j in range(len(values)):
        total[j] += values[j]


# ---- units ------------------------------------------------------------------------------------------------------


@_summing
def _span(job: Any, unit: int) -> Any:
    """The batch index of a unit, its first P and the one after its last."""
    b = unit // job.cuts
    start = (unit - b * job.cuts) * job.rows
    return b, start, min(job.P, start + job.rows)


@_summing
def _begin(job: Any, unit: int) -> Any:
    """The first element of a unit, counted over the bucket."""
    b, start, _ = _span(job, unit)
    return job.start + (b * job.P + start) * job.S * job.Q * job.K


@_summing
def _results(job: Any) -> Any:
    """Three numbers for every unit."""
    return at(job.units, 3 * job.B * job.cuts, np.empty(0, np.float64))


@_as_written
def _total(job: Any, which: int) -> Any:
    """The sum of one of the units' numbers."""
    return in_order(_results(job)[which::3])


@_summing
def _tile(job: Any, room: Any) -> Any:
    """Room for a power of two of slices of K: enough to be worth a loop, and soon filled."""
    size = job.K
    while 2 * size <= min(job.Q * job.K, WIDTH // 4):
        size *= 2
    return room[:size]


@_summing
def _room(jobs: Any, ss: Any) -> Any:
    """What one thread needs beside a job's own scratch: column sums of a unit, twice, a tile, and a part of a line."""
    most, tile = 0, WIDTH // 4
    for i in range(len(jobs)):
        most = max(most, jobs[i].S * jobs[i].Q * jobs[i].K)
        tile = max(tile, jobs[i].K)
    return np.empty(2 * most + 2 * tile + WIDTH, ss.dtype)


# ---- first walk: moments ----------------------------------------------------------------------------------------


@_summing
def _sum_lines(job: Any, unit: int, gs: Any, ss: Any, room: Any) -> None:
    """Sums of G² over lines and columns.

    A line's R is known with its sum, so that, while the line is in the cache, Σ(G/√R)² of every column can be had too:
    then C alone is missing for ΣU², and G need not be walked again for it.
    """
    b, start, stop = _span(job, unit)
    doubles, size, batch = np.empty(0, np.float64), job.S * job.Q * job.K, job.S * job.K
    row = at(job.row + 8 * b * job.P * batch, job.P * batch, doubles)
    fill(row, start * batch, stop * batch, 0.0)
    hot = size if job.early else 0
    sums, heats = at(job.partial + 8 * unit * size, size, doubles), at(job.heat + 8 * unit * size, hot, doubles)
    fill(sums, 0, size, 0.0)
    fill(heats, 0, hot, 0.0)
    col, heat, tile = room[:size], room[size : size + hot], _tile(job, room[2 * size :])
    quarter = (stop - start) // 4 if job.K == 1 else 0
    for top in range(0, quarter, TALL // 4):
        fill(col, 0, size, narrow(0.0, ss[0]))
        fill(heat, 0, hot, narrow(0.0, ss[0]))
        for i in range(top, min(quarter, top + TALL // 4)):
            _sum_four(job, b, start + i, quarter, gs, ss, row, col, heat)
        add(sums, col)
        add(heats, heat)
    for top in range(start + 4 * quarter, stop, TALL):
        fill(col, 0, size, narrow(0.0, ss[0]))
        fill(heat, 0, hot, narrow(0.0, ss[0]))
        for p in range(top, min(stop, top + TALL)):
            _sum_one(job, b, p, gs, ss, row, col, heat, tile)
        add(sums, col)
        add(heats, heat)


@_summing
def _sum_four(job: Any, b: int, p: int, quarter: int, gs: Any, ss: Any, row: Any, col: Any, heat: Any) -> None:
    step, down = gs.itemsize * quarter * job.gp, quarter * job.S
    for s in range(job.S):
        g, r = job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), p * job.S + s
        for q in range(0, job.Q, WIDTH):
            width, o = min(WIDTH, job.Q - q), g + gs.itemsize * q
            g0, g1 = at(o, width, gs), at(o + step, width, gs)
            g2, g3 = at(o + 2 * step, width, gs), at(o + 3 * step, width, gs)
            part = at(col.ctypes.data + ss.itemsize * (s * job.Q + q), width, ss)
            t0, t1, t2, t3 = squares_of_four(g0, g1, g2, g3, part)
            row[r] += t0
            row[r + down] += t1
            row[r + 2 * down] += t2
            row[r + 3 * down] += t3
        if job.early:
            r0, r1 = _scale_of(job, b, row, r, ss), _scale_of(job, b, row, r + down, ss)
            r2, r3 = _scale_of(job, b, row, r + 2 * down, ss), _scale_of(job, b, row, r + 3 * down, ss)
            g0, g1 = at(g, job.Q, gs), at(g + step, job.Q, gs)
            g2, g3 = at(g + 2 * step, job.Q, gs), at(g + 3 * step, job.Q, gs)
            heat_of_four(g0, g1, g2, g3, r0, r1, r2, r3, at(heat.ctypes.data + ss.itemsize * s * job.Q, job.Q, ss))


@_summing
def _sum_one(job: Any, b: int, p: int, gs: Any, ss: Any, row: Any, col: Any, heat: Any, tile: Any) -> None:
    line = job.Q * job.K
    for s in range(job.S):
        g = at(job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), line, gs)
        part, r = at(col.ctypes.data + ss.itemsize * s * line, line, ss), (p * job.S + s) * job.K
        if job.K == 1:
            for q in range(0, line, WIDTH):
                row[r] += squares(g[q : q + WIDTH], part[q : q + WIDTH])
        else:
            fill(tile, 0, len(tile), narrow(0.0, ss[0]))
            squares_in_tiles(g, part, tile)
            gather_slices(tile, job.K, row, r)
        if job.early:
            part = at(heat.ctypes.data + ss.itemsize * s * line, line, ss)
            if job.K == 1:
                heat_of(g, _scale_of(job, b, row, r, ss), part)
            else:
                for k in range(job.K):
                    tile[k] = _scale_of(job, b, row, r + k, ss)
                repeat(tile, 0, job.K, narrow(1.0, ss[0]), tile)
                for q in range(0, line, len(tile)):
                    heat_of_tile(g[q : q + len(tile)], tile, part[q : q + len(tile)])


@_summing
def _scale_of(job: Any, b: int, row: Any, r: int, ss: Any) -> Any:
    """1/√R as R will be, given the sum of its line."""
    if job.estimator == COLUMN:
        return narrow(1.0, ss[0])
    old = at(job.row_state + ss.itemsize * (b * job.P * job.S * job.K + r), 1, ss)[0]
    new = old + job.w2 * ((row[r] + job.Q * job.eps) / job.n_cols - old)
    return narrow(1.0 / np.sqrt(new), ss[0])


@_summing
def _measure_whole(job: Any, unit: int, xs: Any, gs: Any, ss: Any) -> None:
    _, start, stop = _span(job, unit)
    w1, w2, eps = narrow(job.w1, ss[0]), narrow(job.w2, ss[0]), narrow(job.eps, ss[0])
    averaged, u2, x2, seen = job.momentum == OF_GRADIENT, 0.0, 0.0, 0.0
    for p in range(start, stop, WIDTH):
        width = min(WIDTH, stop - p)
        g, v = at(job.g + gs.itemsize * p, width, gs), at(job.v + ss.itemsize * p, width, ss)
        m = at(job.m + ss.itemsize * p, width, ss) if averaged else v
        energy, total = energy_of_whole(g, v, m, averaged, w1, w2, eps)
        u2 += energy
        seen += total
        if job.measures:
            x2 += sum_of_squares(at(job.x + xs.itemsize * p, width, xs), ss)
    results = _results(job)
    results[3 * unit], results[3 * unit + 1], results[3 * unit + 2] = u2, x2, seen


# ---- between the walks: vectors and scalars ---------------------------------------------------------------------


@_summing
def _fold(job: Any, gs: Any, ss: Any) -> None:
    if job.estimator == FULL:
        job.u2, job.x2, job.finite = _total(job, 0), _total(job, 1), _total(job, 2)
        return
    doubles, size, total = np.empty(0, np.float64), job.S * job.Q * job.K, 0.0
    row = at(job.row, job.B * job.P * job.S * job.K, doubles)
    for j in range(len(row)):
        total += row[j]
    if not np.isfinite(total):
        total = _sum_in_double(job, gs, ss, row)
    job.finite = total
    for j in range(len(row)):
        row[j] = (row[j] + job.Q * job.eps) / job.n_cols
    for b in range(job.B):
        col = at(job.col + 8 * b * size, size, doubles)
        fill(col, 0, size, job.P * job.eps)
        hot = size if job.early else 0
        heat = at(job.heat + 8 * b * job.cuts * size, hot, doubles)
        for unit in range(b * job.cuts, (b + 1) * job.cuts):
            add(col, at(job.partial + 8 * unit * size, size, doubles))
            if unit > b * job.cuts:
                add(heat, at(job.heat + 8 * unit * size, hot, doubles))
        for j in range(size):
            col[j] /= job.n_rows


@_summing
def _sum_in_double(job: Any, gs: Any, ss: Any, row: Any) -> float:
    """Again for one tensor, with room for every square; leaves the columns' sums in the first unit of each B."""
    largest = 3.4028234663852886e38 if ss.itemsize == 4 else 1.7976931348623157e308
    line, total = job.Q * job.K, 0.0
    fill(row, 0, len(row), 0.0)
    for b in range(job.B):
        size = job.cuts * job.S * line
        partial = at(job.partial + 8 * b * size, size, row)
        fill(partial, 0, size, 0.0)
        for p in range(job.P):
            for s in range(job.S):
                g = at(job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), line, gs)
                for j in range(line):
                    a = widen(g[j], 0.0)
                    square = a * a if a * a <= largest else np.inf
                    partial[s * line + j] += square
                    row[((b * job.P + p) * job.S + s) * job.K + j % job.K] += square
                    total += square
    if job.early and np.isfinite(total):
        _heat_in_double(job, gs, ss, row)
    return total


@_summing
def _heat_in_double(job: Any, gs: Any, ss: Any, row: Any) -> None:
    line = job.Q * job.K
    for b in range(job.B):
        size, rows = job.cuts * job.S * line, row[b * job.P * job.S * job.K :]
        heat = at(job.heat + 8 * b * size, size, row)
        fill(heat, 0, size, 0.0)
        for p in range(job.P):
            for s in range(job.S):
                g = at(job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), line, gs)
                for j in range(line):
                    u = widen(g[j], 0.0) * _scale_of(job, b, rows, (p * job.S + s) * job.K + j % job.K, ss)
                    heat[s * line + j] += u * u


@_summing
def _factor(job: Any, ss: Any) -> None:
    """Algorithm 4, lines 5–7: R and C averaged in double, kept in the state's precision, and 1/√V̂ from them."""
    if job.estimator == FULL:
        return
    doubles, batch = np.empty(0, np.float64), job.S * job.K
    row, col = at(job.row, job.B * job.P * batch, doubles), at(job.col, job.B * job.Q * batch, doubles)
    row_scale, col_scale = at(job.row_scale, len(row), ss), at(job.col_scale, len(col), ss)
    means = at(job.means, job.B * batch, doubles)
    fill(row_scale, 0, len(row), narrow(1.0, ss[0]))
    fill(col_scale, 0, len(col), narrow(1.0, ss[0]))
    fill(means, 0, len(means), 1.0)
    if job.estimator != COLUMN:
        _average(row, at(job.row_state, len(row), ss), job.w2)
        if job.estimator == OUTER and not job.swapped:
            _normalise(row, job.B, job.P, batch, job.mean, means)
        _inverse_root(row, row_scale)
    if job.estimator != ROW:
        _average(col, at(job.col_state, len(col), ss), job.w2)
        if job.estimator == OUTER and job.swapped:
            _normalise(col, job.B * job.S, job.Q, job.K, job.mean, means)
            fill(means, 0, len(means), 1.0)  # C has been divided by them
        _inverse_root(col, col_scale)
    else:
        fill(col, 0, len(col), 1.0)
    if job.early:
        _energy_of_columns(job, col, means)


@_summing
def _energy_of_columns(job: Any, col: Any, means: Any) -> None:
    """ΣU² from Σ(G/√R)² of every column: what is missing is mean(R)/C."""
    line, total = job.Q * job.K, 0.0
    for o in range(job.B * job.S):
        b = o // job.S
        heat = at(job.heat + 8 * (b * job.cuts * job.S + o - b * job.S) * line, line, col)
        for j in range(line):
            total += heat[j] / col[o * line + j] * means[o * job.K + j % job.K]
    job.u2 = total


@_as_written
def _average(new: Any, state: Any, weight: float) -> None:
    # two loops, so that product and sum are not fused: copies of a factor on several ranks must not differ
    for j in range(len(new)):
        new[j] = weight * (new[j] - state[j])
    for j in range(len(new)):
        new[j] += state[j]
        state[j] = narrow(new[j], state[j])


@_summing
def _normalise(values: Any, outer: int, count: int, inner: int, known: int, means: Any) -> None:
    """Divide a factor by its mean along its own axis, for every slice of the batch, and keep the means."""
    for o in range(outer):
        for i in range(inner):
            mean = 0.0
            if known:  # from outside: here is only a part of the factor
                mean = at(known, outer * inner, values)[o * inner + i]
            else:
                for j in range(count):
                    mean += values[(o * count + j) * inner + i]
                mean /= count
            means[o * inner + i] = mean
            for j in range(count):
                values[(o * count + j) * inner + i] /= mean


@_summing
def _inverse_root(values: Any, out: Any) -> None:
    for j in range(len(out)):
        out[j] = narrow(
            1.0 / np.sqrt(values[j]), out[0]
        )  # in double: R/mean(R) may leave float32 where its root does not


@_as_written
def _conclude(job: Any) -> None:
    """`step.conclude`, to the bit: Algorithm 4, lines 3 and 9."""
    job.rms_x, job.rms_u, job.alpha = np.sqrt(job.x2 / job.count), np.sqrt(job.u2 / job.count), job.rho
    if job.relative:
        job.alpha = (job.eps2 if job.rms_x < job.eps2 else job.rms_x) * job.rho
    divisor = 1.0
    if job.clip > 0:
        ratio = job.rms_u / job.clip
        divisor = 1.0 if ratio < 1.0 else ratio  # a NaN stays one
    job.scale, job.clips = job.sign * job.alpha / divisor, divisor > 1


# ---- second walk: ΣU² where the first could not have it, ΣX² where the last step does not say -----------------------


@_summing
def _blend_lines(job: Any, unit: int, gs: Any, ss: Any) -> None:
    b, start, stop = _span(job, unit)
    weight, line = narrow(job.w1, ss[0]), job.Q * job.K
    for p in range(start, stop):
        for s in range(job.S):
            m = job.m + ss.itemsize * (b * job.xb + p * job.xp + s * job.xs)
            g = job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs)
            blend(at(m, line, ss), at(g, line, gs), weight)


@_summing
def _energy_of_lines(
    job: Any, unit: int, base: int, gb: int, gp: int, gt: int, gs: Any, ss: Any, room: Any
) -> None:  # fmt: skip
    """ΣU² of G, or of the momentum in its place, that begins at `base` and has these strides."""
    b, start, stop = _span(job, unit)
    line, u2, tile = job.Q * job.K, 0.0, _tile(job, room)
    row = at(job.row_scale, job.B * job.P * job.S * job.K, ss)
    for p in range(start, stop):
        for s in range(job.S):
            r = ((b * job.P + p) * job.S + s) * job.K
            g = at(base + gs.itemsize * (b * gb + p * gp + s * gt), line, gs)
            col = at(job.col_scale + ss.itemsize * (b * job.S + s) * line, line, ss)
            if job.K == 1:
                for q in range(0, line, WIDTH):
                    u2 += energy_of(g[q : q + WIDTH], row[r], col[q : q + WIDTH])
            else:
                repeat(row, r, job.K, narrow(1.0, ss[0]), tile)
                for q in range(0, line, len(tile)):
                    u2 += energy_of_tile(g[q : q + len(tile)], tile, col[q : q + len(tile)])
    _results(job)[3 * unit] = u2


@_summing
def _measure_lines(job: Any, unit: int, xs: Any, ss: Any) -> None:
    b, start, stop = _span(job, unit)
    line, total = job.Q * job.K, 0.0
    for p in range(start, stop):
        for s in range(job.S):
            x = at(job.x + xs.itemsize * (b * job.xb + p * job.xp + s * job.xs), line, xs)
            for q in range(0, line, WIDTH):
                total += sum_of_squares(x[q : q + WIDTH], ss)
    _results(job)[3 * unit] = total


# ---- third walk: apply ------------------------------------------------------------------------------------------


@_summing
def _apply_whole(job: Any, unit: int, xs: Any, gs: Any, ss: Any, room: Any) -> None:
    _, start, stop = _span(job, unit)
    size = stop - start
    x, g = at(job.x + xs.itemsize * start, size, xs), at(job.g + gs.itemsize * start, size, gs)
    v = at(job.v + ss.itemsize * start, size, ss)
    m = at(job.m + ss.itemsize * start, size, ss) if job.momentum != NONE else v
    if job.rounding == NEAREST:
        descend_whole(x, g, v, m, job)
        return
    c = at(job.c + xs.itemsize * start, size, xs)
    for i in range(0, size, WIDTH):
        e = min(size, i + WIDTH)
        values = room[: e - i]
        _take(job, values, x[i:e], c[i:e])
        descend_whole(values, g[i:e], v[i:e], m[i:e], job)
        _put(job, x[i:e], c[i:e], values, job.origin + (start + i) * job.np, job.np)


def _take(job: Any, values: Any, x: Any, c: Any) -> None:
    """X as numbers to compute with; compiled only for what is rounded when it is put back."""


def _put(job: Any, x: Any, c: Any, values: Any, first: int, step: int) -> None:
    """The numbers as X."""


@overload(_take, strict=False)
def _taking(job: Any, values: Any, x: Any, c: Any) -> Any:
    def impl(job: Any, values: Any, x: Any, c: Any) -> None:
        if job.rounding == KAHAN:
            take_compensated(values, x, c)
        else:
            take(values, x)

    return impl if x.dtype in (types.uint16, types.int16) else lambda job, values, x, c: None


@overload(_put, strict=False)
def _putting(job: Any, x: Any, c: Any, values: Any, first: int, step: int) -> Any:
    def impl(job: Any, x: Any, c: Any, values: Any, first: int, step: int) -> None:
        if job.rounding == KAHAN:
            put_compensated(x, c, values)
        else:
            put_stochastic(x, values, first, step, np.uint32(job.key1), np.uint32(job.key2))

    return impl if x.dtype in (types.uint16, types.int16) else lambda job, x, c, values, first, step: None


@_summing
def _apply_to_lines(
    job: Any, unit: int, base: int, gb: int, gp: int, gt: int, goes: bool, xs: Any, gs: Any, ss: Any, room: Any
) -> None:
    """X of a unit; G, or the momentum in its place, begins at `base` and has these strides.

    If it does not go, all is the same but by a step of length zero: so ΣX² is found by the loop that will look for it
    in the next step, to the bit.
    """
    b, start, stop = _span(job, unit)
    line, rounds = job.Q * job.K, job.rounding != NEAREST
    row = at(job.row_scale, job.B * job.P * job.S * job.K, ss)
    w1, decay = narrow(job.w1 if goes else 0.0, ss[0]), narrow(job.decay if goes else 1.0, ss[0])
    factor, reach = narrow(job.scale if goes else 0.0, ss[0]), narrow(1.0 if goes else 0.0, ss[0])
    half = (stop - start) // 2 if job.K == 1 and xs.itemsize > 2 else 0  # conversions want all the registers
    found, left = 0.0, 0.0
    for p in range(start, start + half):
        for s in range(job.S):
            r = (b * job.P + p) * job.S + s
            r0, r1 = row[r] * factor, row[r + half * job.S] * factor
            for q in range(0, line, WIDTH):
                width, x = min(WIDTH, line - q), b * job.xb + p * job.xp + s * job.xs + q
                x0, m0 = at(job.x + xs.itemsize * x, width, xs), at(job.m + ss.itemsize * x, width, ss)
                x += half * job.xp
                x1, m1 = at(job.x + xs.itemsize * x, width, xs), at(job.m + ss.itemsize * x, width, ss)
                g = base + gs.itemsize * (b * gb + p * gp + s * gt + q)
                g0, g1 = at(g, width, gs), at(g + gs.itemsize * half * gp, width, gs)
                col = at(job.col_scale + ss.itemsize * ((b * job.S + s) * line + q), width, ss)
                before, after = descend_two(
                    x0, x1, m0, m1, g0, g1, r0, r1, col, job.momentum == OF_UPDATE, w1, decay, reach
                )  # fmt: skip
                found += before
                left += after
    tile = _tile(job, room)
    most = len(tile) if job.K > 1 else WIDTH
    room = room[len(tile) :]
    for p in range(start + 2 * half, stop):
        for s in range(job.S):
            r = ((b * job.P + p) * job.S + s) * job.K
            x = b * job.xb + p * job.xp + s * job.xs
            g = base + gs.itemsize * (b * gb + p * gp + s * gt)
            col = job.col_scale + ss.itemsize * (b * job.S + s) * line
            if job.K > 1:
                repeat(row, r, job.K, factor, tile)
            for q in range(0, line, most):
                width = min(most, line - q)
                to, by = at(job.x + xs.itemsize * (x + q), width, xs), at(g + gs.itemsize * q, width, gs)
                by_col, m = at(col + ss.itemsize * q, width, ss), at(job.m + ss.itemsize * (x + q), width, ss)
                if rounds:
                    c, values = at(job.c + xs.itemsize * (x + q), width, xs), room[:width]
                    number = job.origin + b * job.nb + p * job.np + s * job.ns + q * job.nq
                    _take(job, values, to, c)
                    _descend(job, values, m, by, row[r] * factor, tile, by_col, w1, decay)
                    _put(job, to, c, values, number, job.nq)
                else:
                    if job.carries:
                        found += sum_of_squares(to, ss)
                    if goes:
                        _descend(job, to, m, by, row[r] * factor, tile, by_col, w1, decay)
                    if job.carries:
                        left += sum_of_squares(to, ss)
    if job.carries:
        results = _results(job)
        results[3 * unit], results[3 * unit + 1] = found, left


@_exactly
def _descend(job: Any, x: Any, m: Any, g: Any, row: Any, tile: Any, col: Any, w1: Any, decay: Any) -> None:
    """X of a part of a line, whose row has one scale or, in a batch of slices, a tile of them."""
    if job.momentum == OF_UPDATE:
        if job.K > 1:
            descend_averaged_tile(x, m, g, tile, col, w1, decay)
        else:
            descend_averaged(x, m, g, row, col, w1, decay)
    elif job.K > 1:
        descend_tile(x, g, tile, col, decay)
    else:
        descend(x, g, row, col, decay)


@_summing
def _correct_lines(job: Any, unit: int, base: int, gb: int, gp: int, gt: int, xs: Any, gs: Any, ss: Any) -> None:
    """X once more where it was not what ΣX² said: `scale` is what was missing."""
    b, start, stop = _span(job, unit)
    line, one, row = job.Q, narrow(1.0, ss[0]), at(job.row_scale, job.B * job.P * job.S, ss)
    factor = narrow(job.w1 * job.scale if job.momentum == OF_UPDATE else job.scale, ss[0])
    for p in range(start, stop):
        for s in range(job.S):
            x, by = b * job.xb + p * job.xp + s * job.xs, row[(b * job.P + p) * job.S + s] * factor
            g = at(base + gs.itemsize * (b * gb + p * gp + s * gt), line, gs)
            col = at(job.col_scale + ss.itemsize * (b * job.S + s) * line, line, ss)
            descend(at(job.x + xs.itemsize * x, line, xs), g, by, col, one)
            if job.momentum == OF_UPDATE:
                descend(at(job.m + ss.itemsize * x, line, ss), g, -by, col, one)


# ---- walks ------------------------------------------------------------------------------------------------------


@_summing
def _needs(job: Any, phase: int) -> Any:
    """Is there such a walk? What is known early, or from the last step, needs none."""
    if phase == MOMENTS:
        return True
    if phase == APPLY or not job.taken or job.estimator == FULL:
        return phase == APPLY and job.taken != 0
    return not job.early if phase == ENERGY else job.looks != 0


@_summing
def _do(job: Any, phase: int, unit: int, xs: Any, gs: Any, ss: Any, room: Any) -> None:
    """One unit of a walk."""
    if job.estimator == FULL:
        if phase == MOMENTS:
            _measure_whole(job, unit, xs, gs, ss)
        else:
            _apply_whole(job, unit, xs, gs, ss, room)
    elif phase == MOMENTS:
        _sum_lines(job, unit, gs, ss, room)
    elif phase == MEASURE and not job.carries:
        _measure_lines(job, unit, xs, ss)
    else:  # U is made of G, or of the momentum in its place
        base, b, p, s = job.g, job.gb, job.gp, job.gs
        if job.momentum == OF_GRADIENT:
            base, b, p, s = job.m, job.xb, job.xp, job.xs
            if phase == ENERGY:
                _blend_lines(job, unit, gs, ss)
            _use(job, phase, unit, base, b, p, s, xs, ss, ss, room)
        else:
            _use(job, phase, unit, base, b, p, s, xs, gs, ss, room)


@_summing
def _use(
    job: Any, phase: int, unit: int, base: int, b: int, p: int, s: int, xs: Any, gs: Any, ss: Any, room: Any
) -> None:
    if phase == ENERGY:
        _energy_of_lines(job, unit, base, b, p, s, gs, ss, room)
    else:
        _apply_to_lines(job, unit, base, b, p, s, phase == APPLY, xs, gs, ss, room)


@_summing
def _close(job: Any, phase: int, xs: Any, gs: Any, ss: Any) -> None:
    """What follows a walk, once all its units are done."""
    if phase == MOMENTS:
        _fold(job, gs, ss)
        job.taken = job.ignore or np.isfinite(job.finite)
        job.skipped += not job.taken
        if job.taken:
            _factor(job, ss)
        if job.carries and job.steady:
            job.x2 = job.left
        job.looks = job.measures and not (job.carries and job.steady)
    elif phase == ENERGY:
        job.u2 = _total(job, 0)
    elif phase == MEASURE:
        job.x2 = _total(job, 0)
        job.steady = job.x2 == job.left
    else:
        _finish(job, xs, gs, ss)
        return
    if job.taken and not (phase < ENERGY and _needs(job, ENERGY)) and not (phase < MEASURE and _needs(job, MEASURE)):
        _conclude(job)


@_summing
def _finish(job: Any, xs: Any, gs: Any, ss: Any) -> None:
    """Count the step; if ΣX² was carried over and is not that of the X found now, repair it."""
    if job.carries:
        found, job.left = _total(job, 0), _total(job, 1)
        if found != job.x2 and not (np.isnan(found) and np.isnan(job.left)):
            used, job.x2 = job.scale, found
            _conclude(job)
            job.scale -= used
            for unit in range(job.B * job.cuts):
                if job.momentum == OF_GRADIENT:
                    _correct_lines(job, unit, job.m, job.xb, job.xp, job.xs, xs, ss, ss)
                else:
                    _correct_lines(job, unit, job.g, job.gb, job.gp, job.gs, xs, gs, ss)
            job.left, job.steady = np.nan, False
    at(job.t, 1, np.empty(0, np.float32))[0] += 1
    job.noted_beta2 = job.beta2
    job.steps += 1
    job.clipped += job.clips


@_entry
def walk(jobs: Any, xs: Any, gs: Any, ss: Any, board: Any, shared: int, phase: int, first: int, last: int) -> None:
    """One walk, through the units that start in [first, last); or a whole step.

    A whole step is taken by all the threads that call this with the same `board`, which begins with zeros. The first
    `shared` tensors are walked by all together, unit by unit; each of the others is one thread's alone, that goes
    through it while it is in the cache, and they fill the pauses of the large ones. Nobody counts on another thread: a
    walk ends when its units are done, by whomever.
    """
    room = _room(jobs, ss)
    if phase != ALL:
        for i in range(len(jobs)):
            job = jobs[i]
            if _needs(job, phase):
                for unit in range(job.B * job.cuts):
                    if first <= _begin(job, unit) < last:
                        _do(job, phase, unit, xs, gs, ss, room)
        return
    most, base = 0, board.ctypes.data
    for i in range(shared, len(jobs)):
        most = max(most, _size(jobs[i]))
    scratch = np.empty(most, np.float64)
    for i in range(shared + 1):
        for phase in range(4 if i < shared else 1):
            here = base + 8 * (1 + 3 * (4 * i + phase))  # how many units were begun, and done; whether all is
            if i < shared:
                job, units = jobs[i], jobs[i].B * jobs[i].cuts
                if not _needs(job, phase):
                    continue
                unit = _add(here, 1)
                while unit < units:
                    # the last walk goes backwards: it begins with what the first one left in the cache
                    _do(job, phase, units - 1 - unit if phase == APPLY else unit, xs, gs, ss, room)
                    if _add(here + 8, 1) == units - 1:
                        _close(job, phase, xs, gs, ss)
                        _add(here + 16, 1)
                    unit = _add(here, 1)
            while i == shared or _add(here + 16, 0) == 0:
                number = shared + _add(base, 1)
                if number < len(jobs):
                    _go_through(jobs[number], xs, gs, ss, room, scratch)
                elif i == shared:
                    return
                else:
                    _rest()


@_summing
def _go_through(job: Any, xs: Any, gs: Any, ss: Any, room: Any, scratch: Any) -> None:
    """All the walks of one tensor."""
    _furnish(job, scratch.ctypes.data)
    for phase in range(4):
        if _needs(job, phase):
            for unit in range(job.B * job.cuts):
                _do(job, phase, unit, xs, gs, ss, room)
            _close(job, phase, xs, gs, ss)


@_entry
def fold(jobs: Any, gs: Any, ss: Any) -> None:
    """Add up what the units of the first walk left: means over rows and columns, and whether all of G² is finite."""
    for i in range(len(jobs)):
        _fold(jobs[i], gs, ss)


@_entry
def factors(jobs: Any, ss: Any) -> None:
    """R, C and 1/√V̂ of those that take the step."""
    for i in range(len(jobs)):
        if jobs[i].taken:
            _factor(jobs[i], ss)


@_entry
def gather(jobs: Any, phase: int) -> None:
    """Add up ΣU² or ΣX² of the units of the second walk."""
    for i in range(len(jobs)):
        job = jobs[i]
        if _needs(job, phase):
            if phase == ENERGY:
                job.u2 = _total(job, 0)
            else:
                job.x2 = _total(job, 0)


@_entry
def furnish(jobs: Any, count: int, room: Any, apart: bool) -> None:
    """Give the first jobs their part of the room, each its own or one after the other the same."""
    base = room.ctypes.data
    for i in range(count):
        _furnish(jobs[i], base)
        base += 8 * _size(jobs[i]) if apart else 0


@_summing
def _furnish(job: Any, base: int) -> None:
    """The addresses of vectors for R along P and C along Q, their scales, R's means, and of the units' sums."""
    row, col, batch = _lengths(job)
    job.row, job.col = base, base + 8 * row
    job.row_scale, job.col_scale = job.col + 8 * col, job.col + 8 * (col + row)
    job.means = job.col_scale + 8 * col
    job.partial = job.means + 8 * batch
    job.heat = job.partial + 8 * col * job.cuts
    job.units = job.heat + 8 * col * job.cuts


@_summing
def _size(job: Any) -> Any:
    """How many doubles that is."""
    row, col, batch = _lengths(job)
    return 2 * (row + col) + batch + 2 * col * job.cuts + 3 * job.B * job.cuts


@_summing
def _lengths(job: Any) -> Any:
    """Of R, of C and of their batch."""
    batch = 0 if job.estimator == FULL else job.B * job.S * job.K
    return job.P * batch, job.Q * batch, batch


@_entry
def counts(jobs: Any, out: Any) -> None:
    """The step counts of all jobs."""
    for i in range(len(jobs)):
        out[i] = at(jobs[i].t, 1, np.empty(0, np.float32))[0]
