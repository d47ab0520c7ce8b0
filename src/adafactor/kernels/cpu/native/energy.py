"""ΣU² out of the first pass over G, or by a second one where that cannot be.

With V̂ = R·C/mean(R), and i over rows and j over columns,

    ΣU² = Σᵢⱼ G²ᵢⱼ·mean(R)/(Rᵢ·Cⱼ) = mean(R)·Σⱼ (Σᵢ G²ᵢⱼ/Rᵢ) / Cⱼ.

A row's new Rᵢ is known as soon as the row has been summed. While the row is still in the cache, the first pass adds
G²ᵢⱼ/Rᵢ to the *column energy*, the inner sum. After the pass C and mean(R) are known as well, and a sum over columns is
all that is left to do. This is not possible where U is not made of G (momentum of the gradient), nor where other ranks
hold parts of the tensor, so that Rᵢ is not known.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.cpu.native import jobs, momentum, squares
from adafactor.kernels.cpu.native.compiling import as_written, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, root, view
from adafactor.kernels.cpu.native.jobs import Job

LOST = 1.2e-38  # the smallest normal float32


@as_written
def state_index(offsets: int, j: int) -> int:
    """Return where the state keeps entry j of a factor."""
    return int(view(offsets, j, 1, np.int64)[0]) if offsets else j


@as_written
def averaged_row(job: Job, b: int, row: Array, r: int, stat: Any) -> float:
    """Return R as it will be, given the sum of its line: what `factors` computes later, to the bit."""
    where = state_index(job.row_offsets, b * job.P * job.S * job.K + r)
    old = job.beta2 * view(job.row_state, where, 1, stat)[0]
    new: float = old + job.w2 * ((row[r] + job.Q * job.eps1) / job.n_cols)
    return new


@summing
def row_scale_of(job: Job, b: int, row: Array, r: int, stat: Any) -> float:
    """Return 1/√R as it will be, given the sum of its line."""
    if job.estimator == jobs.COLUMN:
        return narrow(1.0, stat)
    return narrow(1.0 / root(averaged_row(job, b, row, r, stat)), stat)


@summing
def energy_of_columns(job: Job, col: Array, means: Array, stat: Any) -> float:
    """Return ΣU² from the column energies; `means` is mean(R), or 1 where there is only one factor.

    NaN if float32 has lost too much: a square below `LOST` vanishes from the column energy, but mean(R)/C may be large.
    """
    line, total, most = job.Q * job.K, 0.0, 0.0
    for o in range(job.B * job.S):
        b = o // job.S
        first = b * job.chunks * job.S + o - b * job.S
        energy = view(job.scratch + job.column_energy, first * line, line, np.float64)
        for j in range(line):
            factor = means[o * job.K + j % job.K] / col[o * line + j]
            total += energy[j] * factor
            most += factor
    is_single = view(job.scratch, 0, 1, stat).itemsize == 4  # a constant: in double the loop above has one sum only
    if is_single and job.P * LOST * most > 1e-6 * total + 1e-12 * job.count:
        return np.nan
    return total


@summing
def energy_of_lines(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Second pass: sum U² of a chunk."""
    averaged, weight, size, u2 = job.momentum == jobs.OF_GRADIENT, narrow(job.w1, kind.stat), job.stretch, 0.0
    tile = view(scratch, 0, size, kind.stat)
    b, start, stop = jobs.span(job, chunk)
    for p in range(start, stop):
        for s in range(job.S):
            line = jobs.line_at(job, b, p, s)
            row = kind.row_scale(job, line, narrow(1.0, kind.stat), tile, kind.stat)
            for q in range(0, job.Q * job.K, size):
                part = jobs.stretch_at(job, line, q, size, kind)
                m = momentum.load(job, part, part.m, view(scratch, size, len(part.g), kind.stat))
                u2 += squares.energy_of(part, m, row, averaged, weight, kind.sum)
    jobs.set_results(job, chunk, u2, 0.0, 0.0, 0.0)
