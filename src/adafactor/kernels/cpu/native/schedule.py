"""Who does what when: threads lead tensors from phase to phase. This is the only place that knows of threads.

Large tensors are stepped one after the other by all threads together, chunk by chunk. Each small tensor is taken
through all its phases by one thread, so that it stays in that core's cache; threads pick these up while they wait for a
phase of a large one to end. No thread waits for a *particular* other one: a phase ends when the counter of finished
chunks reaches their number, so any number of threads, from one on, will do.
"""

from __future__ import annotations

import numpy as np

from adafactor.kernels.cpu.native import parts
from adafactor.kernels.cpu.native.carry import carry_on, chunk_of_line, may_rely, rely, take_measured
from adafactor.kernels.cpu.native.compiling import as_written
from adafactor.kernels.cpu.native.factors import add_up_rows, conclude, means_of_sums
from adafactor.kernels.cpu.native.intrinsics import add_at, array_at, call_at, yield_thread
from adafactor.kernels.cpu.native.job import (
    APPLY,
    CHECK,
    CONCLUDE,
    CORRECT,
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
    Job,
    assign_addresses,
    elements_of,
    energy_in_first_pass,
    is_accurate,
    job_at,
    record,
    scratch_size,
    thread_scratch,
    total_of,
)

JOB_SIZE, CACHE_LINE = JOB.itemsize, 64


class Plan:
    """The fields of the record that tells the compiled functions what to do with a table of jobs, the largest first."""

    # What is to be done, from Python.
    jobs: int  # address
    count: int
    data: int  # the addresses of the parts; for `assign_scratch` and `read_counts`, what they write to
    first: int  # phase, and the one after the last
    last: int
    stat_size: int  # bytes of a statistic
    small_size: int  # elements up to which a tensor is small
    threads: int
    chunk_size: int  # elements
    own_scratch: int  # every job has been given its own
    # Left by `plan_step`.
    large: int  # how many jobs, from the first on, are large
    missing: int  # parts that are not compiled yet, as bits
    total: int  # elements
    large_bytes: int  # of scratch: for large tensors, for small ones, and for each thread
    small_bytes: int
    thread_bytes: int
    # Addresses.
    counters: int
    large_scratch: int
    thread_scratch: int


PLAN = record(Plan)

# Counters that threads share, in bytes from `counters`: threads inside, whether no more are let in, threads that have
# come, and small tensors that were begun. Then three for every phase of every large tensor.
INSIDE, CLOSING, CAME, SMALL_BEGUN, FIRST_PHASE = 0, 8, 16, 24, 32
BEGUN, DONE, CLOSED, PHASE_SIZE = 0, 8, 16, 24  # chunks that were begun, and are done; whether the phase has ended


@as_written
def plan_at(address: int) -> Plan:
    """Return the plan at an address."""
    plan: Plan = array_at(address, 1, PLAN)[0]
    return plan


# ---- phases


@as_written
def has_phase(job: Job, phase: int) -> bool:
    """Say whether a job has a phase. Once a thread may have asked, the answer never turns from no to yes."""
    if phase <= FACTORS:
        return True
    if not job.taken:
        return False
    if phase == ENERGY:
        return job.estimator != FULL and not energy_in_first_pass(job)
    if phase == MEASURE:
        return job.reads_x2 != 0
    return phase != CORRECT or job.needs_correction != 0


@as_written
def chunks_of(job: Job, phase: int) -> int:
    """Return how many chunks a phase has: vectors and scalars are one."""
    return 1 if phase in (FACTORS, CONCLUDE) else job.B * job.chunks


@as_written
def of_momentum(job: Job) -> int:
    """Return what is added to a part that reads the numerator of U, if that is the momentum of the gradient."""
    return parts.OF_MOMENTUM if job.momentum == OF_GRADIENT else 0


@as_written
def part_of(job: Job, phase: int) -> int:
    """Return the part that takes a chunk of this job through a phase."""
    shift = of_momentum(job)
    if phase == MOMENTS:
        if job.estimator == FULL:
            return parts.MOMENTS_OF_UNFACTORED
        return parts.MOMENTS_OF_LINES if job.K == 1 else parts.MOMENTS_OF_TILES
    if phase == ENERGY:
        return parts.ENERGY_OF_LINES + shift
    if phase == MEASURE and not job.carries_x2:
        return parts.MEASURE_LINES
    if phase == CORRECT:
        return parts.CORRECT_LINES + shift
    if job.estimator == FULL:
        return parts.APPLY_TO_UNFACTORED if job.rounding == NEAREST else parts.APPLY_TO_UNFACTORED_ROUNDED
    if job.rounding != NEAREST:
        return parts.APPLY_ROUNDED + shift
    return (parts.APPLY_TO_LINES if job.K == 1 else parts.APPLY_TO_TILES) + shift


