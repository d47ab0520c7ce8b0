"""The loops of the `cpu` backend, compiled by Numba: plain Python to read, native to run.

A *job* is one tensor in the order of its memory: B × P × S × Q × K, where P and Q are its two factored axes, P the
outer, and B, S, K are the other axes before, between and after them. A *line* is Q·K numbers side by side; a *unit* is
consecutive lines, the smallest piece that one thread takes. What is kept whole is one line, cut anywhere.

Sums are taken in the statistics' precision over at most `WIDTH` numbers (or `TALL` rows) and in double beyond. Units
do not depend on the number of threads and their sums are added in one order, so neither does the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload, register_jitable

WIDTH = 2048  # numbers of a line at a time: four of float32 and the column's share fit the first cache
TALL = 64  # rows that are summed in the statistics' precision
TILE = 32  # short batch slices that an inner loop takes together: then no registers are left half empty

OUTER, ROW, COLUMN, FULL = range(4)
NONE, OF_UPDATE, OF_GRADIENT = range(3)

JOB = np.dtype(
    [(name, np.int64) for name in "B P S Q K xb xp xs gb gp gs".split()]  # sizes; strides of X and G along B, P, S
    + [(name, np.int64) for name in "rows cuts start".split()]  # P's per unit, units per B, first element in the bucket
    + [(name, np.int64) for name in "estimator swapped momentum relative taken".split()]
    + [(name, np.int64) for name in "x g v m".split()]  # addresses of X, G, and of V̂ and the momentum kept whole
    + [(name, np.int64) for name in "row col row_scale col_scale partial units".split()]  # addresses of scratch
    + [(name, np.int64) for name in "row_state col_state mean".split()]  # addresses of R, C and the known mean of R
    + [(name, np.float64) for name in "n_rows n_cols eps w1 w2 scale decay u2 x2 finite".split()]
)

# Multiply-adds may be fused and sums reordered, but never products: G·r·c stays in range only from left to right.
# NaN, infinities and denormals keep their meaning.
_exactly = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
_compiled = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
_as_written = njit(nogil=True, cache=True, error_model="numpy")  # each operation rounded on its own, as `eager` does


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An integer as an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


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


# ---- lines ------------------------------------------------------------------------------------------------------


@_compiled
def squares(g: Any, col: Any) -> Any:
    """Add G² of one line to the columns; return its sum."""
    total = narrow(0.0, col[0])
    for j in range(len(g)):
        a = widen(g[j], col[0])
        q = a * a
        total += q
        col[j] += q
    return total


@_compiled
def squares_of_four(g0: Any, g1: Any, g2: Any, g3: Any, col: Any) -> Any:
    """The same for four lines: the columns are read and written once."""
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


@_compiled
def squares_in_tiles(g: Any, col: Any, row: Any) -> None:
    """The same for a line of short batch slices: `row` is a whole number of slices long and takes their sums."""
    for start in range(0, len(g), len(row)):
        part, sums = g[start : start + len(row)], col[start : start + len(row)]
        for j in range(len(part)):
            a = widen(part[j], row[0])
            q = a * a
            row[j] += q
            sums[j] += q


@_compiled
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


@_compiled
def energy_of(g: Any, row: Any, col: Any) -> Any:
    """ΣU² of a line."""
    total = narrow(0.0, row)
    for j in range(len(g)):
        u = scaled(g[j], row, col[j])
        total += u * u
    return total


@_compiled
def energy_of_four(g0: Any, g1: Any, g2: Any, g3: Any, r0: Any, r1: Any, r2: Any, r3: Any, col: Any) -> Any:
    """The same for four lines."""
    total = narrow(0.0, r0)
    for j in range(len(col)):
        u0, u1 = scaled(g0[j], r0, col[j]), scaled(g1[j], r1, col[j])
        u2, u3 = scaled(g2[j], r2, col[j]), scaled(g3[j], r3, col[j])
        total += (u0 * u0 + u1 * u1) + (u2 * u2 + u3 * u3)
    return total


@_compiled
def energy_of_tile(g: Any, row: Any, col: Any) -> Any:
    """The same for a part of a line over which the row's scale changes too."""
    total = narrow(0.0, col[0])
    for j in range(len(g)):
        u = scaled(g[j], row[j], col[j])
        total += u * u
    return total


