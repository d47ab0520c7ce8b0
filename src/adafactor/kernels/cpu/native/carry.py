"""ΣX² carried from step to step, so that X is read once in a step and not twice.

A relative step needs RMS(X) before it writes X. The step before had every element of that X in its hands: it summed
their squares, and left the total (`x2_after`), which two lines had the largest share (`heaviest_line`) and how large
that is (`heaviest_x2`). Before a step relies on the total, it sums those two lines again, by a step of length zero: the
same loop, so the same bits, unless somebody has written to them. If they differ, or if there is nothing to rely on, the
phase MEASURE reads all of X first: a wrong guess costs time, not digits. If they agree, the total is too large by a
factor of at most n, the number of such pairs of lines, and the step at most √n times too long. What was written
elsewhere is noticed while X is stepped, as the loop also sums what it finds: then the phase REPAIR adds the difference
between the right step and the one that was taken (√n = 1000 leaves an error of 1e-4 of one step), and the next step
measures. A step after loading a checkpoint measures, too, and gets the same bits as the one that carries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.cpu.native.elements import array_at, as_written, narrow, size_of, summing, widen
from adafactor.kernels.cpu.native.job import (
    FIRST,
    FULL,
    OF_UPDATE,
    RESULTS,
    SECOND,
    WIDTH,
    count_of_results,
    elements_of,
    numerator,
    span,
    tile_length,
    total_of,
)
from adafactor.kernels.cpu.native.lines import descend, repeat, sum_of_squares

TINY = 1e-30  # a mean square below which squares in float32 lose digits, or vanish


@as_written
def has_digits(job: Any, total: float) -> Any:
    """Say whether a sum of squares that was taken in float32 is right: neither overflow nor underflow took part."""
    return np.isfinite(total) and total >= TINY * elements_of(job)


@as_written
def carries(job: Any) -> Any:
    """Say whether a job carries its sum: it must have two lines at least, as two are summed together."""
    return job.carries_x2 and job.P > 1


@as_written
def may_rely(job: Any) -> Any:
    """Say whether there is a carried sum to rely on, if the heaviest lines are what they were."""
    return carries(job) and job.x2_confirmed and has_digits(job, job.x2_after) and job.heaviest_x2 > 0


@as_written
def unit_of_line(job: Any, line: int) -> Any:
    """Return the unit in which a line lies."""
    p = line // job.S
    return p // job.P * job.cuts + p % job.P // job.rows


@as_written
def rely(job: Any) -> None:
    """Take the carried sum if the heaviest lines, which were just summed again, are what they were; else X is read."""
    if job.checked_x2 == job.heaviest_x2:
        job.x2, job.reads_x2 = job.x2_after, 0


@as_written
def measured(job: Any) -> None:
    """Take the sum that the phase MEASURE found; it also says whether the carried one could have been relied on."""
    job.x2 = total_of(job, FIRST)
    if job.carries_x2 and np.isfinite(job.x2_after):
        job.x2_confirmed = job.x2 == job.x2_after


@as_written
def carry_on(job: Any) -> None:
    """After X has been stepped: remember its sum, and see whether the step relied on a wrong one."""
    job.repairs = 0
    if not carries(job):
        return
    results, job.heaviest_x2 = array_at(job.units, count_of_results(job), np.float64), -1.0
    for i in range(0, len(results), RESULTS):
        if results[i + 2] > job.heaviest_x2:
            job.heaviest_x2, job.heaviest_line = results[i + 2], int(results[i + 3])
    job.x2_after, x2_before = total_of(job, SECOND), total_of(job, FIRST)
    if not job.reads_x2 and job.measures_x and x2_before != job.x2:
        job.repairs, job.x2, job.scale_used = 1, x2_before, job.scale
        job.x2_after, job.x2_confirmed = np.nan, 0


@summing
def measure_lines(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Sum X² of a unit, where nothing is carried."""
    b, start, stop = span(job, unit)
    line, total = job.Q * job.K, 0.0
    for p in range(start, stop):
        for s in range(job.S):
            x = array_at(job.x + size_of(kind.x) * (b * job.xb + p * job.xp + s * job.xs), line, kind.x)
            for q in range(0, line, WIDTH):
                total += sum_of_squares(x[q : q + WIDTH], kind.stat)
    array_at(job.units + 8 * RESULTS * unit, 1, np.float64)[0] = total


@summing
def measure_in_double(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Sum X² of the whole tensor in double, where float32 has no room for the squares."""
    line, total = (1 if job.estimator == FULL else job.Q * job.K), 0.0
    for b in range(job.B):
        for p in range(job.P):
            for s in range(job.S):
                x = array_at(job.x + size_of(kind.x) * (b * job.xb + p * job.xp + s * job.xs), line, kind.x)
                for j in range(line):
                    a = widen(x[j], np.float64)
                    total += a * a
    job.x2 = total


@summing
def repair_lines(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Step a unit of X once more, by the difference between the right step and the one that was taken."""
    b, start, stop = span(job, unit)
    line, one, of = job.Q * job.K, narrow(1.0, kind.stat), numerator(job)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, kind.stat)
    tile = array_at(scratch, tile_length(job), kind.stat)
    missing = job.scale - job.scale_used
    factor = narrow(job.w1 * missing if job.momentum == OF_UPDATE else missing, kind.stat)
    for p in range(start, stop):
        for s in range(job.S):
            repeat(row, ((b * job.P + p) * job.S + s) * job.K, job.K, one, tile)
            for q in range(0, line, len(tile)):
                width, at = min(len(tile), line - q), b * job.xb + p * job.xp + s * job.xs + q
                g = array_at(of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s + q), width, kind.g)
                col = array_at(job.col_scale + size_of(kind.stat) * ((b * job.S + s) * line + q), width, kind.stat)
                descend(array_at(job.x + size_of(kind.x) * at, width, kind.x), g, tile, col, factor, one)
                if job.momentum == OF_UPDATE:
                    m = array_at(job.m + size_of(kind.stat) * at, width, kind.stat)
                    descend(m, g, tile, col, -factor, one)
