"""Second walk, for ΣU² where the first could not have it and ΣX² where the last step does not say; third walk: X."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from adafactor.kernels.native.elements import at, exactly, narrow, summing
from adafactor.kernels.native.job import KAHAN, NEAREST, NONE, OF_UPDATE, WIDTH, results_of, span, tile_of
from adafactor.kernels.native.lines import (
    blend,
    descend,
    descend_averaged,
    descend_averaged_tile,
    descend_tile,
    descend_two,
    descend_whole,
    energy_of,
    energy_of_tile,
    put_compensated,
    put_stochastic,
    repeat,
    sum_of_squares,
    take,
    take_compensated,
)


@summing
def blend_lines(job: Any, unit: int, gs: Any, ss: Any) -> None:
    """Average a unit of G into its momentum."""
    b, start, stop = span(job, unit)
    weight, line = narrow(job.w1, ss[0]), job.Q * job.K
    for p in range(start, stop):
        for s in range(job.S):
            m = job.m + ss.itemsize * (b * job.xb + p * job.xp + s * job.xs)
            g = job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs)
            blend(at(m, line, ss), at(g, line, gs), weight)


@summing
def energy_of_lines(
    job: Any, unit: int, base: int, gb: int, gp: int, gt: int, gs: Any, ss: Any, room: Any
) -> None:  # fmt: skip
    """ΣU² of G, or of the momentum in its place, that begins at `base` and has these strides."""
    b, start, stop = span(job, unit)
    line, u2, tile = job.Q * job.K, 0.0, tile_of(job, room)
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
    results_of(job)[3 * unit] = u2


@summing
def measure_lines(job: Any, unit: int, xs: Any, ss: Any) -> None:
    """ΣX² of a unit."""
    b, start, stop = span(job, unit)
    line, total = job.Q * job.K, 0.0
    for p in range(start, stop):
        for s in range(job.S):
            x = at(job.x + xs.itemsize * (b * job.xb + p * job.xp + s * job.xs), line, xs)
            for q in range(0, line, WIDTH):
                total += sum_of_squares(x[q : q + WIDTH], ss)
    results_of(job)[3 * unit] = total


# ---- third walk: apply ------------------------------------------------------------------------------------------


@summing
def apply_whole(job: Any, unit: int, xs: Any, gs: Any, ss: Any, room: Any) -> None:
    """X of a unit of what is kept whole."""
    _, start, stop = span(job, unit)
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


@summing
def apply_to_lines(
    job: Any, unit: int, base: int, gb: int, gp: int, gt: int, goes: bool, xs: Any, gs: Any, ss: Any, room: Any
) -> None:
    """X of a unit; G, or the momentum in its place, begins at `base` and has these strides.

    If it does not go, all is the same but by a step of length zero: so ΣX² is found by the loop that will look for it
    in the next step, to the bit.
    """
    b, start, stop = span(job, unit)
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
    tile = tile_of(job, room)
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
        results = results_of(job)
        results[3 * unit], results[3 * unit + 1] = found, left


@exactly
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


@summing
def correct_lines(job: Any, unit: int, base: int, gb: int, gp: int, gt: int, xs: Any, gs: Any, ss: Any) -> None:
    """X once more where it was not what ΣX² said: `scale` is what was missing."""
    b, start, stop = span(job, unit)
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
