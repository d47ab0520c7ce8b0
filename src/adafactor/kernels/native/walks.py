"""From walk to walk: what Python calls."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from adafactor.kernels.native.apply import (
    apply_to_lines,
    apply_whole,
    blend_lines,
    correct_lines,
    energy_of_lines,
    measure_lines,
)
from adafactor.kernels.native.between import conclude, factor_job, fold_job
from adafactor.kernels.native.elements import SINGLES, add_at, at, rest, summing
from adafactor.kernels.native.job import (
    ALL,
    APPLY,
    ENERGY,
    FULL,
    MEASURE,
    MOMENTS,
    OF_GRADIENT,
    first_of,
    furnish_job,
    room_for,
    size_of,
    total_of,
)
from adafactor.kernels.native.moments import measure_whole, sum_lines

SOURCES = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))


def entry(function: Any) -> Any:
    """Compile what Python calls, and keep it on disk with all that it calls itself.

    Numba looks at the age of one file only: the name says what all of them contain.
    """
    function.__qualname__ += "_" + sha256(SOURCES).hexdigest()[:16]
    return njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})(function)


@summing
def _needs(job: Any, phase: int) -> Any:
    """Is there such a walk? What is known early, or from the last step, needs none."""
    if phase == MOMENTS:
        return True
    if phase == APPLY or not job.taken or job.estimator == FULL:
        return phase == APPLY and job.taken != 0
    return not job.early if phase == ENERGY else job.looks != 0


@summing
def _do(job: Any, phase: int, unit: int, xs: Any, gs: Any, ss: Any, room: Any) -> None:
    """One unit of a walk."""
    if job.estimator == FULL:
        if phase == MOMENTS:
            measure_whole(job, unit, xs, gs, ss)
        else:
            apply_whole(job, unit, xs, gs, ss, room)
    elif phase == MOMENTS:
        sum_lines(job, unit, gs, ss, room)
    elif phase == MEASURE and not job.carries:
        measure_lines(job, unit, xs, ss)
    else:  # U is made of G, or of the momentum in its place
        base, b, p, s = job.g, job.gb, job.gp, job.gs
        if job.momentum == OF_GRADIENT:
            base, b, p, s = job.m, job.xb, job.xp, job.xs
            if phase == ENERGY:
                blend_lines(job, unit, gs, ss)
            _use(job, phase, unit, base, b, p, s, xs, ss, ss, room)
        else:
            _use(job, phase, unit, base, b, p, s, xs, gs, ss, room)


@summing
def _use(
    job: Any, phase: int, unit: int, base: int, b: int, p: int, s: int, xs: Any, gs: Any, ss: Any, room: Any
) -> None:
    if phase == ENERGY:
        energy_of_lines(job, unit, base, b, p, s, gs, ss, room)
    else:
        apply_to_lines(job, unit, base, b, p, s, phase == APPLY, xs, gs, ss, room)


@summing
def _close(job: Any, phase: int, xs: Any, gs: Any, ss: Any) -> None:
    """What follows a walk, once all its units are done."""
    if phase == MOMENTS:
        fold_job(job, gs, ss)
        job.taken = job.ignore or np.isfinite(job.finite)
        job.skipped += not job.taken
        if job.taken:
            factor_job(job, ss)
        if job.carries and job.steady:
            job.x2 = job.left
        job.looks = job.measures and not (job.carries and job.steady)
    elif phase == ENERGY:
        job.u2 = total_of(job, 0)
    elif phase == MEASURE:
        job.x2 = total_of(job, 0)
        job.steady = job.x2 == job.left
    else:
        _finish(job, xs, gs, ss)
        return
    if job.taken and not (phase < ENERGY and _needs(job, ENERGY)) and not (phase < MEASURE and _needs(job, MEASURE)):
        conclude(job)


@summing
def _finish(job: Any, xs: Any, gs: Any, ss: Any) -> None:
    """Count the step; if ΣX² was carried over and is not that of the X found now, repair it."""
    if job.carries:
        found, job.left = total_of(job, 0), total_of(job, 1)
        if found != job.x2 and not (np.isnan(found) and np.isnan(job.left)):
            used, job.x2 = job.scale, found
            conclude(job)
            job.scale -= used
            for unit in range(job.B * job.cuts):
                if job.momentum == OF_GRADIENT:
                    correct_lines(job, unit, job.m, job.xb, job.xp, job.xs, xs, ss, ss)
                else:
                    correct_lines(job, unit, job.g, job.gb, job.gp, job.gs, xs, gs, ss)
            job.left, job.steady = np.nan, False
    at(job.t, 1, SINGLES)[0] += 1
    job.noted_beta2 = job.beta2
    job.steps += 1
    job.clipped += job.clips


@entry
def walk(jobs: Any, xs: Any, gs: Any, ss: Any, board: Any, shared: int, phase: int, first: int, last: int) -> None:
    """One walk, through the units that start in [first, last); or a whole step.

    A whole step is taken by all the threads that call this with the same `board`, which begins with zeros. The first
    `shared` tensors are walked by all together, unit by unit; each of the others is one thread's alone, that goes
    through it while it is in the cache, and they fill the pauses of the large ones. Nobody counts on another thread: a
    walk ends when its units are done, by whomever.
    """
    room = room_for(jobs, ss)
    if phase != ALL:
        for i in range(len(jobs)):
            job = jobs[i]
            if _needs(job, phase):
                for unit in range(job.B * job.cuts):
                    if first <= first_of(job, unit) < last:
                        _do(job, phase, unit, xs, gs, ss, room)
        return
    most, base = 0, board.ctypes.data
    for i in range(shared, len(jobs)):
        most = max(most, size_of(jobs[i]))
    scratch = np.empty(most, np.float64)
    for i in range(shared + 1):
        for phase in range(4 if i < shared else 1):
            here = base + 8 * (1 + 3 * (4 * i + phase))  # how many units were begun, and done; whether all is
            if i < shared:
                job, units = jobs[i], jobs[i].B * jobs[i].cuts
                if not _needs(job, phase):
                    continue
                unit = add_at(here, 1)
                while unit < units:
                    # the last walk goes backwards: it begins with what the first one left in the cache
                    _do(job, phase, units - 1 - unit if phase == APPLY else unit, xs, gs, ss, room)
                    if add_at(here + 8, 1) == units - 1:
                        _close(job, phase, xs, gs, ss)
                        add_at(here + 16, 1)
                    unit = add_at(here, 1)
            while i == shared or add_at(here + 16, 0) == 0:
                number = shared + add_at(base, 1)
                if number < len(jobs):
                    _go_through(jobs[number], xs, gs, ss, room, scratch)
                elif i == shared:
                    return
                else:
                    rest()


@summing
def _go_through(job: Any, xs: Any, gs: Any, ss: Any, room: Any, scratch: Any) -> None:
    """All the walks of one tensor."""
    furnish_job(job, scratch.ctypes.data)
    for phase in range(4):
        if _needs(job, phase):
            for unit in range(job.B * job.cuts):
                _do(job, phase, unit, xs, gs, ss, room)
            _close(job, phase, xs, gs, ss)


@entry
def fold(jobs: Any, gs: Any, ss: Any) -> None:
    """Add up what the units of the first walk left: means over rows and columns, and whether all of G² is finite."""
    for i in range(len(jobs)):
        fold_job(jobs[i], gs, ss)


@entry
def factors(jobs: Any, ss: Any) -> None:
    """R, C and 1/√V̂ of those that take the step."""
    for i in range(len(jobs)):
        if jobs[i].taken:
            factor_job(jobs[i], ss)


@entry
def gather(jobs: Any, phase: int) -> None:
    """Add up ΣU² or ΣX² of the units of the second walk."""
    for i in range(len(jobs)):
        job = jobs[i]
        if _needs(job, phase):
            if phase == ENERGY:
                job.u2 = total_of(job, 0)
            else:
                job.x2 = total_of(job, 0)


@entry
def furnish(jobs: Any, count: int, room: Any, apart: bool) -> None:
    """Give the first jobs their part of the room, each its own or one after the other the same."""
    base = room.ctypes.data
    for i in range(count):
        furnish_job(jobs[i], base)
        base += 8 * size_of(jobs[i]) if apart else 0


@entry
def counts(jobs: Any, out: Any) -> None:
    """The step counts of all jobs."""
    for i in range(len(jobs)):
        out[i] = at(jobs[i].t, 1, SINGLES)[0]
