"""Last pass, over G and X: the step itself. The momentum is averaged on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

from adafactor.kernels.cpu.native import jobs, lines, momentum, squares
from adafactor.kernels.cpu.native.compiling import exactly, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view
from adafactor.kernels.cpu.native.jobs import Job, Line, Stretch
from adafactor.kernels.cpu.native.lines import Rates, Scale


@summing
def rates_of(job: Job, phase: int, stat: Any) -> Rates:
    """Return the rates of a step; in the phase MEASURE, of one of length zero, which only sums (see `carry`)."""
    if phase == jobs.APPLY:
        scale, w1, rate = narrow(job.scale, stat), narrow(job.w1, stat), narrow(job.rate, stat)
        return Rates(scale, w1, rate, narrow(job.decay, stat), narrow(1.0, stat))
    return Rates(narrow(0.0, stat), narrow(0.0, stat), narrow(0.0, stat), narrow(1.0, stat), narrow(0.0, stat))


class Room(NamedTuple):
    """A thread's memory for a stretch: the momentum and X to compute with."""

    m: Array
    x: Array


@summing
def room_at(scratch: int, tiles: int, size: int, width: int, stat: Any) -> Room:
    """Return the room for `width` numbers behind so many tiles of the scratch, each of `size` numbers at most."""
    start, tile = scratch + 8 * tiles * size, 8 * size
    return Room(view(start, 0, width, stat), view(start + tile, 0, width, stat))


# ---- float32 and float64, two lines at a time


