"""Last pass, over G and X: the step itself. The momentum of the update is averaged on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.cpu.native import jobs, lines
from adafactor.kernels.cpu.native.compiling import exactly, summing
from adafactor.kernels.cpu.native.elements import Dtypes
from adafactor.kernels.cpu.native.intrinsics import Array, array_at, narrow, view
from adafactor.kernels.cpu.native.jobs import Job, Line, Source, Stretch
from adafactor.kernels.cpu.native.lines import Rates, Scale, ScalesOf


@summing
def rates_of(job: Job, phase: int, stat: Any) -> Rates:
    """Return the rates of a step; in the phase MEASURE, of one of length zero, which only sums (see `carry`)."""
    if phase == jobs.APPLY:
        return Rates(narrow(job.scale, stat), narrow(job.w1, stat), narrow(job.decay, stat), narrow(1.0, stat))
    return Rates(narrow(0.0, stat), narrow(0.0, stat), narrow(1.0, stat), narrow(0.0, stat))


# ---- float32 and float64, two lines at a time


@summing
def apply_to_lines(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of X of whole lines (K = 1)."""
    _apply_in_pairs(job, phase, chunk, scratch, lines.scale_of_line, jobs.WIDTH, dtypes)


@summing
def apply_to_tiles(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of X whose lines consist of short slices (K > 1)."""
    _apply_in_pairs(job, phase, chunk, scratch, lines.scales_of_slices, jobs.tile_length(job), dtypes)


@summing
def _apply_in_pairs(
    job: Job, phase: int, chunk: int, scratch: int, scales_of: ScalesOf, size: int, dtypes: Dtypes
) -> None:
    """Step a chunk of X, two lines at a time, `size` numbers at a time, and sum its squares before and after.

    In the phase MEASURE the step has length zero. CHECK does that to the two lines that `heaviest_line` begins only: by
    this same loop, so that it finds the same bits.
    """
    b, start, stop = jobs.span(job, chunk)
    half, of, checks = (stop - start) // 2, jobs.numerator(job), phase == jobs.CHECK
    rates = rates_of(job, phase, dtypes.stat)
    tile0, tile1 = array_at(scratch, size, dtypes.stat), view(scratch, size, size, dtypes.stat)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, dtypes.stat)
    p0, s0 = job.heaviest_line // job.S % job.P, job.heaviest_line % job.S
    before, after, heaviest, heaviest_line = 0.0, 0.0, -1.0, 0
    for p in range(p0 if checks else start, p0 + 1 if checks else start + half):
        for s in range(s0 if checks else 0, s0 + 1 if checks else job.S):
            line0, line1 = jobs.line_at(job, of, b, p, s), jobs.line_at(job, of, b, p + half, s)
            row0 = scales_of(row, line0.number, job.K, rates.apply_factor, tile0)
            row1 = scales_of(row, line1.number, job.K, rates.apply_factor, tile1)
            x2, new_x2 = _step_two(job, of, line0, line1, row0, row1, size, rates, dtypes)
            before += x2
            after += new_x2
            if new_x2 > heaviest:
                heaviest, heaviest_line = new_x2, line0.number
    if checks:
        job.checked_x2 = before
        return
    for p in range(start + 2 * half, stop):
        for s in range(job.S):
            line = jobs.line_at(job, of, b, p, s)
            scale = scales_of(row, line.number, job.K, rates.apply_factor, tile0)
            x2, new_x2 = _step_one(job, of, line, scale, size, rates, phase, dtypes)
            before += x2
            after += new_x2
    jobs.set_results(job, chunk, before, after, heaviest, heaviest_line)


@summing
def _step_two(
    job: Job, of: Source, line0: Line, line1: Line, row0: Scale, row1: Scale, size: int, rates: Rates, dtypes: Dtypes
) -> tuple[float, float]:
    """Step two lines; return ΣX² before and after."""
    before, after = 0.0, 0.0
    for q in range(0, job.Q * job.K, size):
        part0 = jobs.stretch_at(job, of, line0, q, size, dtypes)
        part1 = jobs.stretch_at(job, of, line1, q, size, dtypes)
        x2, new_x2 = lines.descend_two(part0, part1, row0, row1, job.momentum == jobs.OF_UPDATE, rates)
        before += x2
        after += new_x2
    return before, after


@summing
def _step_one(
    job: Job, of: Source, line: Line, row: Scale, size: int, rates: Rates, phase: int, dtypes: Dtypes
) -> tuple[float, float]:
    """Step one line; return ΣX² before and after."""
    before, after = 0.0, 0.0
    for q in range(0, job.Q * job.K, size):
        part = jobs.stretch_at(job, of, line, q, size, dtypes)
        before += lines.sum_of_squares(part.x, dtypes.stat)
        if phase == jobs.APPLY:
            _descend(job, part.x, part, row, rates)
        after += lines.sum_of_squares(part.x, dtypes.stat)
    return before, after


@exactly
def _descend(job: Job, x: Array, part: Stretch, row: Scale, rates: Rates) -> None:
    """Step a stretch of a line; `x` has its numbers to compute with."""
    if job.momentum == jobs.OF_UPDATE:
        lines.descend_averaged(x, part.m, part.g, row, part.col, rates)
    else:
        lines.descend(x, part.g, row, part.col, rates.scale, rates.decay)


# ---- 16-bit numbers, whose conversions want all the registers, line by line


@summing
def apply_to_lines_one_by_one(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of X of whole lines (K = 1)."""
    _apply_one_by_one(job, phase, chunk, scratch, lines.scale_of_line, job.Q, dtypes)


@summing
def apply_to_tiles_one_by_one(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of X whose lines consist of short slices (K > 1)."""
    _apply_one_by_one(job, phase, chunk, scratch, lines.scales_of_slices, jobs.tile_length(job), dtypes)


@summing
def _apply_one_by_one(
    job: Job, phase: int, chunk: int, scratch: int, scales_of: ScalesOf, size: int, dtypes: Dtypes
) -> None:
    """Step a chunk of X, `size` numbers at a time."""
    rates, of, tile = rates_of(job, phase, dtypes.stat), jobs.numerator(job), array_at(scratch, size, dtypes.stat)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, dtypes.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, of, b, p, s)
            scale = scales_of(row, line.number, job.K, narrow(1.0, dtypes.stat), tile)
            for q in range(0, job.Q * job.K, size):
                part = jobs.stretch_at(job, of, line, q, size, dtypes)
                _descend(job, part.x, part, scale, rates)


@summing
def apply_rounded(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of X that is rounded stochastically or with compensation; any K."""
    rates, of, size = rates_of(job, phase, dtypes.stat), jobs.numerator(job), jobs.tile_length(job)
    tile = array_at(scratch, size, dtypes.stat)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, dtypes.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line, number = jobs.line_at(job, of, b, p, s), job.origin + b * job.nb + p * job.np + s * job.ns
            if job.K > 1:
                lines.repeat(row, line.number * job.K, job.K, narrow(1.0, dtypes.stat), tile)
            for q in range(0, job.Q * job.K, size):
                part = jobs.stretch_at(job, of, line, q, size, dtypes)
                compensation = view(job.compensation, line.x + q, len(part.x), dtypes.x)
                values = view(scratch, size, len(part.x), dtypes.stat)
                _load(job, values, part.x, compensation)
                if job.K > 1:
                    _descend(job, values, part, tile, rates)
                else:
                    _descend(job, values, part, row[line.number], rates)
                _store(job, part.x, compensation, values, number, job.nq)
                number += size * job.nq


@exactly
def _load(job: Job, values: Array, x: Array, compensation: Array) -> None:
    """Convert X to numbers to compute with."""
    if job.rounding == jobs.KAHAN:
        lines.load_compensated(values, x, compensation)
    else:
        lines.load(values, x)


@exactly
def _store(job: Job, x: Array, compensation: Array, values: Array, first: int, step: int) -> None:
    """Round the numbers, and store them as X."""
    if job.rounding == jobs.KAHAN:
        lines.store_compensated(x, compensation, values)
    else:
        lines.store_stochastic(x, values, first, step, np.uint32(job.key1), np.uint32(job.key2))


# ---- unfactored tensors


@summing
def apply_to_unfactored(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of an unfactored X."""
    _, start, stop = jobs.span(job, chunk)
    flat = jobs.flat_at(job, start, stop - start, dtypes)
    lines.descend_unfactored(flat.x, flat, job)


@summing
def apply_to_unfactored_rounded(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of an unfactored 16-bit X that is not rounded to nearest."""
    _, start, stop = jobs.span(job, chunk)
    for i in range(start, stop, jobs.WIDTH):
        flat = jobs.flat_at(job, i, min(jobs.WIDTH, stop - i), dtypes)
        values = array_at(scratch, len(flat.x), dtypes.stat)
        _load(job, values, flat.x, flat.compensation)
        lines.descend_unfactored(values, flat, job)
        _store(job, flat.x, flat.compensation, values, job.origin + i * job.np, job.np)
