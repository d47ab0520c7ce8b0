"""Who does what when: threads lead tensors from phase to phase. This is the only place that knows of threads.

Large tensors are stepped one after the other by all threads together, chunk by chunk. Each small tensor is taken
through all its phases by one thread, so that it stays in that core's cache; threads pick these up while they wait for a
phase of a large one to end. No thread waits for a *particular* other one: a phase ends when the counter of finished
chunks reaches their number, so any number of threads, from one on, will do.
"""

from __future__ import annotations

import ctypes
from typing import get_type_hints

import numpy as np
from numba.extending import register_jitable

from adafactor.kernels.cpu.native import jobs
from adafactor.kernels.cpu.native.carry import carry_on, rely_on_carried, take_measured
from adafactor.kernels.cpu.native.compiling import OPTIONS, as_written
from adafactor.kernels.cpu.native.factors import conclude, means_of_sums
from adafactor.kernels.cpu.native.intrinsics import add_at, call_at, view, yield_thread
from adafactor.kernels.cpu.native.jobs import Job

JOB_SIZE = jobs.JOB.itemsize
CACHE_LINE = 64  # vectors that begin with one are loaded faster (measured: up to 10 % of a step)


class Plan(ctypes.Structure):
    """What is to be done with a table of jobs, the largest first, and with which memory."""

    # From Python.
    jobs: int  # address
    count: int
    first: int  # phase, and the one after the last
    last: int
    small_size: int  # elements up to which a tensor is small
    chunk_size: int  # elements
    own_scratch: int  # every job has been given its own
    threads: int  # at most; `plan_step` lets no more come than there are chunks
    # From `plan_step`.
    large: int  # how many jobs, from the first on, are large
    large_bytes: int  # of scratch: for large tensors, which come one after the other, and for a small one
    small_bytes: int
    thread_bytes: int  # of scratch for each thread, a small tensor's included
    # Addresses, from Python.
    counters: int
    large_scratch: int
    thread_scratch: int


Plan._fields_ = [(name, ctypes.c_int64) for name in get_type_hints(Plan) if name[0] != "_"]
PLAN = np.dtype(Plan)

# Counters that threads share, in bytes from `counters`: threads inside, whether no more are let in, threads that have
# come, and small tensors that were begun. Then three for every phase of every large tensor.
INSIDE, CLOSING, CAME, SMALL_BEGUN, FIRST_PHASE = 0, 8, 16, 24, 32
BEGUN, DONE, CLOSED, PHASE_SIZE = 0, 8, 16, 24  # chunks that were begun, and are done; whether the phase has ended


@as_written
def plan_at(address: int) -> Plan:
    """Return the plan at an address."""
    plan: Plan = view(address, 0, 1, PLAN)[0]
    return plan


# ---- phases


@as_written
def has_phase(job: Job, phase: int) -> bool:
    """Say whether a job has a phase. Once a thread may have asked, the answer never turns from no to yes."""
    if phase <= jobs.FACTORS:
        return True
    if not job.taken:
        return False
    if phase == jobs.ENERGY:
        return job.energy != 0
    if phase == jobs.MEASURE:
        return job.reads_x2 != 0
    return phase != jobs.CORRECT or job.needs_correction != 0


@as_written
def chunks_of(job: Job, phase: int) -> int:
    """Return how many chunks a phase has: vectors and scalars are one."""
    return 1 if phase in (jobs.FACTORS, jobs.CONCLUDE) else job.B * job.chunks


@as_written
def part_of(job: Job, phase: int) -> int:
    """Return the address of the part that takes a chunk of this job through a phase."""
    if phase == jobs.MOMENTS:
        return job.moments
    if phase == jobs.ENERGY:
        return job.energy
    if phase == jobs.MEASURE:
        return job.measure
    return job.apply if phase == jobs.APPLY else job.correct


@as_written
def take_chunk(address: int, phase: int, chunk: int, scratch: int) -> None:
    """Take one chunk of a job through a phase."""
    job = jobs.job_at(address)
    if phase == jobs.FACTORS:
        make_factors(job, address, scratch)
    elif phase == jobs.CONCLUDE:
        conclude(job)
        if job.estimator != jobs.FULL:
            call_at(job.factors, address, phase, chunk, scratch)
    else:
        call_at(part_of(job, phase), address, phase, chunk, scratch)


@as_written
def make_factors(job: Job, address: int, scratch: int) -> None:
    """Make Rₜ, Cₜ and 1/√V̂ₜ of a job that takes the step, and decide whether X has to be read for ΣX²."""
    if not job.taken:
        job.skipped += 1
        return
    if job.estimator != jobs.FULL:
        call_at(job.factors, address, jobs.FACTORS, 0, scratch)
    if jobs.energy_in_first_pass(job):
        check_energy(job, address, scratch)
    rely_on_carried(job, address, scratch)


@as_written
def check_energy(job: Job, address: int, scratch: int) -> None:
    """Sum U² again in double if float32 had no room for the squares; a sum of 0 is taken for what it is."""
    if job.energy_in_double and job.u2 != 0 and not jobs.is_accurate(job, job.u2):
        job.u2 = sum_again(job, address, job.energy_in_double, scratch)


@as_written
def check_x2(job: Job, address: int, scratch: int) -> None:
    """Sum X² again in double if float32 had no room for the squares."""
    if job.measure_in_double and not jobs.is_accurate(job, job.x2):
        job.x2 = sum_again(job, address, job.measure_in_double, scratch)


@as_written
def sum_again(job: Job, address: int, part: int, scratch: int) -> float:
    """Return the sum over all chunks, one after the other, by a part that sums in double."""
    for chunk in range(job.B * job.chunks):
        call_at(part, address, jobs.MEASURE, chunk, scratch)
    return jobs.total_of(job, jobs.FIRST)