@_exactly
def blend(m: Any, g: Any, weight: Any) -> None:
    """Average a gradient into its momentum."""
    for j in range(len(m)):
        m[j] += weight * (widen(g[j], weight) - m[j])


@_exactly
def blend_update(m: Any, g: Any, row: Any, col: Any, weight: Any) -> None:
    """Average an update into its momentum."""
    for j in range(len(m)):
        m[j] += weight * (scaled(g[j], row, col[j]) - m[j])


@_exactly
def blend_update_of_tile(m: Any, g: Any, row: Any, col: Any, weight: Any) -> None:
    """The same where the row's scale changes too."""
    for j in range(len(m)):
        m[j] += weight * (scaled(g[j], row[j], col[j]) - m[j])


@_exactly
def descend(x: Any, g: Any, row: Any, col: Any, decay: Any) -> None:
    """X·decay − U."""
    for j in range(len(x)):
        x[j] = narrow(widen(x[j], decay) * decay - scaled(g[j], row, col[j]), x[j])


@_exactly
def descend_tile(x: Any, g: Any, row: Any, col: Any, decay: Any) -> None:
    """The same where the row's scale changes too."""
    for j in range(len(x)):
        x[j] = narrow(widen(x[j], decay) * decay - scaled(g[j], row[j], col[j]), x[j])


@_exactly
def subtract(x: Any, m: Any, decay: Any) -> None:
    """X·decay − M."""
    for j in range(len(x)):
        x[j] = narrow(widen(x[j], decay) * decay - m[j], x[j])


@_compiled
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
def repeat(values: Any, factor: Any, out: Any) -> None:
    """Fill `out` with copies of `values` × `factor`, one after the other."""
    for start in range(0, len(out), len(values)):
        for k in range(len(values)):
            out[start + k] = values[k] * factor


# ---- walks ------------------------------------------------------------------------------------------------------


@_compiled
def moments(jobs: Any, xs: Any, gs: Any, ss: Any, first: int, last: int) -> None:
    """First walk, for the units that start in [first, last): sums of G²; for what is kept whole all of ΣU² and ΣX²."""
    room, tile = np.empty(WIDTH, ss.dtype), np.empty(WIDTH, ss.dtype)
    for i in range(len(jobs)):
        job = jobs[i]
        for unit in range(job.B * job.cuts):
            if first <= _begin(job, unit) < last:
                if job.estimator == FULL:
                    _measure_whole(job, unit, xs, gs, ss)
                elif job.K == 1:
                    _sum_lines(job, unit, gs, ss, room)
                else:
                    _sum_tiles(job, unit, gs, ss, room, tile)


@_compiled
def _span(job: Any, unit: int) -> Any:
    """The batch index of a unit, its first P and the one after its last."""
    b = unit // job.cuts
    start = (unit - b * job.cuts) * job.rows
    return b, start, min(job.P, start + job.rows)


@_compiled
def _begin(job: Any, unit: int) -> Any:
    """The first element of a unit, counted over the bucket."""
    b, start, _ = _span(job, unit)
    return job.start + (b * job.P + start) * job.S * job.Q * job.K


@_compiled
def _extent(job: Any, sb: int, sp: int, ss: int) -> Any:
    """How far a tensor with these strides reaches in memory."""
    return (job.B - 1) * sb + (job.P - 1) * sp + (job.S - 1) * ss + job.Q * job.K


@_compiled
def _sum_lines(job: Any, unit: int, gs: Any, ss: Any, room: Any) -> None:
    b, start, stop = _span(job, unit)
    doubles = np.empty(0, np.float64)
    g = at(job.g, _extent(job, job.gb, job.gp, job.gs), gs)
    row = at(job.row, job.B * job.P * job.S, doubles)
    partial = at(job.partial + 8 * unit * job.S * job.Q, job.S * job.Q, doubles)
    row[(b * job.P + start) * job.S : (b * job.P + stop) * job.S] = 0.0
    for s in range(job.S):
        for q in range(0, job.Q, WIDTH):
            width = min(WIDTH, job.Q - q)
            sums, col = partial[s * job.Q + q : s * job.Q + q + width], room[:width]
            sums[:] = 0.0
            for top in range(start, stop, TALL):
                col[:] = narrow(0.0, ss[0])
                p, bottom = top, min(stop, top + TALL)
                while p < bottom:
                    o = b * job.gb + p * job.gp + s * job.gs + q
                    r = (b * job.P + p) * job.S + s
                    if p + 4 <= bottom:
                        o1, o2, o3 = o + job.gp, o + 2 * job.gp, o + 3 * job.gp
                        t0, t1, t2, t3 = squares_of_four(
                            g[o : o + width], g[o1 : o1 + width], g[o2 : o2 + width], g[o3 : o3 + width], col
                        )
                        row[r] += t0
                        row[r + job.S] += t1
                        row[r + 2 * job.S] += t2
                        row[r + 3 * job.S] += t3
                        p += 4
                    else:
                        row[r] += squares(g[o : o + width], col)
                        p += 1
                for j in range(width):
                    sums[j] += col[j]


