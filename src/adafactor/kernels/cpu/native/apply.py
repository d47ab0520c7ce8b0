"""Last pass, over G and X: the step itself. The momentum of the update is averaged on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adafactor.kernels.cpu.native import jobs, lines, momentum, squares
from adafactor.kernels.cpu.native.compiling import exactly, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view
from adafactor.kernels.cpu.native.jobs import Flat, Job, Line, Source, Stretch
from adafactor.kernels.cpu.native.lines import Rates, Scale


@summing
def rates_of(job: Job, phase: int, stat: Any) -> Rates:
    """Return the rates of a step; in the phase MEASURE, of one of length zero, which only sums (see `carry`)."""
    if phase == jobs.APPLY:
        scale, w1, rate = narrow(job.scale, stat), narrow(job.w1, stat), narrow(job.rate, stat)
        return Rates(scale, w1, rate, narrow(job.decay, stat), narrow(1.0, stat))
    return Rates(narrow(0.0, stat), narrow(0.0, stat), narrow(0.0, stat), narrow(1.0, stat), narrow(0.0, stat))


class Room(NamedTuple):
    """A thread's memory for a stretch: random words, and the momentum and X to compute with."""

    words: Array
    m: Array
    x: Array


@summing
def room_at(scratch: int, tiles: int, size: int, width: int, stat: Any) -> Room:
    """Return the room for `width` numbers behind so many tiles of the scratch, each of `size` numbers at most."""
    start, tile = scratch + 8 * tiles * size, 8 * size
    return Room(
        view(start, 0, width, np.uint32), view(start + tile, 0, width, stat), view(start + 2 * tile, 0, width, stat)
    )


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
            x2, new_x2 = _step_two(job, of, line0, line1, row0, row1, scratch, rates, phase, kind)
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
            x2, new_x2 = _step_one(job, of, line, row, scratch, rates, phase, kind)
            before += x2
            after += new_x2
    jobs.set_results(job, chunk, before, after, heaviest, heaviest_line)


