"""One tensor as a record that Python fills in by name and the loops read; its units and its scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from adafactor.kernels import memory_order as memory_order
from adafactor.kernels.cpu.native.elements import OPTIONS, Source, array_at, as_written, summing

WIDTH = memory_order.WIDTH
TALL = 64  # rows that are summed in the statistics' precision


def numbers(count: int) -> Any:
    """Return 0, 1, … as NumPy's integers: for every one of Python's, Numba compiles what is called with it anew."""
    return map(np.int64, range(count))


OUTER, ROW, COLUMN, FULL = range(4)  # estimator: along P and Q, along P only, along Q only, unfactored
NONE, OF_UPDATE, OF_GRADIENT = range(3)  # momentum
NEAREST, STOCHASTIC, KAHAN = range(3)  # rounding
MOMENTS, FACTORS, ENERGY, MEASURE, CONCLUDE, APPLY, REPAIR, END = numbers(8)  # the phases of a step
CHECK = END + 1  # no phase: asks the loop of APPLY to sum two lines again (see `carry`)
RESULTS = memory_order.RESULTS
FIRST, SECOND, THIRD = numbers(3)  # of a unit's results


def _fields(dtype: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, dtype) for name in names.split()]


INTEGER, DOUBLE = np.int64, np.float64
JOB = np.dtype([
    # Geometry: the sizes (see `native`), the strides of X and of G along B, P and S, P's per unit, units per B.
    *_fields(INTEGER, "B P S Q K xb xp xs gb gp gs rows cuts"),
    # Choices. `swapped`: P is the paper's column axis. `measures_x`: ΣX² is wanted before X is written.
    *_fields(INTEGER, "estimator swapped momentum rounding relative measures_x ignore"),
    # Constants: the lengths by which sums become means (of the whole tensor, where this is a shard), the settings
    # (clip = 0: no clipping), the number of elements of the whole, and −1 to maximise.
    *_fields(DOUBLE, "n_rows n_cols eps1 eps2 clip count sign"),
    # Addresses of X, G, V̂, momentum, compensation, step count, R along P and C along Q. An offsets array says where
    # the state keeps each entry of a factor, in elements; 0: in the order of the walk. `known_mean`: mean(R), where
    # only a part of R is here; 0: it is computed.
    *_fields(INTEGER, "x g full m compensation t row_state col_state row_offsets col_offsets known_mean"),
    # Random numbers: the keys of this step; the number of X's first element, and what is added along B, P, S, Q·K.
    *_fields(INTEGER, "key1 key2 origin nb np ns nq"),
    # Of this step: a job that is not present is passed over; the rates.
    *_fields(INTEGER, "present"),
    *_fields(DOUBLE, "beta2 w1 w2 rho decay"),
    # Results of this step. `finite` is a number that is finite if all of G² is. The step is X·decay − scale·U.
    *_fields(INTEGER, "taken clips"),
    *_fields(DOUBLE, "finite u2 x2 scale alpha rms_x rms_u"),
    # Carried from step to step, see `carry`; the second line says what became of it in this step.
    *_fields(INTEGER, "carries_x2 x2_confirmed heaviest_line"),
    *_fields(DOUBLE, "x2_after heaviest_x2"),
    *_fields(INTEGER, "reads_x2 repairs"),
    *_fields(DOUBLE, "checked_x2 scale_used"),
    # Figures for the report: counts since they were last read, and the last step that was taken.
    *_fields(INTEGER, "steps clipped skipped"),
    *_fields(DOUBLE, "noted_beta2 noted_alpha noted_rms_x noted_rms_u"),
    # Addresses of scratch, set by `assign_addresses`.
    *_fields(INTEGER, "row col row_scale col_scale means partial column_energy units"),
])  # fmt: skip

scratch_lengths = register_jitable(**OPTIONS)(memory_order.scratch_lengths)


def new_jobs(count: int) -> Any:
    """Make a table of jobs: all fields are zero but those with another default."""
    jobs = np.zeros(count, JOB)
    jobs["present"] = jobs["x2_confirmed"] = 1
    jobs["sign"] = jobs["decay"] = 1.0
    jobs["x2_after"] = np.nan
    return jobs


@as_written
def job_at(address: int) -> Any:
    """Return the job at an address."""
    return array_at(address, 1, JOB)[0]


@summing
def span(job: Any, unit: int) -> Any:
    """Return a unit's index along B, its first P, and the P after its last."""
    b = unit // job.cuts
    start = (unit - b * job.cuts) * job.rows
    return b, start, min(job.P, start + job.rows)


@summing
def gradient(job: Any) -> Any:
    """Say where G lies."""
    return Source(job.g, job.gb, job.gp, job.gs)


@summing
def numerator(job: Any) -> Any:
    """Say where the numerator of U lies: the momentum of the gradient, if there is one, else G."""
    if job.momentum == OF_GRADIENT:
        return Source(job.m, job.xb, job.xp, job.xs)
    return gradient(job)


@summing
def count_of_results(job: Any) -> Any:
    """Return how many results the units have: RESULTS numbers for each."""
    return RESULTS * job.B * job.cuts


@as_written
def total_of(job: Any, which: int) -> Any:
    """Add up one of the results over the units, always in the same order."""
    total, results = 0.0, array_at(job.units, count_of_results(job), np.float64)
    for i in range(which, len(results), RESULTS):
        total += results[i]
    return total


@as_written
def elements_of(job: Any) -> Any:
    """Return how many elements of the tensor are here."""
    return job.B * job.P * job.S * job.Q * job.K


@as_written
def energy_in_first_walk(job: Any) -> Any:
    """Say whether ΣU² comes out of the first walk (see `energy`): where all of R is here, and U is made of G."""
    return job.estimator != FULL and job.momentum != OF_GRADIENT and job.count == elements_of(job)


@summing
def tile_length(job: Any) -> Any:
    """Return the length of a tile: 2ⁱ·K numbers, about WIDTH/4.

    That is long enough to vectorise when K is small; and a power of two of slices can be filled by doubling.
    """
    size = job.K
    while 2 * size <= min(job.Q * job.K, WIDTH // 4):
        size *= 2
    return size


@as_written
def thread_scratch(job: Any) -> Any:
    """Return how many numbers of the statistics' type a thread needs for a job, besides the job's own scratch.

    They are the sums and the energy of a unit's columns, four tiles, and a part of a line.
    """
    return 2 * job.S * job.Q * job.K + 4 * max(job.K, WIDTH // 4) + WIDTH


@as_written
def scratch_of(job: Any) -> Any:
    """Return the lengths of a job's scratch vectors, in doubles."""
    return scratch_lengths((job.B, job.P, job.S, job.Q, job.K), job.cuts, job.estimator != FULL)


@as_written
def scratch_size(job: Any) -> Any:
    """Return how many doubles of scratch a job needs."""
    size = 0
    for length in scratch_of(job):
        size += length
    return size


@as_written
def assign_addresses(job: Any, base: int) -> None:
    """Lay out a job's scratch from an address on: its vectors, one after the other."""
    row, col, row_scale, col_scale, means, partial, column_energy, _ = scratch_of(job)
    job.row = base
    job.col = job.row + 8 * row
    job.row_scale = job.col + 8 * col
    job.col_scale = job.row_scale + 8 * row_scale
    job.means = job.col_scale + 8 * col_scale
    job.partial = job.means + 8 * means
    job.column_energy = job.partial + 8 * partial
    job.units = job.column_energy + 8 * column_energy
