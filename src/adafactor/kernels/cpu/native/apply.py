"""Last walk, over G and X: the step itself. The momentum of the update is averaged on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from adafactor.kernels.cpu.native.elements import array_at, exactly, narrow, size_of, summing
from adafactor.kernels.cpu.native.job import (
    APPLY,
    CHECK,
    KAHAN,
    NONE,
    OF_UPDATE,
    RESULTS,
    WIDTH,
    numerator,
    span,
    tile_length,
)
from adafactor.kernels.cpu.native.lines import (
    descend,
    descend_averaged,
    descend_two,
    descend_whole,
    load,
    load_compensated,
    repeat,
    scales_of,
    store_compensated,
    store_stochastic,
    sum_of_squares,
)


class Rates(NamedTuple):
    """The numbers of a step in the statistics' precision: X·decay − scale·U, and the weight of U in the momentum."""

    scale: Any
    w1: Any
    decay: Any
    apply_factor: Any


@summing
def rates_of(job: Any, phase: int, stat: Any) -> Any:
    """Return the rates of a step; in the phase MEASURE, of one of length zero, which only sums (see `carry`)."""
    if phase == APPLY:
        return Rates(narrow(job.scale, stat), narrow(job.w1, stat), narrow(job.decay, stat), narrow(1.0, stat))
    return Rates(narrow(0.0, stat), narrow(0.0, stat), narrow(1.0, stat), narrow(0.0, stat))


@summing
def apply_to_lines(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Step a unit of X of whole lines (K = 1)."""
    none = narrow(0.0, kind.stat)
    _apply_in_pairs(job, phase, unit, none, none, WIDTH, kind)


@summing
def apply_to_tiles(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Step a unit of X whose lines consist of short slices (K > 1)."""
    size = tile_length(job)
    first, second = array_at(scratch, size, kind.stat), array_at(scratch + size_of(kind.stat) * size, size, kind.stat)
    _apply_in_pairs(job, phase, unit, first, second, size, kind)


@summing
def _apply_in_pairs(job: Any, phase: int, unit: int, tile0: Any, tile1: Any, part: int, kind: Any) -> None:
    """Step a unit of X, two lines at a time, part by part, and sum its squares before and after.

    In the phase MEASURE the step has length zero. CHECK does that to the two lines that `heaviest_line` begins only: by
    this same loop, so that it finds the same bits.
    """
    b, start, stop = span(job, unit)
    half, rates, checks = (stop - start) // 2, rates_of(job, phase, kind.stat), phase == CHECK
    p0, s0 = job.heaviest_line // job.S % job.P, job.heaviest_line % job.S
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, kind.stat)
    before, after, heaviest, heaviest_line = 0.0, 0.0, -1.0, 0
    for p in range(p0 if checks else start, p0 + 1 if checks else start + half):
        for s in range(s0 if checks else 0, s0 + 1 if checks else job.S):
            line = (b * job.P + p) * job.S + s
            r0 = scales_of(row, line * job.K, job.K, rates.apply_factor, tile0)
            r1 = scales_of(row, (line + half * job.S) * job.K, job.K, rates.apply_factor, tile1)
            found, left = _step_two(job, b, p, s, half, r0, r1, part, rates, kind)
            before += found
            after += left
            if left > heaviest:
                heaviest, heaviest_line = left, line
    if checks:
        job.checked_x2 = before
        return
    for p in range(start + 2 * half, stop):
        for s in range(job.S):
            line = (b * job.P + p) * job.S + s
            r0 = scales_of(row, line * job.K, job.K, rates.apply_factor, tile0)
            found, left = _step_one(job, b, p, s, r0, part, rates, phase, kind)
            before += found
            after += left
    results = array_at(job.units + 8 * RESULTS * unit, RESULTS, np.float64)
    results[0], results[1], results[2], results[3] = before, after, heaviest, heaviest_line