@_compiled
def _sum_tiles(job: Any, unit: int, gs: Any, ss: Any, room: Any, tile: Any) -> None:
    b, start, stop = _span(job, unit)
    doubles = np.empty(0, np.float64)
    g = at(job.g, _extent(job, job.gb, job.gp, job.gs), gs)
    row = at(job.row, job.B * job.P * job.S * job.K, doubles)
    line = job.Q * job.K
    partial = at(job.partial + 8 * unit * job.S * line, job.S * line, doubles)
    tile = _tile(job, tile)
    most = max(1, WIDTH // len(tile)) * len(tile)
    room = room if most <= len(room) else np.empty(most, ss.dtype)
    row[(b * job.P + start) * job.S * job.K : (b * job.P + stop) * job.S * job.K] = 0.0
    for s in range(job.S):
        for q in range(0, line, most):
            width = min(most, line - q)
            sums, col = partial[s * line + q : s * line + q + width], room[:width]
            sums[:] = 0.0
            for top in range(start, stop, TALL):
                col[:] = narrow(0.0, ss[0])
                for p in range(top, min(stop, top + TALL)):
                    o = b * job.gb + p * job.gp + s * job.gs + q
                    tile[:] = narrow(0.0, ss[0])
                    squares_in_tiles(g[o : o + width], col, tile)
                    r = ((b * job.P + p) * job.S + s) * job.K
                    for t in range(0, len(tile), job.K):
                        for k in range(job.K):
                            row[r + k] += tile[t + k]
                for j in range(width):
                    sums[j] += col[j]


@_compiled
def _tile(job: Any, tile: Any) -> Any:
    """Room for a whole number of slices of K: `TILE`, or fewer of longer ones."""
    size = job.K * max(1, min(TILE, WIDTH // job.K))
    return tile[:size] if size <= len(tile) else np.empty(size, tile.dtype)


@_compiled
def _measure_whole(job: Any, unit: int, xs: Any, gs: Any, ss: Any) -> None:
    _, start, stop = _span(job, unit)
    like = ss[0]
    x, g, v = at(job.x, job.P, xs), at(job.g, job.P, gs), at(job.v, job.P, ss)
    m = at(job.m if job.m else job.v, job.P, ss)
    result = at(job.units + 24 * unit, 3, np.empty(0, np.float64))
    w1, w2, eps = narrow(job.w1, like), narrow(job.w2, like), narrow(job.eps, like)
    u2, x2, seen = 0.0, 0.0, 0.0
    for p in range(start, stop, WIDTH):
        e = min(stop, p + WIDTH)
        energy, total = energy_of_whole(g[p:e], v[p:e], m[p:e], job.momentum == OF_GRADIENT, w1, w2, eps)
        u2 += energy
        seen += total
        if job.relative:
            x2 += sum_of_squares(x[p:e], ss)
    result[0], result[1], result[2] = u2, x2, seen


@_compiled
def fold(jobs: Any, gs: Any, ss: Any) -> None:
    """Add up what the units of the first walk left: means over rows and columns, and whether all of G² is finite."""
    doubles = np.empty(0, np.float64)
    for i in range(len(jobs)):
        job = jobs[i]
        if job.estimator == FULL:
            _fold_units(job)
            continue
        row = at(job.row, job.B * job.P * job.S * job.K, doubles)
        total = 0.0
        for j in range(len(row)):
            total += row[j]
        if not np.isfinite(total):
            total = _sum_in_double(job, gs, ss, row)
        job.finite = total
        extra = job.Q * job.eps
        for j in range(len(row)):
            row[j] = (row[j] + extra) / job.n_cols
        size = job.S * job.Q * job.K
        for b in range(job.B):
            col = at(job.col + 8 * b * size, size, doubles)
            col[:] = job.P * job.eps
            for unit in range(b * job.cuts, (b + 1) * job.cuts):
                part = at(job.partial + 8 * unit * size, size, doubles)
                for j in range(size):
                    col[j] += part[j]
            for j in range(size):
                col[j] /= job.n_rows


@_compiled
def _fold_units(job: Any) -> None:
    units = at(job.units, 3 * job.B * job.cuts, np.empty(0, np.float64))
    job.u2, job.x2, job.finite = 0.0, 0.0, 0.0
    for i in range(0, len(units), 3):
        job.u2 += units[i]
        job.x2 += units[i + 1]
        job.finite += units[i + 2]


@_compiled
def _sum_in_double(job: Any, gs: Any, ss: Any, row: Any) -> float:
    """Again for one tensor, with room for every square; leaves the columns' sums in the first unit of each B."""
    doubles = np.empty(0, np.float64)
    largest = 3.4028234663852886e38 if ss.itemsize == 4 else 1.7976931348623157e308
    g = at(job.g, _extent(job, job.gb, job.gp, job.gs), gs)
    line, total = job.Q * job.K, 0.0
    row[:] = 0.0
    for b in range(job.B):
        partial = at(job.partial + 8 * b * job.cuts * job.S * line, job.cuts * job.S * line, doubles)
        partial[:] = 0.0
        for p in range(job.P):
            for s in range(job.S):
                for q in range(job.Q):
                    for k in range(job.K):
                        o = b * job.gb + p * job.gp + s * job.gs + q * job.K + k
                        c = (s * job.Q + q) * job.K + k
                        r = ((b * job.P + p) * job.S + s) * job.K + k
                        a = widen(g[o], 0.0)
                        square = a * a if a * a <= largest else np.inf
                        partial[c] += square
                        row[r] += square
                        total += square
    return total


@_compiled
def factors(jobs: Any, ss: Any) -> None:
    """Algorithm 4, lines 5–7: R and C averaged in double, kept in the state's precision, and 1/√V̂ from them."""
    doubles = np.empty(0, np.float64)
    for i in range(len(jobs)):
        job = jobs[i]
        if job.estimator == FULL or not job.taken:
            continue
        batch = job.S * job.K
        row = at(job.row, job.B * job.P * batch, doubles)
        col = at(job.col, job.B * job.Q * batch, doubles)
        row_scale, col_scale = at(job.row_scale, len(row), ss), at(job.col_scale, len(col), ss)
        row_scale[:] = narrow(1.0, ss[0])
        col_scale[:] = narrow(1.0, ss[0])
        if job.estimator != COLUMN:
            _average(row, at(job.row_state, len(row), ss), job.w2)
            if job.estimator == OUTER and not job.swapped:
                _normalise(row, job.B, job.P, batch, job.mean)
            _inverse_root(row, row_scale)
        if job.estimator != ROW:
            _average(col, at(job.col_state, len(col), ss), job.w2)
            if job.estimator == OUTER and job.swapped:
                _normalise(col, job.B * job.S, job.Q, job.K, job.mean)
            _inverse_root(col, col_scale)


@_as_written
def _average(new: Any, state: Any, weight: float) -> None:
    # two loops, so that product and sum are not fused: copies of a factor on several ranks must not differ
    for j in range(len(new)):
        new[j] = weight * (new[j] - state[j])
    for j in range(len(new)):
        new[j] += state[j]
        state[j] = narrow(new[j], state[j])


@_compiled
def _normalise(values: Any, outer: int, count: int, inner: int, known: int) -> None:
    """Divide a factor by its mean along its own axis, for every slice of the batch."""
    mean = np.zeros(outer * inner)
    if known:  # from outside: here is only a part of the factor
        mean[:] = at(known, outer * inner, mean)
    else:
        for o in range(outer):
            for j in range(count):
                for i in range(inner):
                    mean[o * inner + i] += values[(o * count + j) * inner + i]
        mean /= count
    for o in range(outer):
        for j in range(count):
            for i in range(inner):
                values[(o * count + j) * inner + i] /= mean[o * inner + i]


@_compiled
def _inverse_root(values: Any, out: Any) -> None:
    for j in range(len(out)):
        out[j] = narrow(
            1.0 / np.sqrt(values[j]), out[0]
        )  # in double: R/mean(R) may leave float32 where its root does not


@_compiled
def energy(jobs: Any, xs: Any, gs: Any, ss: Any, first: int, last: int) -> None:
    """Second walk, its units backwards, so that it begins with what the first one left in the cache: ΣU² and ΣX²."""
    tile = np.empty(WIDTH, ss.dtype)
    for i in range(len(jobs) - 1, -1, -1):
        job = jobs[i]
        if job.estimator == FULL or not job.taken:
            continue
        for unit in range(job.B * job.cuts - 1, -1, -1):
            if first <= _begin(job, unit) < last:
                if job.momentum == OF_GRADIENT:
                    _blend_lines(job, unit, gs, ss)
                    _energy_of_unit(job, unit, xs, ss, ss, tile)
                else:
                    _energy_of_unit(job, unit, xs, gs, ss, tile)


@_compiled
def _blend_lines(job: Any, unit: int, gs: Any, ss: Any) -> None:
    b, start, stop = _span(job, unit)
    g = at(job.g, _extent(job, job.gb, job.gp, job.gs), gs)
    m = at(job.m, _extent(job, job.xb, job.xp, job.xs), ss)
    weight, line = narrow(job.w1, ss[0]), job.Q * job.K
    for p in range(start, stop):
        for s in range(job.S):
            o, n = b * job.xb + p * job.xp + s * job.xs, b * job.gb + p * job.gp + s * job.gs
            blend(m[o : o + line], g[n : n + line], weight)


@_compiled
def _energy_of_unit(job: Any, unit: int, xs: Any, gs: Any, ss: Any, tile: Any) -> None:
    """`gs` is `ss` where the momentum of the gradient takes its place."""
    b, start, stop = _span(job, unit)
    averaged = job.momentum == OF_GRADIENT
    gb, gp, gt = (job.xb, job.xp, job.xs) if averaged else (job.gb, job.gp, job.gs)
    g = at(job.m if averaged else job.g, _extent(job, gb, gp, gt), gs)
    x = at(job.x, _extent(job, job.xb, job.xp, job.xs), xs)
    line, batch = job.Q * job.K, job.S * job.K
    row = at(job.row_scale, job.B * job.P * batch, ss)
    col = at(job.col_scale, job.B * job.S * line, ss)
    u2, x2 = 0.0, 0.0
    for s in range(job.S):
        scale = col[(b * job.S + s) * line : (b * job.S + s + 1) * line]
        p = start
        while p < stop:
            lines = 4 if p + 4 <= stop and job.K == 1 else 1
            r, o = ((b * job.P + p) * job.S + s) * job.K, b * gb + p * gp + s * gt
            if job.K > 1:
                u2 += _energy_in_tiles(g[o : o + line], row[r : r + job.K], scale, _tile(job, tile))
            elif lines == 4:
                u2 += _energy_of_lines(g[o:], gp, row[r:], job.S, scale)
            else:
                for q in range(0, line, WIDTH):
                    e = min(line, q + WIDTH)
                    u2 += energy_of(g[o + q : o + e], row[r], scale[q:e])
            if job.relative:
                for i in range(p, p + lines):
                    o = b * job.xb + i * job.xp + s * job.xs
                    for q in range(0, line, WIDTH):
                        x2 += sum_of_squares(x[o + q : o + min(line, q + WIDTH)], ss)
            p += lines
    result = at(job.units + 24 * unit, 3, np.empty(0, np.float64))
    result[0], result[1], result[2] = u2, x2, 0.0


@_compiled
def _energy_of_lines(g: Any, gp: int, row: Any, step: int, col: Any) -> float:
    total = 0.0
    for q in range(0, len(col), WIDTH // 4):
        e = min(len(col), q + WIDTH // 4)
        g0, g1, g2 = g[q:e], g[gp + q : gp + e], g[2 * gp + q : 2 * gp + e]
        g3 = g[3 * gp + q : 3 * gp + e]
        total += energy_of_four(g0, g1, g2, g3, row[0], row[step], row[2 * step], row[3 * step], col[q:e])
    return total


@_compiled
def _energy_in_tiles(g: Any, row: Any, col: Any, tile: Any) -> float:
    repeat(row, narrow(1.0, tile[0]), tile)
    total = 0.0
    for q in range(0, len(g), len(tile)):
        e = min(len(g), q + len(tile))
        total += energy_of_tile(g[q:e], tile, col[q:e])
    return total


@_compiled
def gather(jobs: Any) -> None:
    """Add up ΣU² and ΣX² of the units of the second walk."""
    for i in range(len(jobs)):
        if jobs[i].estimator != FULL and jobs[i].taken:
            finite = jobs[i].finite
            _fold_units(jobs[i])
            jobs[i].finite = finite


@_compiled
def apply_(jobs: Any, xs: Any, gs: Any, ss: Any, first: int, last: int) -> None:
    """Third walk, forwards again: X."""
    tile = np.empty(WIDTH, ss.dtype)
    for i in range(len(jobs)):
        job = jobs[i]
        if not job.taken:
            continue
        for unit in range(job.B * job.cuts):
            if first <= _begin(job, unit) < last:
                if job.estimator == FULL:
                    _apply_whole(job, unit, xs, gs, ss)
                elif job.momentum == OF_GRADIENT:
                    _apply_unit(job, unit, xs, ss, ss, tile)
                else:
                    _apply_unit(job, unit, xs, gs, ss, tile)


@_compiled
def _apply_whole(job: Any, unit: int, xs: Any, gs: Any, ss: Any) -> None:
    _, start, stop = _span(job, unit)
    x, g, v = at(job.x, job.P, xs), at(job.g, job.P, gs), at(job.v, job.P, ss)
    m = at(job.m if job.m else job.v, job.P, ss)
    descend_whole(x[start:stop], g[start:stop], v[start:stop], m[start:stop], job)


@_compiled
def _apply_unit(job: Any, unit: int, xs: Any, gs: Any, ss: Any, tile: Any) -> None:
    """`gs` is `ss` where the momentum of the gradient takes its place."""
    b, start, stop = _span(job, unit)
    averaged = job.momentum == OF_GRADIENT
    gb, gp, gt = (job.xb, job.xp, job.xs) if averaged else (job.gb, job.gp, job.gs)
    g = at(job.m if averaged else job.g, _extent(job, gb, gp, gt), gs)
    x = at(job.x, _extent(job, job.xb, job.xp, job.xs), xs)
    m = at(job.m if job.m else job.row_scale, _extent(job, job.xb, job.xp, job.xs), ss)
    line = job.Q * job.K
    row = at(job.row_scale, job.B * job.P * job.S * job.K, ss)
    col = at(job.col_scale, job.B * job.S * line, ss)
    w1, decay, factor = narrow(job.w1, ss[0]), narrow(job.decay, ss[0]), narrow(job.scale, ss[0])
    tile = _tile(job, tile)
    for p in range(start, stop):
        for s in range(job.S):
            r = ((b * job.P + p) * job.S + s) * job.K
            o, n = b * job.xb + p * job.xp + s * job.xs, b * gb + p * gp + s * gt
            scale = col[(b * job.S + s) * line : (b * job.S + s + 1) * line]
            to, by, mean = x[o : o + line], g[n : n + line], m[o : o + line]
            if job.K == 1 and job.momentum == OF_UPDATE:
                blend_update(mean, by, row[r] * factor, scale, w1)
                subtract(to, mean, decay)
            elif job.K == 1:
                descend(to, by, row[r] * factor, scale, decay)
            else:
                repeat(row[r : r + job.K], factor, tile)
                _apply_in_tiles(to, by, mean, tile, scale, job.momentum == OF_UPDATE, w1, decay)


@_compiled
def _apply_in_tiles(x: Any, g: Any, m: Any, tile: Any, col: Any, momentum: bool, w1: Any, decay: Any) -> None:
    for q in range(0, len(x), len(tile)):
        e = min(len(x), q + len(tile))
        if momentum:
            blend_update_of_tile(m[q:e], g[q:e], tile, col[q:e], w1)
            subtract(x[q:e], m[q:e], decay)
        else:
            descend_tile(x[q:e], g[q:e], tile, col[q:e], decay)
