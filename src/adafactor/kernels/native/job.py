"""A job, as a record that Python fills in and the loops read; its units, and the room that it needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.native.elements import DOUBLES, as_written, at, summing

WIDTH = 2048  # numbers of a line that are summed in the statistics' precision
TALL = 64  # rows that are summed in the statistics' precision

OUTER, ROW, COLUMN, FULL = range(4)
NONE, OF_UPDATE, OF_GRADIENT = range(3)
NEAREST, STOCHASTIC, KAHAN = range(3)

JOB = np.dtype(
    [(name, np.int64) for name in "B P S Q K xb xp xs gb gp gs".split()]  # sizes; strides of X and G along B, P, S
    + [(name, np.int64) for name in "rows cuts start".split()]  # P's per unit, units per B, first element in the bucket
    + [(name, np.int64) for name in "estimator swapped momentum early relative measures ignore".split()]
    + [(name, np.int64) for name in "x g v m c t".split()]  # addresses of X, G, V̂, momentum, compensation, step count
    + [(name, np.int64) for name in "row_state col_state mean".split()]  # addresses of R, C and the known mean of R
    # the keys of the random numbers; the number of X's first element, and what is added to it along B, P, S, Q·K
    + [(name, np.int64) for name in "rounding key1 key2 origin nb np ns nq".split()]
    # addresses of scratch
    + [(name, np.int64) for name in "row col row_scale col_scale means partial heat units".split()]
    + [(name, np.int64) for name in "taken carries steady looks clips steps clipped skipped".split()]
    + [(name, np.float64) for name in "n_rows n_cols eps eps2 clip count sign".split()]
    + [(name, np.float64) for name in "beta2 w1 w2 rho scale decay".split()]
    + [(name, np.float64) for name in "u2 x2 finite left".split()]  # `left`: ΣX² as the last step left it
    + [(name, np.float64) for name in "noted_beta2 rms_x alpha rms_u".split()]  # of the last step that was taken
)
MOMENTS, ENERGY, MEASURE, APPLY, ALL = range(5)  # the walks


@summing
def span(job: Any, unit: int) -> Any:
    """The batch index of a unit, its first P and the one after its last."""
    b = unit // job.cuts
    start = (unit - b * job.cuts) * job.rows
    return b, start, min(job.P, start + job.rows)


@summing
def first_of(job: Any, unit: int) -> Any:
    """The first element of a unit, counted over the bucket."""
    b, start, _ = span(job, unit)
    return job.start + (b * job.P + start) * job.S * job.Q * job.K


@summing
def results_of(job: Any) -> Any:
    """Three numbers for every unit."""
    return at(job.units, 3 * job.B * job.cuts, DOUBLES)


@as_written
def in_order(values: Any) -> Any:
    """Their sum."""
    total = 0.0
    for j in range(len(values)):
        total += values[j]
    return total


@as_written
def total_of(job: Any, which: int) -> Any:
    """The sum of one of the units' numbers."""
    return in_order(results_of(job)[which::3])


@summing
def tile_of(job: Any, room: Any) -> Any:
    """Room for a power of two of slices of K: enough to be worth a loop, and soon filled."""
    size = job.K
    while 2 * size <= min(job.Q * job.K, WIDTH // 4):
        size *= 2
    return room[:size]


@summing
def room_for(jobs: Any, ss: Any) -> Any:
    """What one thread needs beside a job's own scratch: column sums of a unit, twice, tiles, and a part of a line."""
    most, tile = 0, WIDTH // 4
    for i in range(len(jobs)):
        most = max(most, jobs[i].S * jobs[i].Q * jobs[i].K)
        tile = max(tile, jobs[i].K)
    return np.empty(2 * most + 4 * tile + WIDTH, ss.dtype)


@summing
def furnish_job(job: Any, base: int) -> None:
    """The addresses of vectors for R along P and C along Q, their scales, R's means, and of the units' sums."""
    row, col, batch = _lengths(job)
    job.row, job.col = base, base + 8 * row
    job.row_scale, job.col_scale = job.col + 8 * col, job.col + 8 * (col + row)
    job.means = job.col_scale + 8 * col
    job.partial = job.means + 8 * batch
    job.heat = job.partial + 8 * col * job.cuts
    job.units = job.heat + 8 * col * job.cuts


@summing
def size_of(job: Any) -> Any:
    """How many doubles that is."""
    row, col, batch = _lengths(job)
    return 2 * (row + col) + batch + 2 * col * job.cuts + 3 * job.B * job.cuts


@summing
def _lengths(job: Any) -> Any:
    """Of R, of C and of their batch."""
    batch = 0 if job.estimator == FULL else job.B * job.S * job.K
    return job.P * batch, job.Q * batch, batch
