"""ΣU² out of the first walk over G, or by a second one where that cannot be.

With V̂ = R·C/mean(R), and i over rows and j over columns,

    ΣU² = Σᵢⱼ G²ᵢⱼ·mean(R)/(Rᵢ·Cⱼ) = mean(R)·Σⱼ (Σᵢ G²ᵢⱼ/Rᵢ) / Cⱼ.

A row's new Rᵢ is known as soon as the row has been summed. While the row is still in the cache, the first walk adds
G²ᵢⱼ/Rᵢ to the *column energy*, the inner sum. After the walk C and mean(R) are known as well, and a sum over columns is
all that is left to do. This is not possible where U is not made of G (momentum of the gradient: `blend` comes first),
nor where other ranks hold parts of the tensor, so that Rᵢ is not known.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.cpu.native.elements import array_at, as_written, narrow, root, size_of, summing, widen
from adafactor.kernels.cpu.native.job import COLUMN, RESULTS, WIDTH, gradient, numerator, span, tile_length
from adafactor.kernels.cpu.native.lines import blend, energy_of, repeat

LOST = 1.2e-38  # the smallest normal float32


@as_written
def state_index(offsets: int, j: int) -> Any:
    """Return where the state keeps entry j of a factor."""
    return array_at(offsets + 8 * j, 1, np.int64)[0] if offsets else j


@as_written
def averaged_row(job: Any, b: int, row: Any, r: int, stat: Any) -> Any:
    """Return R as it will be, given the sum of its line: what `factors` computes later, to the bit."""
    where = state_index(job.row_offsets, b * job.P * job.S * job.K + r)
    old = job.beta2 * array_at(job.row_state + size_of(stat) * where, 1, stat)[0]
    return old + job.w2 * ((row[r] + job.Q * job.eps1) / job.n_cols)


@summing
def row_scale_of(job: Any, b: int, row: Any, r: int, stat: Any) -> Any:
    """Return 1/√R as it will be, given the sum of its line."""
    if job.estimator == COLUMN:
        return narrow(1.0, stat)
    return narrow(1.0 / root(averaged_row(job, b, row, r, stat)), stat)


@summing
def energy_of_columns(job: Any, col: Any, means: Any, stat: Any) -> Any:
    """Return ΣU² from the column energies; `means` is mean(R), or 1 where C was divided by it.

    NaN if float32 has lost too much: a square below `LOST` vanishes from the column energy, but mean(R)/C may be large.
    """
    line, total, most = job.Q * job.K, 0.0, 0.0
    for o in range(job.B * job.S):
        b = o // job.S
        energy = array_at(job.column_energy + 8 * (b * job.cuts * job.S + o - b * job.S) * line, line, np.float64)
        for j in range(line):
            factor = means[o * job.K + j % job.K] / col[o * line + j]
            total += energy[j] * factor
            most += factor
    if size_of(stat) == 4 and job.P * LOST * most > 1e-6 * total + 1e-12 * job.count:
        return np.nan
    return total


@summing
def energy_of_lines(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Second walk: sum U² of a unit."""
    b, start, stop = span(job, unit)
    line, u2, of = job.Q * job.K, 0.0, numerator(job)
    tile = array_at(scratch, tile_length(job), kind.stat)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, kind.stat)
    for p in range(start, stop):
        for s in range(job.S):
            r = ((b * job.P + p) * job.S + s) * job.K
            g = array_at(of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s), line, kind.g)
            col = array_at(job.col_scale + size_of(kind.stat) * (b * job.S + s) * line, line, kind.stat)
            if job.K == 1:
                for q in range(0, line, WIDTH):
                    u2 += energy_of(g[q : q + WIDTH], row[r], col[q : q + WIDTH])
            else:
                repeat(row, r, job.K, narrow(1.0, kind.stat), tile)
                for q in range(0, line, len(tile)):
                    u2 += energy_of(g[q : q + len(tile)], tile, col[q : q + len(tile)])
    array_at(job.units + 8 * RESULTS * unit, 1, np.float64)[0] = u2


@summing
def blend_lines(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Average a unit of G into its momentum, before the second walk reads it."""
    b, start, stop = span(job, unit)
    weight, line, of = narrow(job.w1, kind.stat), job.Q * job.K, gradient(job)
    for p in range(start, stop):
        for s in range(job.S):
            m = job.m + size_of(kind.stat) * (b * job.xb + p * job.xp + s * job.xs)
            g = of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s)
            blend(array_at(m, line, kind.stat), array_at(g, line, kind.g), weight)


@summing
def energy_in_double(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Sum U² of the whole tensor in double, where float32 has no room for the squares."""
    line, total, of = job.Q * job.K, 0.0, numerator(job)
    row = array_at(job.row_scale, job.B * job.P * job.S * job.K, kind.stat)
    for b in range(job.B):
        for p in range(job.P):
            for s in range(job.S):
                g = array_at(of.address + size_of(kind.g) * (b * of.b + p * of.p + s * of.s), line, kind.g)
                col = array_at(job.col_scale + size_of(kind.stat) * (b * job.S + s) * line, line, kind.stat)
                r = ((b * job.P + p) * job.S + s) * job.K
                for j in range(line):
                    u = widen(g[j], np.float64) * row[r + j % job.K] * col[j]
                    total += u * u
    job.u2 = total
