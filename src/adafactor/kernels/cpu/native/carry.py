"""ΣX² carried from step to step, so that X is read once in a step and not twice.

A relative step needs RMS(X) before it writes X. The step before had every element of that X in its hands: it summed
their squares, and left the total (`x2_after`), which two lines had the largest share (`heaviest_line`) and how large
that is (`heaviest_x2`). Before a step relies on the total, it sums those two lines again, by a step of length zero: the
same loop, so the same bits, unless somebody has written to them. If they differ, or if there is nothing to rely on, the
phase MEASURE reads all of X first: a wrong guess costs time, not digits. If they agree, the total is too large by a
factor of at most n, the number of such pairs of lines, and the step at most √n times too long. What was written
elsewhere is noticed while X is stepped, as the loop also sums what it finds: then the phase CORRECT adds the difference
between the right step and the one that was taken (√n = 1000 leaves an error of 1e-4 of one step), and the next step
measures. A step after loading a checkpoint measures, too, and gets the same bits as the one that carries.

A rank cannot correct a shard alone: the other ranks have stepped with the same total. So what was written to a shard
behind torch's back, and not to the heaviest lines, makes one step too long or too short by the share that it has in
RMS(X); the total that is carried on from there is right again.
"""

from __future__ import annotations

import numpy as np

from adafactor.kernels.cpu.native import jobs, lines
from adafactor.kernels.cpu.native.compiling import as_written, summing
from adafactor.kernels.cpu.native.elements import Dtypes
from adafactor.kernels.cpu.native.intrinsics import array_at, narrow, view, widen
from adafactor.kernels.cpu.native.jobs import Job


@as_written
def may_rely(job: Job) -> bool:
    """Say whether there is a carried sum to rely on, if the heaviest lines are what they were."""
    return bool(job.carries_x2 and job.x2_confirmed and jobs.is_accurate(job, job.x2_after) and job.heaviest_x2 > 0)


@as_written
def chunk_of_line(job: Job, line: int) -> int:
    """Return the chunk in which a line lies."""
    p = line // job.S
    return p // job.P * job.chunks + p % job.P // job.rows


@as_written
def rely(job: Job) -> None:
    """Take the carried sum if the heaviest lines, which were just summed again, are what they were; else X is read."""
    if job.checked_x2 == job.heaviest_x2:
        job.x2, job.reads_x2 = job.x2_after, 0


@as_written
def take_measured(job: Job) -> None:
    """Take the sum that the phase MEASURE found; it also says whether the carried one could have been relied on."""
    job.x2 = jobs.total_of(job, jobs.FIRST)
    if job.carries_x2 and np.isfinite(job.x2_after):
        job.x2_confirmed = job.x2 == job.x2_after


@as_written
def carry_on(job: Job) -> None:
    """After X has been stepped: remember its sum, and see whether the step relied on a wrong one."""
    job.needs_correction = 0
    if not job.carries_x2:
        return
    results, job.heaviest_x2 = array_at(job.results, jobs.RESULTS * job.B * job.chunks, np.float64), -1.0
    for i in range(0, len(results), jobs.RESULTS):
        if results[i + 2] > job.heaviest_x2:
            job.heaviest_x2, job.heaviest_line = results[i + 2], int(results[i + 3])
    job.x2_after, x2_before = jobs.total_of(job, jobs.SECOND), jobs.total_of(job, jobs.FIRST)
    if job.count != jobs.elements_of(job):  # a shard: x2 is the sum of all ranks by now
        return
    if not job.reads_x2 and job.measures_x and x2_before != job.x2:
        job.needs_correction, job.x2, job.scale_used = 1, x2_before, job.scale
        job.x2_after, job.x2_confirmed = np.nan, 0


@summing
def measure_lines(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Sum X² of a chunk, where nothing is carried."""
    length, total = job.Q * job.K, 0.0
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, jobs.numerator(job), b, p, s)
            for q in range(0, length, jobs.WIDTH):
                x = view(job.x, line.x + q, min(jobs.WIDTH, length - q), dtypes.x)
                total += lines.sum_of_squares(x, dtypes.stat)
    jobs.set_results(job, chunk, total, 0.0, 0.0, 0.0)


@summing
def measure_in_double(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Sum X² of the whole tensor in double, where float32 has no room for the squares."""
    length, total = job.Q * job.K, 0.0
    for b in range(job.B):
        for p in range(job.P):
            for s in range(job.S):
                line = jobs.line_at(job, jobs.numerator(job), b, p, s)
                x = view(job.x, line.x, length, dtypes.x)
                for j in range(length):
                    a = widen(x[j], np.float64)
                    total += a * a
    job.x2 = total


@summing
def correct_lines(job: Job, phase: int, chunk: int, scratch: int, dtypes: Dtypes) -> None:
    """Step a chunk of X once more, by the difference between the right step and the one that was taken."""
    one, tile = narrow(1.0, dtypes.stat), array_at(scratch, jobs.tile_length(job), dtypes.stat)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, dtypes.stat)
    of, missing = jobs.numerator(job), job.scale - job.scale_used
    factor = narrow(job.w1 * missing if job.momentum == jobs.OF_UPDATE else missing, dtypes.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, of, b, p, s)
            lines.repeat(row, line.number * job.K, job.K, one, tile)
            for q in range(0, job.Q * job.K, len(tile)):
                part = jobs.stretch_at(job, of, line, q, len(tile), dtypes)
                lines.descend(part.x, part.g, tile, part.col, factor, one)
                if job.momentum == jobs.OF_UPDATE:
                    lines.descend(part.m, part.g, tile, part.col, -factor, one)