@as_written
def needed_parts(job: Job) -> int:
    """Return the parts that a job may need, as bits."""
    bits = 1 << part_of(job, MOMENTS) | 1 << part_of(job, APPLY)
    if job.measures_x:
        bits |= 1 << parts.MEASURE_IN_DOUBLE
    if job.estimator == FULL:
        return bits
    bits |= 1 << parts.MOMENTS_IN_DOUBLE | 1 << parts.MAKE_FACTORS | 1 << (parts.ENERGY_IN_DOUBLE + of_momentum(job))
    if job.momentum == OF_GRADIENT:
        bits |= 1 << parts.BLEND
    if not energy_in_first_pass(job):
        bits |= 1 << part_of(job, ENERGY)
    if job.carries_x2:
        bits |= 1 << part_of(job, CORRECT)
    elif job.measures_x:
        bits |= 1 << parts.MEASURE_LINES
    return bits


@as_written
def call(plan: Plan, part: int, address: int, phase: int, chunk: int, scratch: int) -> None:
    """Call a part for a chunk of the job at an address."""
    call_at(array_at(plan.data + 8 * part, 1, np.int64)[0], address, phase, chunk, scratch)


@as_written
def take_chunk(plan: Plan, address: int, phase: int, chunk: int, scratch: int) -> None:
    """Take one chunk of a job through a phase."""
    job = job_at(address)
    if phase == FACTORS:
        make_factors(plan, job, address, scratch)
    elif phase == CONCLUDE:
        conclude(job)
    else:
        if phase == ENERGY and job.momentum == OF_GRADIENT:
            call(plan, parts.BLEND, address, phase, chunk, scratch)
        call(plan, part_of(job, phase), address, phase, chunk, scratch)


@as_written
def make_factors(plan: Plan, job: Job, address: int, scratch: int) -> None:
    """Make R, C and 1/√V̂ of a job that takes the step, and decide whether X has to be read for ΣX²."""
    if not job.taken:
        job.skipped += 1
        return
    if job.estimator != FULL:
        call(plan, parts.MAKE_FACTORS, address, FACTORS, 0, scratch)
    if energy_in_first_pass(job):
        check_energy(plan, job, address, scratch)
    job.needs_correction = 0
    job.reads_x2 = job.measures_x and job.estimator != FULL
    if job.reads_x2 and may_rely(job):
        call(plan, part_of(job, MEASURE), address, CHECK, chunk_of_line(job, job.heaviest_line), scratch)
        rely(job)


@as_written
def check_energy(plan: Plan, job: Job, address: int, scratch: int) -> None:
    """Sum U² again in double if float32 had no room for the squares; a sum of 0 is taken for what it is."""
    if plan.stat_size == 4 and job.u2 != 0 and not is_accurate(job, job.u2):
        call(plan, parts.ENERGY_IN_DOUBLE + of_momentum(job), address, ENERGY, 0, scratch)


@as_written
def check_x2(plan: Plan, job: Job, address: int, scratch: int) -> None:
    """Sum X² again in double if float32 had no room for the squares."""
    if plan.stat_size == 4 and job.measures_x and not is_accurate(job, job.x2):
        call(plan, parts.MEASURE_IN_DOUBLE, address, MEASURE, 0, scratch)


@as_written
def finish_phase(plan: Plan, address: int, phase: int, scratch: int) -> None:
    """Do what follows the chunks of a phase, once all of them are done."""
    job = job_at(address)
    if phase == MOMENTS:
        add_up_rows(job)
        if job.estimator != FULL and not np.isfinite(job.finite):
            call(plan, parts.MOMENTS_IN_DOUBLE, address, phase, 0, scratch)
        means_of_sums(job)
        job.taken = job.ignore or np.isfinite(job.finite)
        if job.estimator == FULL:
            check_x2(plan, job, address, scratch)
    elif phase == ENERGY:
        job.u2 = total_of(job, FIRST)
        check_energy(plan, job, address, scratch)
    elif phase == MEASURE:
        take_measured(job)
        check_x2(plan, job, address, scratch)
    elif phase == APPLY:
        carry_on(job)
        if job.needs_correction:
            prepare_correction(plan, job, address, scratch)
        else:
            count_step(job)
    elif phase == CORRECT:
        count_step(job)


@as_written
def prepare_correction(plan: Plan, job: Job, address: int, scratch: int) -> None:
    """Find the step as it should have been, given ΣX² as X was found."""
    if not is_accurate(job, job.x2):  # X before the step is gone: take it from X after it, which is as good as equal
        check_x2(plan, job, address, scratch)
        job.x2 /= job.decay * job.decay
    conclude(job)


@as_written
def count_step(job: Job) -> None:
    """Count the step, and note its numbers for the report."""
    array_at(job.t, 1, np.float32)[0] += 1
    job.steps += 1
    job.clipped += job.is_clipped
    job.noted_beta2, job.noted_alpha, job.noted_rms_x, job.noted_rms_u = job.beta2, job.alpha, job.rms_x, job.rms_u


# ---- threads


