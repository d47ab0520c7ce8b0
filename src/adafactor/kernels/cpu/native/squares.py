"""The innermost loops over lines that only read: sums of G², X² and U²."""

from __future__ import annotations

from typing import Any

from adafactor.kernels.cpu.native import jobs
from adafactor.kernels.cpu.native.compiling import summing
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, pick, widen
from adafactor.kernels.cpu.native.jobs import Job, Stretch
from adafactor.kernels.cpu.native.lines import Scale, average, averaged_square, keep_and_fade, update_of

Four = tuple[Array, Array, Array, Array]


@summing
def squares_of_four(g: Four, col: Array) -> tuple[float, float, float, float]:
    """Add G² of four lines to the columns; return the sum of each line.

    The lines lie far apart, because memory answers four streams at once; and the columns are read once for four lines.
    """
    (g0, g1, g2, g3), zero = g, narrow(0.0, col[0])
    t0, t1, t2, t3 = zero, zero, zero, zero
    for j in range(len(col)):
        a0, a1, a2, a3 = widen(g0[j], zero), widen(g1[j], zero), widen(g2[j], zero), widen(g3[j], zero)
        q0, q1, q2, q3 = a0 * a0, a1 * a1, a2 * a2, a3 * a3
        t0 += q0
        t1 += q1
        t2 += q2
        t3 += q3
        col[j] += (q0 + q1) + (q2 + q3)
    return t0, t1, t2, t3


@summing
def squares_of_four_tiles(g: Four, col: Array, tiles: Four) -> None:
    """Add G² of stretches of four lines to the columns and to a tile for each; they are no longer than a tile."""
    (g0, g1, g2, g3), (tile0, tile1, tile2, tile3) = g, tiles
    for j in range(len(col)):
        a0, a1, a2, a3 = widen(g0[j], col[j]), widen(g1[j], col[j]), widen(g2[j], col[j]), widen(g3[j], col[j])
        q0, q1, q2, q3 = a0 * a0, a1 * a1, a2 * a2, a3 * a3
        tile0[j] += q0
        tile1[j] += q1
        tile2[j] += q2
        tile3[j] += q3
        col[j] += (q0 + q1) + (q2 + q3)


@summing
def sum_of_squares(x: Array, stat: Any) -> float:
    """Return Σx² of a line."""
    total = narrow(0.0, stat)
    for j in range(len(x)):
        a = widen(x[j], stat)
        total += a * a
    return total


# ---- U²


@summing
def energy_of(part: Stretch, m: Array, row: Scale, averaged: bool, weight: float, dtype: Any) -> float:
    """Return ΣU² of a stretch of a line, of G or of its momentum as it will be."""
    g, col, total = part.g, part.second, narrow(0.0, dtype)
    if averaged:
        for j in range(len(g)):
            u = update_of(average(widen(m[j], weight), widen(g[j], weight), weight), pick(row, j), col[j], dtype)
            total += u * u
    else:
        for j in range(len(g)):
            u = update_of(g[j], pick(row, j), col[j], dtype)
            total += u * u
    return total


@summing
def add_column_energy_of_four(g: Four, rows: tuple[Scale, Scale, Scale, Scale], energy: Array) -> None:
    """Add (G·r)² of four lines to the columns."""
    (g0, g1, g2, g3), (row0, row1, row2, row3) = g, rows
    for j in range(len(energy)):
        r0, r1, r2, r3 = pick(row0, j), pick(row1, j), pick(row2, j), pick(row3, j)
        u0, u1, u2, u3 = widen(g0[j], r0) * r0, widen(g1[j], r1) * r1, widen(g2[j], r2) * r2, widen(g3[j], r3) * r3
        energy[j] += (u0 * u0 + u1 * u1) + (u2 * u2 + u3 * u3)


@summing
def energy_of_unfactored(part: Stretch, m: Array, job: Job, dtype: Any) -> tuple[float, float]:
    """Return ΣU² and the sum of a share of V̂, with V̂ and the momentum as they will be; nothing is written."""
    g, v = part.g, part.second
    w1, w2, eps1 = narrow(job.w1, v[0]), narrow(job.w2, v[0]), narrow(job.eps1, v[0])
    keep, fade = keep_and_fade(job, v[0])
    averaged, energy, seen = job.momentum == jobs.OF_GRADIENT, narrow(0.0, dtype), narrow(0.0, dtype)
    share = narrow(1.0 / jobs.WIDTH, dtype)  # keeps the sum of V̂ in range
    for j in range(len(v)):
        a = widen(g[j], eps1)
        new = widen(averaged_square(v[j], a, keep, fade, w2, eps1), dtype)
        u = widen(average(widen(m[j], a), a, w1) if averaged else a, dtype)
        energy += u * u / new
        seen += new * share
    return energy, seen
