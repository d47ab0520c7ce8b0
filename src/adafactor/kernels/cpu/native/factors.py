"""Between the passes: the vectors that are made of the sums of the first, and the scalars of Algorithm 4."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload, register_jitable

from adafactor.core import equations
from adafactor.kernels.cpu.native import jobs
from adafactor.kernels.cpu.native.compiling import OPTIONS, as_written, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.energy import averaged_row, energy_of_columns, state_index
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, root, view, widen
from adafactor.kernels.cpu.native.jobs import Job
from adafactor.kernels.cpu.native.lines import add, fill

# ---- after the first pass


@summing
def means_of_sums(job: Job) -> None:
    """Turn row sums into means of G² + ε₁, and add up the chunks' column sums to such means.

    `finite` becomes a number that is finite if all of them are: the sum of a column may have left float32 where those
    of its rows did not.
    """
    if job.estimator == jobs.FULL:
        job.u2, job.x2 = jobs.total_of(job, jobs.FIRST), jobs.total_of(job, jobs.SECOND)
        job.finite = jobs.total_of(job, jobs.THIRD)
        return
    row, size = view(job.scratch + job.row, 0, job.B * job.P * job.S * job.K, np.float64), job.S * job.Q * job.K
    total = 0.0
    for j in range(len(row)):
        row[j] = (row[j] + job.Q * job.eps1) / job.n_cols
        total += row[j]
    wanted = size if jobs.energy_in_first_pass(job) else 0
    for b in range(job.B):
        col = view(job.scratch + job.col, b * size, size, np.float64)
        fill(col, job.P * job.eps1)
        energy = view(job.scratch + job.column_energy, b * job.chunks * size, wanted, np.float64)
        for chunk in range(b * job.chunks, (b + 1) * job.chunks):
            add(col, view(job.scratch + job.partial, chunk * size, size, np.float64))
            if chunk > b * job.chunks:
                add(energy, view(job.scratch + job.column_energy, chunk * size, wanted, np.float64))
        for j in range(size):
            col[j] /= job.n_rows
            total += col[j]
    job.finite = total


@summing
def moments_in_double(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum G² of the whole tensor again, in double: a sum left float32, though perhaps none of the squares did.

    The columns' sums and energies go into the first chunk of each slice of the batch.
    """
    is_single = view(job.scratch, 0, 1, kind.stat).itemsize == 4
    largest = 3.4028234663852886e38 if is_single else 1.7976931348623157e308
    row, line = view(job.scratch + job.row, 0, job.B * job.P * job.S * job.K, np.float64), job.Q * job.K
    size, wanted = job.chunks * job.S * line, jobs.energy_in_first_pass(job)
    fill(row, 0.0)
    for b in range(job.B):
        partial = view(job.scratch + job.partial, b * size, size, np.float64)
        energy = view(job.scratch + job.column_energy, b * size, size if wanted else 0, np.float64)
        fill(partial, 0.0)
        fill(energy, 0.0)
        for p in range(job.P):
            for s in range(job.S):
                r = (p * job.S + s) * job.K
                rows = row[b * job.P * job.S * job.K :]
                g = view(job.g, b * job.gb + p * job.gp + s * job.gs, line, kind.g)
                for j in range(line):
                    a = widen(g[j], np.float64)
                    square = a * a if a * a <= largest else np.inf
                    partial[s * line + j] += square
                    rows[r + j % job.K] += square
                for j in range(line if wanted else 0):
                    a = widen(g[j], np.float64)
                    k = r + j % job.K
                    new = 1.0 if job.estimator == jobs.COLUMN else averaged_row(job, b, rows, k, kind.stat)
                    energy[s * line + j] += a * a / new


# ---- from means to 1/√V̂