@as_written
def take_small(plan: Plan, scratch: int) -> bool:
    """Take the next small tensor through its phases; return False if there are no more."""
    number = plan.large + add_at(plan.counters + SMALL_BEGUN, 1)
    if number >= plan.count:
        return False
    address = plan.jobs + JOB_SIZE * number
    job = job_at(address)
    if not job.present:
        return True
    if not plan.own_scratch:
        assign_addresses(job, scratch + plan.thread_bytes - plan.small_bytes)
    for phase in range(plan.first, plan.last):
        if has_phase(job, phase):
            for chunk in range(chunks_of(job, phase)):
                take_chunk(plan, address, phase, chunk, scratch)
            finish_phase(plan, address, phase, scratch)
    return True


@as_written
def share_phase(plan: Plan, address: int, phase: int, counters: int, scratch: int) -> None:
    """Take chunks of a large tensor through a phase, together with other threads, until the phase has ended."""
    chunks = chunks_of(job_at(address), phase)
    chunk = add_at(counters + BEGUN, 1)
    while chunk < chunks:
        # the last pass goes backwards: it begins with what the first one left in the cache
        take_chunk(plan, address, phase, chunks - 1 - chunk if phase == APPLY else chunk, scratch)
        if add_at(counters + DONE, 1) == chunks - 1:
            finish_phase(plan, address, phase, scratch)
            add_at(counters + CLOSED, 1)
        chunk = add_at(counters + BEGUN, 1)
    while add_at(counters + CLOSED, 0) == 0:
        if not take_small(plan, scratch):
            yield_thread()


def enter(address: int) -> None:
    """Work with the other threads until there is nothing left to begin. This is what every thread runs."""
    plan = plan_at(address)
    add_at(plan.counters + INSIDE, 1)
    if add_at(plan.counters + CLOSING, 0) == 0:
        scratch = plan.thread_scratch + plan.thread_bytes * add_at(plan.counters + CAME, 1)
        for i in range(plan.large):
            job = plan.jobs + JOB_SIZE * i
            for phase in range(plan.first, plan.last):
                if job_at(job).present and has_phase(job_at(job), phase):
                    counters = plan.counters + FIRST_PHASE + PHASE_SIZE * (END * i + phase)
                    share_phase(plan, job, phase, counters, scratch)
        while take_small(plan, scratch):
            pass
    add_at(plan.counters + INSIDE, -1)


def close(address: int) -> None:
    """Wait until no thread is inside, and let none in any more."""
    plan = plan_at(address)
    add_at(plan.counters + CLOSING, 1)
    while add_at(plan.counters + INSIDE, 0) > 0:
        yield_thread()


# ---- before the threads come


def plan_step(address: int) -> None:
    """Find out what is needed: parts, scratch, and which of the tensors are large."""
    plan = plan_at(address)
    jobs, addresses = array_at(plan.jobs, plan.count, JOB), array_at(plan.data, parts.ALL, np.int64)
    for i in range(len(jobs)):
        if jobs[i].present:
            plan.total += elements_of(jobs[i])
            plan.missing |= needed_parts(jobs[i])
    for part in range(len(addresses)):
        if addresses[part]:
            plan.missing &= ~(1 << part)
    most = min(plan.small_size, max(plan.chunk_size, plan.total // (4 * plan.threads)))
    while plan.large < len(jobs) and elements_of(jobs[plan.large]) > most:
        plan.large += 1
    for i in range(len(jobs)):
        if jobs[i].present:
            plan.thread_bytes = max(plan.thread_bytes, aligned(thread_scratch(jobs[i]) * plan.stat_size))
            size = 0 if plan.own_scratch else aligned(8 * scratch_size(jobs[i]))
            if i < plan.large:
                plan.large_bytes = max(plan.large_bytes, size)
            else:
                plan.small_bytes = max(plan.small_bytes, size)
    plan.thread_bytes += plan.small_bytes


@as_written
def aligned(size: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE


def init_counters(address: int) -> None:
    """Set the counters to zero, and give the large tensors the same scratch, as they come one after the other."""
    plan = plan_at(address)
    counters = array_at(plan.counters, (FIRST_PHASE + plan.large * END * PHASE_SIZE) // 8, np.int64)
    for i in range(len(counters)):
        counters[i] = 0
    jobs = array_at(plan.jobs, 0 if plan.own_scratch else plan.large, JOB)
    for i in range(len(jobs)):
        if jobs[i].present:
            assign_addresses(jobs[i], plan.large_scratch)


# ---- between steps


def assign_scratch(address: int) -> None:
    """Give every job its own piece of the scratch, which is at `data`."""
    plan = plan_at(address)
    jobs, base = array_at(plan.jobs, plan.count, JOB), plan.data
    for i in range(len(jobs)):
        assign_addresses(jobs[i], base)
        base += 8 * scratch_size(jobs[i])


def read_counts(address: int) -> None:
    """Read the step counts of all jobs into an array of doubles at `data`."""
    plan = plan_at(address)
    jobs, counts = array_at(plan.jobs, plan.count, JOB), array_at(plan.data, plan.count, np.float64)
    for i in range(len(jobs)):
        counts[i] = array_at(jobs[i].t, 1, np.float32)[0]