@summing
def _step_two(job: Any, b: int, p: int, s: int, half: int, r0: Any, r1: Any, part: int, rates: Any, kind: Any) -> Any:
    """Step lines p and p + half; return ΣX² before and after."""
    of, line, before, after = numerator(job), job.Q * job.K, 0.0, 0.0
    for q in range(0, line, part):
        width, x = min(part, line - q), b * job.xb + p * job.xp + s * job.xs + q
        x0, x1 = job.x + size_of(kind.x) * x, job.x + size_of(kind.x) * (x + half * job.xp)
        m0, m1 = job.m + size_of(kind.stat) * x, job.m + size_of(kind.stat) * (x + half * job.xp)
        g = of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s + q)
        col = array_at(job.col_scale + size_of(kind.stat) * ((b * job.S + s) * line + q), width, kind.stat)
        found, left = descend_two(
            array_at(x0, width, kind.x), array_at(x1, width, kind.x),
            array_at(m0, width, kind.stat), array_at(m1, width, kind.stat),
            array_at(g, width, kind.g), array_at(g + size_of(kind.g) * half * of.p, width, kind.g),
            r0, r1, col, job.momentum == OF_UPDATE, rates.scale, rates.w1, rates.decay, rates.apply_factor,
        )  # fmt: skip
        before += found
        after += left
    return before, after


@summing
def _step_one(job: Any, b: int, p: int, s: int, row: Any, part: int, rates: Any, phase: int, kind: Any) -> Any:
    """Step one line; return ΣX² before and after."""
    of, line, before, after = numerator(job), job.Q * job.K, 0.0, 0.0
    for q in range(0, line, part):
        width, at = min(part, line - q), b * job.xb + p * job.xp + s * job.xs + q
        x = array_at(job.x + size_of(kind.x) * at, width, kind.x)
        before += sum_of_squares(x, kind.stat)
        if phase == APPLY:
            m = array_at(job.m + size_of(kind.stat) * at, width, kind.stat)
            g = array_at(of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s + q), width, kind.g)
            col = array_at(job.col_scale + size_of(kind.stat) * ((b * job.S + s) * line + q), width, kind.stat)
            _descend(job, x, m, g, row, col, rates)
        after += sum_of_squares(x, kind.stat)
    return before, after


@exactly
def _descend(job: Any, x: Any, m: Any, g: Any, row: Any, col: Any, rates: Any) -> None:
    """Step a part of a line."""
    if job.momentum == OF_UPDATE:
        descend_averaged(x, m, g, row, col, rates.scale, rates.w1, rates.decay)
    else:
        descend(x, g, row, col, rates.scale, rates.decay)


@summing
def apply_to_lines_one_by_one(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Step a unit of X of whole lines of 16-bit numbers, whose conversions want all the registers."""
    _apply_one_by_one(job, phase, unit, narrow(0.0, kind.stat), job.Q, kind)


@summing
def apply_to_tiles_one_by_one(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Do the same where lines consist of short slices (K > 1)."""
    size = tile_length(job)
    _apply_one_by_one(job, phase, unit, array_at(scratch, size, kind.stat), size, kind)


@summing
def _apply_one_by_one(job: Any, phase: int, unit: int, tile: Any, part: int, kind: Any) -> None:
    """Step a unit of X, line by line and part by part."""
    b, start, stop = span(job, unit)
    rates, of, line = rates_of(job, phase, kind.stat), numerator(job), job.Q * job.K
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, kind.stat)
    for p in range(start, stop):
        for s in range(job.S):
            scales = scales_of(row, ((b * job.P + p) * job.S + s) * job.K, job.K, narrow(1.0, kind.stat), tile)
            for q in range(0, line, part):
                width, at = min(part, line - q), b * job.xb + p * job.xp + s * job.xs + q
                x = array_at(job.x + size_of(kind.x) * at, width, kind.x)
                m = array_at(job.m + size_of(kind.stat) * at, width, kind.stat)
                g = array_at(of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s + q), width, kind.g)
                col = array_at(job.col_scale + size_of(kind.stat) * ((b * job.S + s) * line + q), width, kind.stat)
                _descend(job, x, m, g, scales, col, rates)