@summing
def factors(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Algorithm 4, lines 5–7: average R and C in double, and form 1/√V̂ from them.

    Before that, in the phase MOMENTS, only a shard's share of mean(R), which other ranks complete; after it, in the
    phase CONCLUDE, R and C go into the state: until then the step may still be given up.
    """
    batch = job.S * job.K
    row = view(job.scratch + job.row, 0, job.B * job.P * batch, np.float64)
    col = view(job.scratch + job.col, 0, job.B * job.Q * batch, np.float64)
    if phase == jobs.MOMENTS:
        share = view(job.known_mean, 0, job.B * batch, np.float64)
        if job.swapped:
            _share_of_mean(job, col, job.col_state, job.col_offsets, job.n_cols, share, kind.stat)
        else:
            _share_of_mean(job, row, job.row_state, job.row_offsets, job.n_rows, share, kind.stat)
        return
    if phase == jobs.CONCLUDE:
        if job.estimator != jobs.COLUMN:
            _store(row, job.row_state, job.row_offsets, kind.stat)
        if job.estimator != jobs.ROW:
            _store(col, job.col_state, job.col_offsets, kind.stat)
        return
    row_scale = view(job.scratch + job.row_scale, 0, len(row), kind.stat)
    col_scale = view(job.scratch + job.col_scale, 0, len(col), kind.stat)
    means = view(job.scratch + job.means, 0, job.B * batch, np.float64)
    if job.estimator == jobs.COLUMN:
        fill(row, 1.0)
    else:
        old = view(job.scratch + job.row_scale, 0, len(row), np.float64)
        _average(row, job.row_state, job.row_offsets, old, job.beta2, job.w2, kind.stat)
    if job.estimator == jobs.ROW:
        fill(col, 1.0)
    else:
        old = view(job.scratch + job.col_scale, 0, len(col), np.float64)
        _average(col, job.col_state, job.col_offsets, old, job.beta2, job.w2, kind.stat)
    fill(means, 1.0)
    if job.estimator == jobs.OUTER and job.swapped:
        _mean(col, job.B * job.S, job.Q, job.K, job.known_mean, means)
    elif job.estimator == jobs.OUTER:
        _mean(row, job.B, job.P, batch, job.known_mean, means)
    _inverse_root(row, job.B, job.P, batch, means, job.swapped == 0, row_scale)
    _inverse_root(col, job.B * job.S, job.Q, job.K, means, job.swapped != 0, col_scale)
    if jobs.energy_in_first_pass(job):
        job.u2 = energy_of_columns(job, col, means, kind.stat)


@as_written
def _average(new: Array, state: int, offsets: int, old: Array, beta2: float, w2: float, stat: Any) -> None:
    """Average a factor of the state into new means: β̂₂·old + (1 − β̂₂)·new, a sum of positive terms.

    In two loops, so that product and sum are not fused: copies of a factor on several ranks must not differ.
    """
    for j in range(len(new)):
        old[j] = beta2 * view(state, state_index(offsets, j), 1, stat)[0]
        new[j] *= w2
    for j in range(len(new)):
        new[j] += old[j]


@as_written
def _store(values: Array, state: int, offsets: int, stat: Any) -> None:
    """Keep a factor in the state, in its precision."""
    for j in range(len(values)):
        view(state, state_index(offsets, j), 1, stat)[0] = narrow(values[j], stat)


@as_written
def _share_of_mean(job: Job, new: Array, state: int, offsets: int, length: float, share: Array, stat: Any) -> None:
    """Compute this rank's part of mean(Rₜ) = (1 − β̂₂ₜ)·mean(G² + ε₁) + β̂₂ₜ·mean(Rₜ₋₁), for every slice of the batch."""
    inner, count = job.K if job.swapped else job.S * job.K, len(new) // len(share)
    for k in range(len(share)):
        now, old = 0.0, 0.0
        for j in range(count):
            i = (k // inner * count + j) * inner + k % inner
            now += new[i]
            if job.counts_row:
                old += view(state, state_index(offsets, i), 1, stat)[0]
        share[k] = now * (job.w2 / length) + old * (job.beta2 / length)


@summing
def _mean(values: Array, outer: int, count: int, inner: int, known: int, means: Array) -> None:
    """Take the mean of a factor along its own axis, for every slice of the batch."""
    for o in range(outer):
        for i in range(inner):
            mean = 0.0
            if known:  # from outside: here is only a part of the factor
                mean = view(known, o * inner + i, 1, np.float64)[0]
            else:
                for j in range(count):
                    mean += values[(o * count + j) * inner + i]
                mean /= count
            means[o * inner + i] = mean


@summing
def _inverse_root(values: Array, outer: int, count: int, inner: int, means: Array, divides: bool, out: Array) -> None:
    """Compute 1/√ of a factor, which may be divided by its mean: in double, R/mean(R) may leave float32."""
    for o in range(outer):
        for i in range(inner):
            mean = means[o * inner + i] if divides else 1.0
            for j in range(count):
                at = (o * count + j) * inner + i
                out[at] = narrow(1.0 / root(values[at] / mean), out[0])


# ---- the scalars

step_size: Any = register_jitable(**OPTIONS)(equations.step_size)
clip_divisor: Any = register_jitable(**OPTIONS)(equations.clip_divisor)


@overload(equations.root_mean_square, strict=False, jit_options=OPTIONS)
def _root_mean_square(sum_of_squares: Any, count: Any) -> Any:
    return lambda sum_of_squares, count: root(sum_of_squares / count)


@overload(equations._at_least, strict=False, jit_options=OPTIONS)
def _at_least(bound: Any, value: Any) -> Any:
    return lambda bound, value: bound if bound > value else value  # a NaN stays one


root_mean_square: Any = equations.root_mean_square


@as_written
def conclude(job: Job) -> None:
    """Algorithm 4, lines 3 and 9, by `equations`: from RMS(X) and RMS(U) to what U, M and X are multiplied with."""
    job.rms_x, job.rms_u = root_mean_square(job.x2, job.count), root_mean_square(job.u2, job.count)
    job.alpha = step_size(job.rho, job.rms_x, job.eps2) if job.relative else job.rho
    divisor = clip_divisor(job.rms_u, job.clip) if job.clip > 0 else 1.0
    job.scale, job.rate, job.is_clipped = job.sign * job.alpha / divisor, 1.0, divisor > 1
    if job.momentum == jobs.OF_DIRECTION:
        job.scale, job.rate = 1.0 / divisor, job.sign * job.alpha
    is_by_alpha = job.relative and job.decays_by_alpha
    job.decay = 1.0 - (step_size(job.share, job.rms_x, job.eps2) if is_by_alpha else job.share)