@as_written
def finish_phase(address: int, phase: int, scratch: int) -> None:
    """Do what follows the chunks of a phase, once all of them are done."""
    job = jobs.job_at(address)
    if phase == jobs.MOMENTS:
        means_of_sums(job)
        if job.estimator != jobs.FULL and not np.isfinite(job.finite):
            call_at(job.moments_in_double, address, phase, 0, scratch)
            means_of_sums(job)
        if job.known_mean:
            call_at(job.factors, address, phase, 0, scratch)
        job.taken = job.ignore or np.isfinite(job.finite)
        if job.estimator == jobs.FULL:
            check_x2(job, address, scratch)
    elif phase == jobs.ENERGY:
        job.u2 = jobs.total_of(job, jobs.FIRST)
        check_energy(job, address, scratch)
    elif phase == jobs.MEASURE:
        take_measured(job)
        check_x2(job, address, scratch)
    elif phase == jobs.APPLY:
        carry_on(job)
        if job.needs_correction:
            prepare_correction(job, address, scratch)
        else:
            count_step(job)
    elif phase == jobs.CORRECT:
        count_step(job)


@as_written
def prepare_correction(job: Job, address: int, scratch: int) -> None:
    """Find the step as it should have been, given ΣX² as X was found."""
    if not jobs.is_accurate(job, job.x2):  # X before the step is gone, but X after it is as good as equal
        check_x2(job, address, scratch)
        job.x2 /= job.decay * job.decay
    conclude(job)


@as_written
def count_step(job: Job) -> None:
    """Count the step, and note for the report what a skipped one would overwrite."""
    view(job.t, 0, 1, np.float32)[0] += 1
    job.steps += 1
    job.clipped += job.is_clipped
    job.beta2_taken = job.beta2


# ---- threads


@as_written
def take_small(plan: Plan, scratch: int) -> bool:
    """Take the next small tensor through its phases; return False if there are no more."""
    number = plan.large + add_at(plan.counters + SMALL_BEGUN, 1)
    if number >= plan.count:
        return False
    address = plan.jobs + JOB_SIZE * number
    job = jobs.job_at(address)
    if not job.present:
        return True
    if not plan.own_scratch:
        job.scratch = scratch + plan.thread_bytes - plan.small_bytes
    for phase in range(plan.first, plan.last):
        if has_phase(job, phase):
            for chunk in range(chunks_of(job, phase)):
                take_chunk(address, phase, chunk, scratch)
            finish_phase(address, phase, scratch)
    return True


@as_written
def share_phase(plan: Plan, address: int, phase: int, counters: int, scratch: int) -> None:
    """Take chunks of a large tensor through a phase, together with other threads, until the phase has ended."""
    chunks = chunks_of(jobs.job_at(address), phase)
    chunk = add_at(counters + BEGUN, 1)
    while chunk < chunks:
        # the last pass goes backwards: it begins with what the first one left in the cache
        take_chunk(address, phase, chunks - 1 - chunk if phase == jobs.APPLY else chunk, scratch)
        if add_at(counters + DONE, 1) == chunks - 1:
            finish_phase(address, phase, scratch)
            add_at(counters + CLOSED, 1)
        chunk = add_at(counters + BEGUN, 1)
    while add_at(counters + CLOSED, 0) == 0:
        if not take_small(plan, scratch):
            yield_thread()


@as_written
def share_large(plan: Plan, number: int, scratch: int) -> None:
    """Take a large tensor through its phases, together with other threads."""
    address = plan.jobs + JOB_SIZE * number
    job = jobs.job_at(address)
    if not job.present:
        return
    if not plan.own_scratch:
        job.scratch = plan.large_scratch  # every thread writes the same
    for phase in range(plan.first, plan.last):
        if has_phase(job, phase):
            counters = plan.counters + FIRST_PHASE + PHASE_SIZE * (jobs.END * number + phase)
            share_phase(plan, address, phase, counters, scratch)


def enter(address: int) -> None:
    """Work with the other threads until there is nothing left to begin. This is what every thread runs."""
    plan = plan_at(address)
    add_at(plan.counters + INSIDE, 1)
    if add_at(plan.counters + CLOSING, 0) == 0:
        scratch = plan.thread_scratch + plan.thread_bytes * add_at(plan.counters + CAME, 1)
        for i in range(plan.large):
            share_large(plan, i, scratch)
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
    """Find out which of the tensors are large, how many threads have something to do, and how much memory they need."""
    plan, total = plan_at(address), 0
    table = view(plan.jobs, 0, plan.count, jobs.JOB)
    for i in range(len(table)):
        if table[i].present:
            total += jobs.elements_of(table[i])
    most = min(plan.small_size, max(plan.chunk_size, total // (4 * plan.threads)))
    while plan.large < len(table) and jobs.elements_of(table[plan.large]) > most:
        plan.large += 1
    for i in range(len(table)):
        if table[i].present:
            plan.thread_bytes = max(plan.thread_bytes, aligned(8 * jobs.thread_scratch(table[i])))
            size = 0 if plan.own_scratch else aligned(table[i].scratch_bytes)
            if i < plan.large:
                plan.large_bytes = max(plan.large_bytes, size)
            else:
                plan.small_bytes = max(plan.small_bytes, size)
    plan.thread_bytes += plan.small_bytes
    plan.threads = max(1, min(plan.threads, total // plan.chunk_size))


@register_jitable(**OPTIONS)
def aligned(size: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE


def read_counts(table: int, count: int, counts: int) -> None:
    """Read the step counts of so many jobs into an array of doubles."""
    for i in range(count):
        view(counts, i, 1, np.float64)[0] = view(view(table, i, 1, jobs.JOB)[0].t, 0, 1, np.float32)[0]