@summing
def apply_in_pairs(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X, two lines at a time, and sum its squares before and after.

    In the phase MEASURE the step has length zero. CHECK does that to the two lines that `heaviest_line` begins only: by
    this same loop, so that it finds the same bits.
    """
    b, start, stop = jobs.span(job, chunk)
    half, checks, size = (stop - start) // 2, phase == jobs.CHECK, job.stretch
    rates = rates_of(job, phase, kind.stat)
    tile0, tile1 = view(scratch, 0, size, kind.stat), view(scratch, size, size, kind.stat)
    p0, s0 = job.heaviest_line // job.S % job.P, job.heaviest_line % job.S
    before, after, heaviest, heaviest_line = 0.0, 0.0, -1.0, 0
    for p in range(p0 if checks else start, p0 + 1 if checks else start + half):
        for s in range(s0 if checks else 0, s0 + 1 if checks else job.S):
            line0, line1 = jobs.line_at(job, b, p, s), jobs.line_at(job, b, p + half, s)
            row0 = kind.row_scale(job, line0, rates.apply_factor, tile0, kind.stat)
            row1 = kind.row_scale(job, line1, rates.apply_factor, tile1, kind.stat)
            x2, new_x2 = _step_two(job, line0, line1, row0, row1, scratch, rates, phase, kind)
            before += x2
            after += new_x2
            if new_x2 > heaviest:
                heaviest, heaviest_line = new_x2, line0.number
    if checks:
        job.x2 = before
        return
    for p in range(start + 2 * half, stop):
        for s in range(job.S):
            line = jobs.line_at(job, b, p, s)
            row = kind.row_scale(job, line, rates.apply_factor, tile0, kind.stat)
            x2, new_x2 = _step_one(job, line, row, scratch, rates, phase, kind)
            before += x2
            after += new_x2
    jobs.set_results(job, chunk, before, after, heaviest, heaviest_line)


@summing
def _step_two(
    job: Job,
    line0: Line,
    line1: Line,
    row0: Scale,
    row1: Scale,
    scratch: int,
    rates: Rates,
    phase: int,
    kind: Kind,
) -> tuple[float, float]:
    """Step two lines; return ΣX² before and after."""
    before, after, size = 0.0, 0.0, job.stretch
    for q in range(0, job.Q * job.K, size):
        part0 = jobs.stretch_at(job, line0, q, size, kind)
        part1 = jobs.stretch_at(job, line1, q, size, kind)
        room0 = room_at(scratch, 2, size, len(part0.x), kind.stat)
        room1 = room_at(scratch, 3, size, len(part0.x), kind.stat)
        m0, g0 = kind.operands(job, part0, room0.m, phase)
        m1, g1 = kind.operands(job, part1, room1.m, phase)
        averaged = jobs.averages_updates(job)
        draws0 = lines.draws_of(job, part0.element, part0.step)
        draws1 = lines.draws_of(job, part1.element, part1.step)
        x2, new_x2 = lines.descend_two(part0, part1, m0, m1, g0, g1, row0, row1, averaged, rates, draws0, draws1)
        if phase == jobs.APPLY:
            momentum.store(job, part0, part0.m, m0, draws0)
            momentum.store(job, part1, part1.m, m1, draws1)
        before += x2
        after += new_x2
    return before, after


@summing
def _step_one(
    job: Job, line: Line, row: Scale, scratch: int, rates: Rates, phase: int, kind: Kind
) -> tuple[float, float]:
    """Step one line; return ΣX² before and after."""
    before, after, size = 0.0, 0.0, job.stretch
    for q in range(0, job.Q * job.K, size):
        part = jobs.stretch_at(job, line, q, size, kind)
        before += squares.sum_of_squares(part.x, kind.stat)
        if phase == jobs.APPLY:
            kind.step(job, part, row, rates, room_at(scratch, 2, size, len(part.x), kind.stat), kind)
        after += squares.sum_of_squares(part.x, kind.stat)
    return before, after


# ---- 16-bit numbers, whose conversions want all the registers, line by line


@summing
def apply_one_by_one(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X."""
    rates, size = rates_of(job, phase, kind.stat), job.room if job.rounding != jobs.NEAREST else job.stretch
    tile = view(scratch, 0, size, kind.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, b, p, s)
            row = kind.row_scale(job, line, narrow(1.0, kind.stat), tile, kind.stat)
            for q in range(0, job.Q * job.K, size):
                part = jobs.stretch_at(job, line, q, size, kind)
                kind.step(job, part, row, rates, room_at(scratch, 1, size, len(part.x), kind.stat), kind)


# ---- unfactored tensors


@summing
def apply_unfactored(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step the blocks of an unfactored X that begin in a chunk, a few at a time, and each line's for themselves."""
    rates, size = rates_of(job, phase, kind.stat), job.room
    _, start, stop = jobs.span(job, chunk)
    i, stop = jobs.next_block(job, start), jobs.next_block(job, stop)
    while i < stop:
        width = min(size, job.block_line - i % job.block_line, stop - i)
        room = room_at(scratch, 0, size, width, kind.stat)
        no_row = rates.scale
        kind.step(job, jobs.flat_at(job, i, width, kind), no_row, rates, room, kind)
        i += width


# ---- a stretch, wherever it lies


@exactly
def step_in_place(job: Job, part: Stretch, row: Scale, rates: Rates, room: Room, kind: Kind) -> None:
    """Step a stretch of X where it lies."""
    m, g = kind.operands(job, part, room.m, jobs.APPLY)
    draws = lines.draws_of(job, part.element, part.step)
    kind.descend(job, part, part.x, m, g, row, jobs.averages_updates(job), rates, draws)
    momentum.store(job, part, part.m, m, draws)


@exactly
def step_rounded(job: Job, part: Stretch, row: Scale, rates: Rates, room: Room, kind: Kind) -> None:
    """Step a stretch of X by way of numbers to compute with, and round them at random or with a compensation."""
    if job.rounding == jobs.KAHAN:
        lines.load_compensated(room.x, part.x, part.compensation)
    else:
        lines.load(room.x, part.x)
    m, g = kind.operands(job, part, room.m, jobs.APPLY)
    draws = lines.draws_of(job, part.element, part.step)
    kind.descend(job, part, room.x, m, g, row, jobs.averages_updates(job), rates, draws)
    if job.rounding == jobs.KAHAN:
        lines.store_compensated(part.x, part.compensation, room.x)
    else:
        lines.store_stochastic(part.x, room.x, draws)
    momentum.store(job, part, part.m, m, draws)