@summing
def apply_rounded(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Step a unit of a 16-bit X that is rounded stochastically or with compensation; any K."""
    b, start, stop = span(job, unit)
    rates, of, line, size = rates_of(job, phase, kind.stat), numerator(job), job.Q * job.K, tile_length(job)
    tile, room = array_at(scratch, size, kind.stat), array_at(scratch + size_of(kind.stat) * size, size, kind.stat)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, kind.stat)
    for p in range(start, stop):
        for s in range(job.S):
            r = ((b * job.P + p) * job.S + s) * job.K
            if job.K > 1:
                repeat(row, r, job.K, narrow(1.0, kind.stat), tile)
            for q in range(0, line, size):
                width, at = min(size, line - q), b * job.xb + p * job.xp + s * job.xs + q
                x = array_at(job.x + size_of(kind.x) * at, width, kind.x)
                c = array_at(job.compensation + size_of(kind.x) * at, width, kind.x)
                m = array_at(job.m + size_of(kind.stat) * at, width, kind.stat)
                g = array_at(of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s + q), width, kind.g)
                col = array_at(job.col_scale + size_of(kind.stat) * ((b * job.S + s) * line + q), width, kind.stat)
                values, number = room[:width], job.origin + b * job.nb + p * job.np + s * job.ns + q * job.nq
                _load(job, values, x, c)
                if job.K > 1:
                    _descend(job, values, m, g, tile, col, rates)
                else:
                    _descend(job, values, m, g, row[r], col, rates)
                _store(job, x, c, values, number, job.nq)


@exactly
def _load(job: Any, values: Any, x: Any, c: Any) -> None:
    """Convert X to numbers to compute with."""
    if job.rounding == KAHAN:
        load_compensated(values, x, c)
    else:
        load(values, x)


@exactly
def _store(job: Any, x: Any, c: Any, values: Any, first: int, step: int) -> None:
    """Round the numbers, and store them as X."""
    if job.rounding == KAHAN:
        store_compensated(x, c, values)
    else:
        store_stochastic(x, values, first, step, np.uint32(job.key1), np.uint32(job.key2))


@summing
def apply_to_whole(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Step a unit of X whose second moment is kept whole."""
    _, start, stop = span(job, unit)
    size = stop - start
    x = array_at(job.x + size_of(kind.x) * start, size, kind.x)
    g = array_at(job.g + size_of(kind.g) * start, size, kind.g)
    v = array_at(job.full + size_of(kind.stat) * start, size, kind.stat)
    m = array_at(job.m + size_of(kind.stat) * start, size, kind.stat) if job.momentum != NONE else v
    descend_whole(x, g, v, m, job)


@summing
def apply_to_whole_rounded(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Step a unit of a 16-bit X whose second moment is kept whole, and that is not rounded to nearest."""
    _, start, stop = span(job, unit)
    room = array_at(scratch, WIDTH, kind.stat)
    for i in range(start, stop, WIDTH):
        width = min(WIDTH, stop - i)
        x = array_at(job.x + size_of(kind.x) * i, width, kind.x)
        c = array_at(job.compensation + size_of(kind.x) * i, width, kind.x)
        g = array_at(job.g + size_of(kind.g) * i, width, kind.g)
        v = array_at(job.full + size_of(kind.stat) * i, width, kind.stat)
        m = array_at(job.m + size_of(kind.stat) * i, width, kind.stat) if job.momentum != NONE else v
        values = room[:width]
        _load(job, values, x, c)
        descend_whole(values, g, v, m, job)
        _store(job, x, c, values, job.origin + i * job.np, job.np)