@summing
def _step_two(
    job: Job,
    of: Source,
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
    before, after, size = 0.0, 0.0, jobs.stretch_length(job)
    for q in range(0, job.Q * job.K, size):
        part0 = jobs.stretch_at(job, of, line0, q, size, kind)
        part1 = jobs.stretch_at(job, of, line1, q, size, kind)
        room0 = room_at(scratch, 2, size, len(part0.x), kind.stat)
        room1 = room_at(scratch, 3, size, len(part0.x), kind.stat)
        m0 = momentum.load(job, part0, part0.m, room0.m)
        m1 = momentum.load(job, part1, part1.m, room1.m)
        averaged = jobs.averages_updates(job)
        draws0 = lines.draws_of(job, part0.element, part0.step)
        draws1 = lines.draws_of(job, part1.element, part1.step)
        x2, new_x2 = lines.descend_two(part0, part1, m0, m1, row0, row1, averaged, rates, draws0, draws1)
        if phase == jobs.APPLY:
            momentum.store(job, part0, part0.m, m0, draws0)
            momentum.store(job, part1, part1.m, m1, draws1)
        before += x2
        after += new_x2
    return before, after


@summing
def _step_one(
    job: Job, of: Source, line: Line, row: Scale, scratch: int, rates: Rates, phase: int, kind: Kind
) -> tuple[float, float]:
    """Step one line; return ΣX² before and after."""
    before, after, size = 0.0, 0.0, jobs.stretch_length(job)
    for q in range(0, job.Q * job.K, size):
        part = jobs.stretch_at(job, of, line, q, size, kind)
        before += squares.sum_of_squares(part.x, kind.stat)
        if phase == jobs.APPLY:
            _step_in_place(job, part, row, rates, room_at(scratch, 2, size, len(part.x), kind.stat))
        after += squares.sum_of_squares(part.x, kind.stat)
    return before, after


# ---- 16-bit numbers, whose conversions want all the registers, line by line


@summing
def apply_one_by_one(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X that is rounded to nearest."""
    _apply_line_by_line(job, phase, chunk, scratch, jobs.stretch_length(job), _step_in_place, kind)


@summing
def apply_rounded(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of X that is rounded stochastically or with compensation."""
    _apply_line_by_line(job, phase, chunk, scratch, jobs.room_length(job), _step_rounded, kind)


@summing
def _apply_line_by_line(
    job: Job, phase: int, chunk: int, scratch: int, size: int, step: Callable[..., None], kind: Kind
) -> None:
    """Step a chunk of X, `size` numbers at a time."""
    rates, of = rates_of(job, phase, kind.stat), jobs.numerator(job)
    tile = view(scratch, 0, size, kind.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, of, b, p, s)
            row = kind.row_scale(job, line, narrow(1.0, kind.stat), tile, kind.stat)
            for q in range(0, job.Q * job.K, size):
                part = jobs.stretch_at(job, of, line, q, size, kind)
                step(job, part, row, rates, room_at(scratch, 1, size, len(part.x), kind.stat))


@exactly
def _step_in_place(job: Job, part: Stretch, row: Scale, rates: Rates, room: Room) -> None:
    """Step a stretch of X."""
    m, draws = momentum.load(job, part, part.m, room.m), lines.draws_of(job, part.element, part.step)
    lines.descend(part.x, m, part, row, jobs.averages_updates(job), rates, draws)
    momentum.store(job, part, part.m, m, draws)


@exactly
def _step_rounded(job: Job, part: Stretch, row: Scale, rates: Rates, room: Room) -> None:
    """Step a stretch of X by way of numbers to compute with."""
    _load(job, room.x, part)
    m, draws = momentum.load(job, part, part.m, room.m), lines.draws_of(job, part.element, part.step)
    lines.descend(room.x, m, part, row, jobs.averages_updates(job), rates, draws)
    _store(job, part, room)
    momentum.store(job, part, part.m, m, draws)


@exactly
def _load(job: Job, values: Array, part: Stretch | Flat) -> None:
    """Convert X to numbers to compute with."""
    if job.rounding == jobs.KAHAN:
        lines.load_compensated(values, part.x, part.compensation)
    else:
        lines.load(values, part.x)


@exactly
def _store(job: Job, part: Stretch | Flat, room: Room) -> None:
    """Round the numbers, and store them as X."""
    if job.rounding == jobs.KAHAN:
        lines.store_compensated(part.x, part.compensation, room.x)
    else:
        lines.draw(room.words, part.element, part.step, np.uint32(job.key1), np.uint32(job.key2))
        lines.store_stochastic(part.x, room.x, room.words)


# ---- unfactored tensors


@summing
def apply_unfactored(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of an unfactored X."""
    _apply_flat(job, chunk, scratch, _step_flat_in_place, kind)


@summing
def apply_unfactored_rounded(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Step a chunk of an unfactored 16-bit X that is not rounded to nearest."""
    _apply_flat(job, chunk, scratch, _step_flat_rounded, kind)


@summing
def _apply_flat(job: Job, chunk: int, scratch: int, step: Callable[..., None], kind: Kind) -> None:
    """Step the blocks of an unfactored X that begin in a chunk, a few at a time, and each line's for themselves."""
    _, start, stop = jobs.span(job, chunk)
    i, stop, size = jobs.next_block(job, start), jobs.next_block(job, stop), jobs.TILE if job.block == 1 else job.block
    while i < stop:
        width = min(size, job.block_line - i % job.block_line, stop - i)
        step(job, jobs.flat_at(job, i, width, kind), room_at(scratch, 0, size, width, kind.stat))
        i += width


@exactly
def _step_flat_in_place(job: Job, flat: Flat, room: Room) -> None:
    """Step a stretch of an unfactored X."""
    m, draws = momentum.load(job, flat, flat.m, room.m), lines.draws_of(job, flat.element, flat.step)
    lines.descend_unfactored(flat.x, m, flat, job, draws)
    momentum.store(job, flat, flat.m, m, draws)


@exactly
def _step_flat_rounded(job: Job, flat: Flat, room: Room) -> None:
    """Step a stretch of an unfactored X by way of numbers to compute with."""
    _load(job, room.x, flat)
    m, draws = momentum.load(job, flat, flat.m, room.m), lines.draws_of(job, flat.element, flat.step)
    lines.descend_unfactored(room.x, m, flat, job, draws)
    _store(job, flat, room)
    momentum.store(job, flat, flat.m, m, draws)
