"""Between the walks: vectors, made of the sums of the first, and the scalars of Algorithm 4."""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.native.elements import DOUBLES, as_written, at, narrow, summing, widen
from adafactor.kernels.native.job import COLUMN, FULL, OUTER, ROW, total_of
from adafactor.kernels.native.lines import add, fill
from adafactor.kernels.native.moments import scale_of


@summing
def fold_job(job: Any, gs: Any, ss: Any) -> None:
    """Add up what the units of the first walk left: means over rows and columns, and whether all of G² is finite."""
    if job.estimator == FULL:
        job.u2, job.x2, job.finite = total_of(job, 0), total_of(job, 1), total_of(job, 2)
        return
    doubles, size, total = DOUBLES, job.S * job.Q * job.K, 0.0
    row = at(job.row, job.B * job.P * job.S * job.K, doubles)
    for j in range(len(row)):
        total += row[j]
    if not np.isfinite(total):
        total = _sum_in_double(job, gs, ss, row)
    job.finite = total
    for j in range(len(row)):
        row[j] = (row[j] + job.Q * job.eps) / job.n_cols
    for b in range(job.B):
        col = at(job.col + 8 * b * size, size, doubles)
        fill(col, 0, size, job.P * job.eps)
        hot = size if job.early else 0
        heat = at(job.heat + 8 * b * job.cuts * size, hot, doubles)
        for unit in range(b * job.cuts, (b + 1) * job.cuts):
            add(col, at(job.partial + 8 * unit * size, size, doubles))
            if unit > b * job.cuts:
                add(heat, at(job.heat + 8 * unit * size, hot, doubles))
        for j in range(size):
            col[j] /= job.n_rows


@summing
def _sum_in_double(job: Any, gs: Any, ss: Any, row: Any) -> float:
    """Again for one tensor, with room for every square; leaves the columns' sums in the first unit of each B."""
    largest = 3.4028234663852886e38 if ss.itemsize == 4 else 1.7976931348623157e308
    line, total = job.Q * job.K, 0.0
    fill(row, 0, len(row), 0.0)
    for b in range(job.B):
        size = job.cuts * job.S * line
        partial = at(job.partial + 8 * b * size, size, row)
        fill(partial, 0, size, 0.0)
        for p in range(job.P):
            for s in range(job.S):
                g = at(job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), line, gs)
                for j in range(line):
                    a = widen(g[j], 0.0)
                    square = a * a if a * a <= largest else np.inf
                    partial[s * line + j] += square
                    row[((b * job.P + p) * job.S + s) * job.K + j % job.K] += square
                    total += square
    if job.early and np.isfinite(total):
        _heat_in_double(job, gs, ss, row)
    return total


@summing
def _heat_in_double(job: Any, gs: Any, ss: Any, row: Any) -> None:
    line = job.Q * job.K
    for b in range(job.B):
        size, rows = job.cuts * job.S * line, row[b * job.P * job.S * job.K :]
        heat = at(job.heat + 8 * b * size, size, row)
        fill(heat, 0, size, 0.0)
        for p in range(job.P):
            for s in range(job.S):
                g = at(job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), line, gs)
                for j in range(line):
                    u = widen(g[j], 0.0) * scale_of(job, b, rows, (p * job.S + s) * job.K + j % job.K, ss)
                    heat[s * line + j] += u * u


@summing
def factor_job(job: Any, ss: Any) -> None:
    """Algorithm 4, lines 5–7: R and C averaged in double, kept in the state's precision, and 1/√V̂ from them."""
    if job.estimator == FULL:
        return
    doubles, batch = DOUBLES, job.S * job.K
    row, col = at(job.row, job.B * job.P * batch, doubles), at(job.col, job.B * job.Q * batch, doubles)
    row_scale, col_scale = at(job.row_scale, len(row), ss), at(job.col_scale, len(col), ss)
    means = at(job.means, job.B * batch, doubles)
    fill(row_scale, 0, len(row), narrow(1.0, ss[0]))
    fill(col_scale, 0, len(col), narrow(1.0, ss[0]))
    fill(means, 0, len(means), 1.0)
    if job.estimator != COLUMN:
        _average(row, at(job.row_state, len(row), ss), job.w2)
        if job.estimator == OUTER and not job.swapped:
            _normalise(row, job.B, job.P, batch, job.mean, means)
        _inverse_root(row, row_scale)
    if job.estimator != ROW:
        _average(col, at(job.col_state, len(col), ss), job.w2)
        if job.estimator == OUTER and job.swapped:
            _normalise(col, job.B * job.S, job.Q, job.K, job.mean, means)
            fill(means, 0, len(means), 1.0)  # C has been divided by them
        _inverse_root(col, col_scale)
    else:
        fill(col, 0, len(col), 1.0)
    if job.early:
        _energy_of_columns(job, col, means)


@summing
def _energy_of_columns(job: Any, col: Any, means: Any) -> None:
    """ΣU² from Σ(G/√R)² of every column: what is missing is mean(R)/C."""
    line, total = job.Q * job.K, 0.0
    for o in range(job.B * job.S):
        b = o // job.S
        heat = at(job.heat + 8 * (b * job.cuts * job.S + o - b * job.S) * line, line, col)
        for j in range(line):
            total += heat[j] / col[o * line + j] * means[o * job.K + j % job.K]
    job.u2 = total


@as_written
def _average(new: Any, state: Any, weight: float) -> None:
    # two loops, so that product and sum are not fused: copies of a factor on several ranks must not differ
    for j in range(len(new)):
        new[j] = weight * (new[j] - state[j])
    for j in range(len(new)):
        new[j] += state[j]
        state[j] = narrow(new[j], state[j])


@summing
def _normalise(values: Any, outer: int, count: int, inner: int, known: int, means: Any) -> None:
    """Divide a factor by its mean along its own axis, for every slice of the batch, and keep the means."""
    for o in range(outer):
        for i in range(inner):
            mean = 0.0
            if known:  # from outside: here is only a part of the factor
                mean = at(known, outer * inner, values)[o * inner + i]
            else:
                for j in range(count):
                    mean += values[(o * count + j) * inner + i]
                mean /= count
            means[o * inner + i] = mean
            for j in range(count):
                values[(o * count + j) * inner + i] /= mean


@summing
def _inverse_root(values: Any, out: Any) -> None:
    for j in range(len(out)):
        out[j] = narrow(
            1.0 / np.sqrt(values[j]), out[0]
        )  # in double: R/mean(R) may leave float32 where its root does not


@as_written
def conclude(job: Any) -> None:
    """`step.conclude`, to the bit: Algorithm 4, lines 3 and 9."""
    job.rms_x, job.rms_u, job.alpha = np.sqrt(job.x2 / job.count), np.sqrt(job.u2 / job.count), job.rho
    if job.relative:
        job.alpha = (job.eps2 if job.rms_x < job.eps2 else job.rms_x) * job.rho
    divisor = 1.0
    if job.clip > 0:
        ratio = job.rms_u / job.clip
        divisor = 1.0 if ratio < 1.0 else ratio  # a NaN stays one
    job.scale, job.clips = job.sign * job.alpha / divisor, divisor > 1
