"""Who does what when: threads lead tensors from phase to phase. This is the only place that knows of threads.

Large tensors are walked one after the other by all threads together, unit by unit. Each small tensor is taken through
all its phases by one thread, so that it stays in that core's cache; threads pick these up while they wait for a phase
of a large one to end. No thread waits for a *particular* other one: a phase ends when the counter of finished units
reaches their number, so any number of threads, from one on, will do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.cpu.native import parts
from adafactor.kernels.cpu.native.carry import carries, carry_on, has_digits, may_rely, measured, rely, unit_of_line
from adafactor.kernels.cpu.native.elements import add_at, array_at, as_written, call_at, yield_thread
from adafactor.kernels.cpu.native.factors import add_up_rows, conclude, means_of_sums
from adafactor.kernels.cpu.native.job import (
    APPLY,
    CHECK,
    CONCLUDE,
    END,
    ENERGY,
    FACTORS,
    FIRST,
    FULL,
    JOB,
    MEASURE,
    MOMENTS,
    NEAREST,
    OF_GRADIENT,
    REPAIR,
    assign_addresses,
    elements_of,
    energy_in_first_walk,
    job_at,
    scratch_size,
    thread_scratch,
    total_of,
)

JOB_SIZE, CACHE_LINE = JOB.itemsize, 64
WALK = np.dtype([(name, np.int64) for name in (
    # What is to be done: addresses of the jobs and of the kind's parts, and the phases; the bytes of a statistic;
    # elements up to which a tensor is small; threads; elements of a unit; whether every job has its own scratch; and
    # the address of the jobs' numbers, the largest first.
    "jobs", "count", "parts", "first", "last",
    "stat_size", "small_size", "threads", "unit_size", "own_scratch", "order",
    # Left by `survey`: how many of the jobs are large, and small; parts that are not compiled yet, as bits; elements in
    # all; bytes of scratch for large tensors, for small ones, and for each thread.
    "large", "small", "missing", "total", "large_bytes", "small_bytes", "thread_bytes",
    # Addresses of the counters and of scratch.
    "counters", "large_scratch", "thread_scratch",
)])  # fmt: skip

# Counters that threads share, in bytes from `counters`: threads inside, whether no more are let in, threads that have
# come, and small tensors that were begun. Then three for every phase of every large tensor.
INSIDE, CLOSING, CAME, SMALL_BEGUN, FIRST_PHASE = 0, 8, 16, 24, 32
BEGUN, DONE, CLOSED, PHASE_SIZE = 0, 8, 16, 24  # units that were begun, and are done; whether the phase has ended


@as_written
def has_phase(job: Any, phase: int) -> Any:
    """Say whether a job has a phase. Once a thread may have asked, the answer never turns from no to yes."""
    if phase <= FACTORS:
        return True
    if not job.taken:
        return False
    if phase == ENERGY:
        return job.estimator != FULL and not energy_in_first_walk(job)
    if phase == MEASURE:
        return job.reads_x2 != 0
    return phase != REPAIR or job.repairs != 0


@as_written
def units_of(job: Any, phase: int) -> Any:
    """Return how many units a phase has: vectors and scalars are one."""
    return 1 if phase in (FACTORS, CONCLUDE) else job.B * job.cuts


@as_written
def of_momentum(job: Any) -> Any:
    """Return what is added to a part that reads the numerator of U, if that is the momentum of the gradient."""
    return parts.OF_MOMENTUM if job.momentum == OF_GRADIENT else 0


@as_written
def part_of(job: Any, phase: int) -> Any:
    """Return the part that takes a unit of this job through a phase."""
    shift = of_momentum(job)
    if phase == MOMENTS:
        if job.estimator == FULL:
            return parts.MOMENTS_OF_WHOLE
        return parts.MOMENTS_OF_LINES if job.K == 1 else parts.MOMENTS_OF_TILES
    if phase == ENERGY:
        return parts.ENERGY_OF_LINES + shift
    if phase == MEASURE and not carries(job):
        return parts.MEASURE_LINES
    if phase == REPAIR:
        return parts.REPAIR_LINES + shift
    if job.estimator == FULL:
        return parts.APPLY_TO_WHOLE if job.rounding == NEAREST else parts.APPLY_TO_WHOLE_ROUNDED
    if job.rounding != NEAREST:
        return parts.APPLY_ROUNDED + shift
    return (parts.APPLY_TO_LINES if job.K == 1 else parts.APPLY_TO_TILES) + shift


@as_written
def needed_parts(job: Any) -> Any:
    """Return the parts that a job may need, as bits."""
    bits = 1 << part_of(job, MOMENTS) | 1 << part_of(job, APPLY)
    if job.measures_x:
        bits |= 1 << parts.MEASURE_IN_DOUBLE
    if job.estimator == FULL:
        return bits
    shift = of_momentum(job)
    bits |= 1 << parts.MOMENTS_IN_DOUBLE | 1 << parts.MAKE_FACTORS | 1 << (parts.ENERGY_IN_DOUBLE + shift)
    if job.momentum == OF_GRADIENT:
        bits |= 1 << parts.BLEND
    if not energy_in_first_walk(job):
        bits |= 1 << part_of(job, ENERGY)
    if job.measures_x and not carries(job):
        bits |= 1 << parts.MEASURE_LINES
    if carries(job):
        bits |= 1 << part_of(job, REPAIR)
    return bits


@as_written
def call(walk: Any, part: int, address: int, phase: int, unit: int, scratch: int) -> None:
    """Call a part for a unit of the job at an address."""
    call_at(array_at(walk.parts + 8 * part, 1, np.int64)[0], address, phase, unit, scratch)


@as_written
def walk_unit(walk: Any, address: int, phase: int, unit: int, scratch: int) -> None:
    """Take one unit of a job through a phase."""
    job = job_at(address)
    if phase == FACTORS:
        make_factors(walk, job, address, scratch)
    elif phase == CONCLUDE:
        conclude(job)
    else:
        if phase == ENERGY and job.momentum == OF_GRADIENT:
            call(walk, parts.BLEND, address, phase, unit, scratch)
        call(walk, part_of(job, phase), address, phase, unit, scratch)


@as_written
def make_factors(walk: Any, job: Any, address: int, scratch: int) -> None:
    """Make R, C and 1/√V̂ of a job that takes the step, and decide whether X has to be read for ΣX²."""
    if not job.taken:
        job.skipped += 1
        return
    if job.estimator != FULL:
        call(walk, parts.MAKE_FACTORS, address, FACTORS, 0, scratch)
    if energy_in_first_walk(job):
        check_energy(walk, job, address, scratch)
    job.repairs = 0
    job.reads_x2 = job.measures_x and job.estimator != FULL
    if job.reads_x2 and may_rely(job):
        call(walk, part_of(job, MEASURE), address, CHECK, unit_of_line(job, job.heaviest_line), scratch)
        rely(job)


@as_written
def check_energy(walk: Any, job: Any, address: int, scratch: int) -> None:
    """Sum U² again in double if float32 had no room for the squares; a sum of 0 is taken for what it is."""
    if walk.stat_size == 4 and job.u2 != 0 and not has_digits(job, job.u2):
        call(walk, parts.ENERGY_IN_DOUBLE + of_momentum(job), address, ENERGY, 0, scratch)


@as_written
def check_x2(walk: Any, job: Any, address: int, scratch: int) -> None:
    """Sum X² again in double if float32 had no room for the squares."""
    if walk.stat_size == 4 and job.measures_x and not has_digits(job, job.x2):
        call(walk, parts.MEASURE_IN_DOUBLE, address, MEASURE, 0, scratch)


@as_written
def finish_phase(walk: Any, address: int, phase: int, scratch: int) -> None:
    """Do what follows the units of a phase, once all of them are done."""
    job = job_at(address)
    if phase == MOMENTS:
        add_up_rows(job)
        if job.estimator != FULL and not np.isfinite(job.finite):
            call(walk, parts.MOMENTS_IN_DOUBLE, address, phase, 0, scratch)
        means_of_sums(job)
        job.taken = job.ignore or np.isfinite(job.finite)
        if job.estimator == FULL:
            check_x2(walk, job, address, scratch)
    elif phase == ENERGY:
        job.u2 = total_of(job, FIRST)
        check_energy(walk, job, address, scratch)
    elif phase == MEASURE:
        measured(job)
        check_x2(walk, job, address, scratch)
    elif phase == APPLY:
        carry_on(job)
        if job.repairs:
            prepare_repair(walk, job, address, scratch)
        else:
            count_step(job)
    elif phase == REPAIR:
        count_step(job)


@as_written
def prepare_repair(walk: Any, job: Any, address: int, scratch: int) -> None:
    """Find the step as it should have been, given ΣX² as X was found."""
    if not has_digits(job, job.x2):  # X before the step is gone: take it from X after it, which is as good as equal
        check_x2(walk, job, address, scratch)
        job.x2 /= job.decay * job.decay
    conclude(job)


@as_written
def count_step(job: Any) -> None:
    """Count the step, and note its figures for the report."""
    array_at(job.t, 1, np.float32)[0] += 1
    job.steps += 1
    job.clipped += job.clips
    job.noted_beta2, job.noted_alpha, job.noted_rms_x, job.noted_rms_u = job.beta2, job.alpha, job.rms_x, job.rms_u


# ---- threads


@as_written
def take_small(walk: Any, scratch: int) -> Any:
    """Take the next small tensor through its phases; return False if there are no more."""
    number = add_at(walk.counters + SMALL_BEGUN, 1)
    if number >= walk.small:
        return False
    address = walk.jobs + JOB_SIZE * array_at(walk.order, walk.count, np.int64)[walk.large + number]
    job = job_at(address)
    if not walk.own_scratch:
        assign_addresses(job, scratch + walk.thread_bytes - walk.small_bytes)
    for phase in range(walk.first, walk.last):
        if has_phase(job, phase):
            for unit in range(units_of(job, phase)):
                walk_unit(walk, address, phase, unit, scratch)
            finish_phase(walk, address, phase, scratch)
    return True


@as_written
def share_phase(walk: Any, address: int, phase: int, counters: int, scratch: int) -> None:
    """Take units of a large tensor through a phase, together with other threads, until the phase has ended."""
    units = units_of(job_at(address), phase)
    unit = add_at(counters + BEGUN, 1)
    while unit < units:
        # the last walk goes backwards: it begins with what the first one left in the cache
        walk_unit(walk, address, phase, units - 1 - unit if phase == APPLY else unit, scratch)
        if add_at(counters + DONE, 1) == units - 1:
            finish_phase(walk, address, phase, scratch)
            add_at(counters + CLOSED, 1)
        unit = add_at(counters + BEGUN, 1)
    while add_at(counters + CLOSED, 0) == 0:
        if not take_small(walk, scratch):
            yield_thread()


def enter(address: int) -> None:
    """Executor with the other threads until there is nothing left to begin. This is what every thread runs."""
    walk = array_at(address, 1, WALK)[0]
    add_at(walk.counters + INSIDE, 1)
    if add_at(walk.counters + CLOSING, 0) == 0:
        scratch = walk.thread_scratch + walk.thread_bytes * add_at(walk.counters + CAME, 1)
        for i in range(walk.large):
            job = walk.jobs + JOB_SIZE * array_at(walk.order, walk.count, np.int64)[i]
            for phase in range(walk.first, walk.last):
                if has_phase(job_at(job), phase):
                    counters = walk.counters + FIRST_PHASE + PHASE_SIZE * (END * i + phase)
                    share_phase(walk, job, phase, counters, scratch)
        while take_small(walk, scratch):
            pass
    add_at(walk.counters + INSIDE, -1)


def close(address: int) -> None:
    """Wait until no thread is inside, and let none in any more."""
    walk = array_at(address, 1, WALK)[0]
    add_at(walk.counters + CLOSING, 1)
    while add_at(walk.counters + INSIDE, 0) > 0:
        yield_thread()


def survey(address: int) -> None:
    """Find out what a walk needs before it begins: parts, scratch, and the order of the tensors."""
    walk = array_at(address, 1, WALK)[0]
    walk.total, walk.missing = 0, 0
    addresses = array_at(walk.parts, parts.PARTS + parts.OF_MOMENTUM, np.int64)
    for i in range(walk.count):
        job = job_at(walk.jobs + JOB_SIZE * i)
        if job.present:
            walk.total += elements_of(job)
            walk.missing |= needed_parts(job)
    for part in range(len(addresses)):
        if addresses[part]:
            walk.missing &= ~(1 << part)
    sort_by_size(walk)
    walk.large, walk.small, walk.large_bytes, walk.small_bytes, walk.thread_bytes = 0, walk.small, 0, 0, 0
    fair = max(walk.unit_size, walk.total // (4 * walk.threads))
    for i in range(walk.small):
        job = job_at(walk.jobs + JOB_SIZE * array_at(walk.order, walk.count, np.int64)[i])
        walk.thread_bytes = max(walk.thread_bytes, thread_scratch(job) * walk.stat_size)
        if elements_of(job) > min(walk.small_size, fair):
            walk.large += 1
            walk.large_bytes = max(walk.large_bytes, 8 * scratch_size(job))
        else:
            walk.small_bytes = max(walk.small_bytes, 8 * scratch_size(job))
    walk.small -= walk.large
    if walk.own_scratch:
        walk.large_bytes, walk.small_bytes = 0, 0
    walk.large_bytes = -(-walk.large_bytes // CACHE_LINE) * CACHE_LINE
    walk.small_bytes = -(-walk.small_bytes // CACHE_LINE) * CACHE_LINE
    walk.thread_bytes = -(-walk.thread_bytes // CACHE_LINE) * CACHE_LINE + walk.small_bytes


@as_written
def sort_by_size(walk: Any) -> None:
    """Put the numbers of the jobs that are present into order, the largest first (Shell's method)."""
    order, count = array_at(walk.order, walk.count, np.int64), 0
    for i in range(walk.count):
        if job_at(walk.jobs + JOB_SIZE * i).present:
            order[count] = i
            count += 1
    gap = count // 2
    while gap > 0:
        for i in range(gap, count):
            number, j = order[i], i
            size = elements_of(job_at(walk.jobs + JOB_SIZE * number))
            while j >= gap and elements_of(job_at(walk.jobs + JOB_SIZE * order[j - gap])) < size:
                order[j] = order[j - gap]
                j -= gap
            order[j] = number
        gap //= 2
    walk.small = count


def assign(address: int) -> None:
    """Set the counters to zero, and give the large tensors the same scratch, as they come one after the other."""
    walk = array_at(address, 1, WALK)[0]
    counters = array_at(walk.counters, (FIRST_PHASE + walk.large * END * PHASE_SIZE) // 8, np.int64)
    for i in range(len(counters)):
        counters[i] = 0
    for i in range(0 if walk.own_scratch else walk.large):
        job = job_at(walk.jobs + JOB_SIZE * array_at(walk.order, walk.count, np.int64)[i])
        assign_addresses(job, walk.large_scratch)


def hand_out(address: int) -> None:
    """Give every job its own part of the scratch, which is at `parts`."""
    walk = array_at(address, 1, WALK)[0]
    base = walk.parts
    for i in range(walk.count):
        job = job_at(walk.jobs + JOB_SIZE * i)
        assign_addresses(job, base)
        base += 8 * scratch_size(job)


def count(address: int) -> None:
    """Read the step counts of all jobs into an array of doubles at `parts`."""
    walk = array_at(address, 1, WALK)[0]
    for i in range(walk.count):
        t = array_at(job_at(walk.jobs + JOB_SIZE * i).t, 1, np.float32)[0]
        array_at(walk.parts, walk.count, np.float64)[i] = t
