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

A momentum of fewer bits is corrected as it was rounded. So is a step by the momentum of the direction or of the
gradient: where somebody has written to X like this, it is off by what rounding that momentum takes away, times the
difference.

A rank cannot correct a shard alone: the other ranks have stepped with the same total. So what was written to a shard
behind torch's back, and not to the heaviest lines, makes one step too long or too short by the share that it has in
RMS(X); the total that is carried on from there is right again.
"""

from __future__ import annotations

import numpy as np

from adafactor.kernels.cpu.native import jobs, lines, momentum, squares
from adafactor.kernels.cpu.native.apply import room_at
from adafactor.kernels.cpu.native.compiling import as_written, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import call_at, narrow, view
from adafactor.kernels.cpu.native.jobs import Job
from adafactor.kernels.cpu.native.lines import Rates


@as_written
def rely_on_carried(job: Job, address: int, scratch: int) -> None:
    """Take the carried sum if there is one, and the heaviest lines are what they were; else X is read."""
    job.needs_correction, job.reads_x2 = 0, job.measures_x and job.estimator != jobs.FULL
    if job.carries_x2 and job.x2_confirmed and jobs.is_accurate(job, job.x2_after) and job.heaviest_x2 > 0:
        p = job.heaviest_line // job.S
        chunk = p // job.P * job.chunks + p % job.P // job.rows
        call_at(job.measure, address, jobs.CHECK, chunk, scratch)  # sums the two lines again
        if job.x2 == job.heaviest_x2:
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
    results = view(job.scratch + job.results, 0, jobs.RESULTS * job.B * job.chunks, np.float64)
    job.heaviest_x2 = -1.0
    for i in range(0, len(results), jobs.RESULTS):
        if results[i + 2] > job.heaviest_x2:
            job.heaviest_x2, job.heaviest_line = results[i + 2], int(results[i + 3])
    job.x2_after, x2_before = jobs.total_of(job, jobs.SECOND), jobs.total_of(job, jobs.FIRST)
    if job.count != jobs.elements_of(job):  # a shard: x2 is the sum of all ranks by now
        return
    if not job.reads_x2 and job.measures_x and x2_before != job.x2:
        job.needs_correction, job.x2 = 1, x2_before
        job.scale_used, job.rate_used, job.decay_used = job.scale, job.rate, job.decay
        job.x2_after, job.x2_confirmed = np.nan, 0


@summing
def measure_lines(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum X² of a chunk, where nothing is carried."""
    length, total = job.Q * job.K, 0.0
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, b, p, s)
            for q in range(0, length, jobs.WIDTH):
                x = view(job.x, line.x + q, min(jobs.WIDTH, length - q), kind.x)
                total += squares.sum_of_squares(x, kind.sum)
    jobs.set_results(job, chunk, total, 0.0, 0.0, 0.0)


@summing
def correct_lines(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X once more, by the difference between the right step and the one that was taken.

    With X₀ as it was and d for decay, X = d·X₀ − scale·U with the numbers that were used; with the right ones, d' and
    so on, it is X·d'/d − (scale' − scale·d'/d)·U. Likewise with rate and M in place of scale and U, if M' − M is then
    subtracted, too.
    """
    zero, one, size = narrow(0.0, kind.stat), narrow(1.0, kind.stat), job.stretch
    tile, averaged = view(scratch, 0, size, kind.stat), jobs.averages_updates(job)
    is_other_decay = job.decay != job.decay_used and job.decay_used != 0
    ratio = job.decay / job.decay_used if is_other_decay else 1.0
    of_u = job.w1 * job.rate * (job.scale - job.scale_used) if averaged else job.scale - job.scale_used * ratio
    of_m = job.rate - job.rate_used * ratio if averaged else 0.0
    decay = Rates(zero, zero, narrow(of_m, kind.stat), narrow(ratio, kind.stat), one)
    to_x, to_m = narrow(of_u, kind.stat), narrow(-of_u, kind.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, b, p, s)
            row = kind.row_scale(job, line, one, tile, kind.stat)
            for q in range(0, job.Q * job.K, size):
                part = jobs.stretch_at(job, line, q, size, kind)
                room = room_at(scratch, 1, size, len(part.x), kind.stat)
                m, g = kind.operands(job, part, room.m, phase)
                draws = lines.draws_of(job, part.element, part.step)
                if is_other_decay or of_m != 0:
                    lines.descend(job, part, part.x, m, g, row, averaged, decay, draws)
                lines.descend(job, part, part.x, m, g, row, False, Rates(to_x, one, one, one, one), draws)
                if averaged and of_u != 0:
                    lines.descend(job, part, m, m, g, row, False, Rates(to_m, one, one, one, one), draws)
                    momentum.store(job, part, part.m, m, draws)
