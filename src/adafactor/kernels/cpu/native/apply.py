"""Last pass, over G and X: the step itself. The momentum of the update is averaged on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adafactor.kernels.cpu.native import jobs, lines
from adafactor.kernels.cpu.native.compiling import exactly, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view
from adafactor.kernels.cpu.native.jobs import Flat, Job, Line, Source, Stretch
from adafactor.kernels.cpu.native.lines import Rates, Scale


@summing
def rates_of(job: Job, phase: int, stat: Any) -> Rates:
    """Return the rates of a step; in the phase MEASURE, of one of length zero, which only sums (see `carry`)."""
    if phase == jobs.APPLY:
        return Rates(narrow(job.scale, stat), narrow(job.w1, stat), narrow(job.decay, stat), narrow(1.0, stat))
    return Rates(narrow(0.0, stat), narrow(0.0, stat), narrow(1.0, stat), narrow(0.0, stat))


# ---- float32 and float64, two lines at a time


@summing
def apply_in_pairs(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X, two lines at a time, and sum its squares before and after.

    In the phase MEASURE the step has length zero. CHECK does that to the two lines that `heaviest_line` begins only: by
    this same loop, so that it finds the same bits.
    """
    b, start, stop = jobs.span(job, chunk)
    half, of, checks, size = (stop - start) // 2, jobs.numerator(job), phase == jobs.CHECK, jobs.stretch_length(job)
    rates = rates_of(job, phase, kind.stat)
    tile0, tile1 = view(scratch, 0, size, kind.stat), view(scratch, size, size, kind.stat)
    p0, s0 = job.heaviest_line // job.S % job.P, job.heaviest_line % job.S
    before, after, heaviest, heaviest_line = 0.0, 0.0, -1.0, 0
    for p in range(p0 if checks else start, p0 + 1 if checks else start + half):
        for s in range(s0 if checks else 0, s0 + 1 if checks else job.S):
            line0, line1 = jobs.line_at(job, of, b, p, s), jobs.line_at(job, of, b, p + half, s)
            row0 = kind.row_scale(job, line0, rates.apply_factor, tile0, kind.stat)
            row1 = kind.row_scale(job, line1, rates.apply_factor, tile1, kind.stat)
            x2, new_x2 = _step_two(job, of, line0, line1, row0, row1, size, rates, kind)
            before += x2
            after += new_x2
            if new_x2 > heaviest:
                heaviest, heaviest_line = new_x2, line0.number
    if checks:
        job.x2 = before
        return
    for p in range(start + 2 * half, stop):
        for s in range(job.S):
            line = jobs.line_at(job, of, b, p, s)
            row = kind.row_scale(job, line, rates.apply_factor, tile0, kind.stat)
            x2, new_x2 = _step_one(job, of, line, row, size, rates, phase, kind)
            before += x2
            after += new_x2
    jobs.set_results(job, chunk, before, after, heaviest, heaviest_line)


@summing
def _step_two(
    job: Job, of: Source, line0: Line, line1: Line, row0: Scale, row1: Scale, size: int, rates: Rates, kind: Kind
) -> tuple[float, float]:
    """Step two lines; return ΣX² before and after."""
    before, after = 0.0, 0.0
    for q in range(0, job.Q * job.K, size):
        part0 = jobs.stretch_at(job, of, line0, q, size, kind)
        part1 = jobs.stretch_at(job, of, line1, q, size, kind)
        x2, new_x2 = lines.descend_two(part0, part1, row0, row1, job.momentum == jobs.OF_UPDATE, rates)
        before += x2
        after += new_x2
    return before, after


@summing
def _step_one(
    job: Job, of: Source, line: Line, row: Scale, size: int, rates: Rates, phase: int, kind: Kind
) -> tuple[float, float]:
    """Step one line; return ΣX² before and after."""
    before, after = 0.0, 0.0
    for q in range(0, job.Q * job.K, size):
        part = jobs.stretch_at(job, of, line, q, size, kind)
        before += lines.sum_of_squares(part.x, kind.stat)
        if phase == jobs.APPLY:
            lines.descend(part.x, part, row, job.momentum == jobs.OF_UPDATE, rates)
        after += lines.sum_of_squares(part.x, kind.stat)
    return before, after


# ---- 16-bit numbers, whose conversions want all the registers, line by line


@summing
def apply_one_by_one(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X that is rounded to nearest."""
    _apply_line_by_line(job, phase, chunk, scratch, jobs.stretch_length(job), _step_in_place, kind)


@summing
def apply_rounded(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X that is rounded stochastically or with compensation."""
    _apply_line_by_line(job, phase, chunk, scratch, jobs.tile_length(job), _step_rounded, kind)


@summing
def _apply_line_by_line(
    job: Job, phase: int, chunk: int, scratch: int, size: int, step: Callable[..., None], kind: Kind
) -> None:
    """Step a chunk of X, `size` numbers at a time; each stretch is told the number of its first element."""
    rates, of = rates_of(job, phase, kind.stat), jobs.numerator(job)
    tile = view(scratch, 0, size, kind.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line, number = jobs.line_at(job, of, b, p, s), job.origin + b * job.nb + p * job.np + s * job.ns
            row = kind.row_scale(job, line, narrow(1.0, kind.stat), tile, kind.stat)
            for q in range(0, job.Q * job.K, size):
                part = jobs.stretch_at(job, of, line, q, size, kind)
                values = view(scratch, size, len(part.x), kind.stat)
                step(job, part, row, rates, values, number + q * job.nq)


@exactly
def _step_in_place(job: Job, part: Stretch, row: Scale, rates: Rates, values: Array, number: int) -> None:
    """Step a stretch of X."""
    lines.descend(part.x, part, row, job.momentum == jobs.OF_UPDATE, rates)


@exactly
def _step_rounded(job: Job, part: Stretch, row: Scale, rates: Rates, values: Array, number: int) -> None:
    """Step a stretch of X by way of numbers to compute with."""
    _load(job, values, part)
    lines.descend(values, part, row, job.momentum == jobs.OF_UPDATE, rates)
    _store(job, part, values, number, job.nq)


@exactly
def _load(job: Job, values: Array, part: Stretch | Flat) -> None:
    """Convert X to numbers to compute with."""
    if job.rounding == jobs.KAHAN:
        lines.load_compensated(values, part.x, part.compensation)
    else:
        lines.load(values, part.x)


@exactly
def _store(job: Job, part: Stretch | Flat, values: Array, first: int, step: int) -> None:
    """Round the numbers, and store them as X."""
    if job.rounding == jobs.KAHAN:
        lines.store_compensated(part.x, part.compensation, values)
    else:
        lines.store_stochastic(part.x, values, first, step, np.uint32(job.key1), np.uint32(job.key2))


# ---- unfactored tensors


@summing
def apply_unfactored(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of an unfactored X."""
    _, start, stop = jobs.span(job, chunk)
    flat = jobs.flat_at(job, start, stop - start, kind)
    lines.descend_unfactored(flat.x, flat, job)


@summing
def apply_unfactored_rounded(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of an unfactored 16-bit X that is not rounded to nearest."""
    _, start, stop = jobs.span(job, chunk)
    for i in range(start, stop, jobs.WIDTH):
        flat = jobs.flat_at(job, i, min(jobs.WIDTH, stop - i), kind)
        values = view(scratch, 0, len(flat.x), kind.stat)
        _load(job, values, flat)
        lines.descend_unfactored(values, flat, job)
        _store(job, flat, values, job.origin + i * job.np, job.np)
