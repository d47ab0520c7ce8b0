"""First pass, over G: row and column sums of G², and what ΣU² needs of G (see `energy`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adafactor.kernels.cpu.native import jobs, lines, squares
from adafactor.kernels.cpu.native.compiling import summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.energy import row_scale_of
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view
from adafactor.kernels.cpu.native.jobs import Job
from adafactor.kernels.cpu.native.squares import Four


@summing
def moments_of_lines(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum G² of a chunk of whole lines (K = 1) over rows and columns."""
    _sum_chunk(job, chunk, scratch, _sum_four, _sum_one, kind)


@summing
def moments_of_tiles(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum G² of a chunk of lines that consist of short slices (K > 1) over rows and columns."""
    _sum_chunk(job, chunk, scratch, _sum_four_in_tiles, _sum_one_in_tiles, kind)


class Sums(NamedTuple):
    """Where a chunk of G² is summed: its rows in double, and in the thread's own memory columns, energies and tiles."""

    b: int
    row: Array
    col: Array
    energy: Array  # empty if it is not wanted
    tiles: Array


@summing
def _sum_chunk(
    job: Job, chunk: int, scratch: int, sum_four: Callable[..., None], sum_one: Callable[..., None], kind: Kind
) -> None:
    """Sum a chunk, four lines at a time, a quarter of the chunk apart; then the few that are left over.

    The thread's own columns are of TALL rows at a time.
    """
    b, start, stop = jobs.span(job, chunk)
    per_row, size = job.S * job.K, job.S * job.Q * job.K
    energy_size = size if jobs.energy_in_first_pass(job) else 0
    col = view(job.scratch + job.partial, chunk * size, size, np.float64)
    energy = view(job.scratch + job.column_energy, chunk * size, energy_size, np.float64)
    sums = Sums(
        b,
        view(job.scratch + job.row, b * job.P * per_row, job.P * per_row, np.float64),
        view(scratch, 0, size, kind.stat),
        view(scratch, size, energy_size, kind.stat),
        view(scratch, 2 * size, 4 * jobs.tile_length(job), kind.stat),
    )
    lines.fill(sums.row[start * per_row : stop * per_row], 0.0)
    lines.fill(col, 0.0)
    lines.fill(energy, 0.0)
    quarter = (stop - start) // 4
    for top in range(0, quarter, jobs.TALL // 4):
        lines.fill(sums.col, 0.0)
        lines.fill(sums.energy, 0.0)
        for i in range(top, min(quarter, top + jobs.TALL // 4)):
            for s in range(job.S):
                sum_four(job, start + i, quarter, s, sums, kind)
        lines.add(col, sums.col)
        lines.add(energy, sums.energy)
    if start + 4 * quarter < stop:
        lines.fill(sums.col, 0.0)
        lines.fill(sums.energy, 0.0)
        for p in range(start + 4 * quarter, stop):
            for s in range(job.S):
                sum_one(job, p, s, sums, kind)
        lines.add(col, sums.col)
        lines.add(energy, sums.energy)


@summing
def _four_at(job: Job, start: int, step: int, size: int, kind: Kind) -> Four:
    """Return stretches of four lines of G, the first from a number on."""
    g0, g1 = view(job.g, start, size, kind.g), view(job.g, start + step, size, kind.g)
    return g0, g1, view(job.g, start + 2 * step, size, kind.g), view(job.g, start + 3 * step, size, kind.g)


@summing
def _sum_four(job: Job, p: int, quarter: int, s: int, sums: Sums, kind: Kind) -> None:
    """Sum four lines that lie a quarter of the chunk apart; while they are in the cache, their energy."""
    g, step = sums.b * job.gb + p * job.gp + s * job.gs, quarter * job.gp
    row, r, down = sums.row, p * job.S + s, quarter * job.S
    for q in range(0, job.Q, jobs.WIDTH):
        width = min(jobs.WIDTH, job.Q - q)
        col = view(sums.col.ctypes.data, s * job.Q + q, width, kind.stat)
        t0, t1, t2, t3 = squares.squares_of_four(_four_at(job, g + q, step, width, kind), col)
        row[r] += t0
        row[r + down] += t1
        row[r + 2 * down] += t2
        row[r + 3 * down] += t3
    if len(sums.energy):
        r0 = row_scale_of(job, sums.b, row, r, kind.stat)
        r1 = row_scale_of(job, sums.b, row, r + down, kind.stat)
        r2 = row_scale_of(job, sums.b, row, r + 2 * down, kind.stat)
        r3 = row_scale_of(job, sums.b, row, r + 3 * down, kind.stat)
        energy = view(sums.energy.ctypes.data, s * job.Q, job.Q, kind.stat)
        squares.add_column_energy_of_four(_four_at(job, g, step, job.Q, kind), (r0, r1, r2, r3), energy)


@summing
def _sum_one(job: Job, p: int, s: int, sums: Sums, kind: Kind) -> None:
    """Sum one line, and its energy."""
    g, row, r = sums.b * job.gb + p * job.gp + s * job.gs, sums.row, p * job.S + s
    for q in range(0, job.Q, jobs.WIDTH):
        width = min(jobs.WIDTH, job.Q - q)
        col = view(sums.col.ctypes.data, s * job.Q + q, width, kind.stat)
        row[r] += squares.squares(view(job.g, g + q, width, kind.g), col)
    if len(sums.energy):
        energy = view(sums.energy.ctypes.data, s * job.Q, job.Q, kind.stat)
        scale = row_scale_of(job, sums.b, row, r, kind.stat)
        squares.add_column_energy(view(job.g, g, job.Q, kind.g), scale, energy)


@summing
def _sum_four_in_tiles(job: Job, p: int, quarter: int, s: int, sums: Sums, kind: Kind) -> None:
    """Do the same for lines of short slices: a tile takes the sums of a line's slices, and then their scales."""
    g, step = sums.b * job.gb + p * job.gp + s * job.gs, quarter * job.gp
    line, size = job.Q * job.K, len(sums.tiles) // 4
    tiles = sums.tiles[:size], sums.tiles[size : 2 * size], sums.tiles[2 * size : 3 * size], sums.tiles[3 * size :]
    lines.fill(sums.tiles, 0.0)
    for q in range(0, line, size):
        width = min(size, line - q)
        col = view(sums.col.ctypes.data, s * line + q, width, kind.stat)
        squares.squares_of_four_tiles(_four_at(job, g + q, step, width, kind), col, tiles)
    for i in range(4):
        _from_sums_to_scales(job, p + i * quarter, s, sums, sums.tiles[i * size : (i + 1) * size], kind.stat)
    for q in range(0, line if len(sums.energy) else 0, size):
        width = min(size, line - q)
        energy = view(sums.energy.ctypes.data, s * line + q, width, kind.stat)
        squares.add_column_energy_of_four(_four_at(job, g + q, step, width, kind), tiles, energy)


@summing
def _sum_one_in_tiles(job: Job, p: int, s: int, sums: Sums, kind: Kind) -> None:
    """Do the same for one line of short slices."""
    g, line, size = sums.b * job.gb + p * job.gp + s * job.gs, job.Q * job.K, len(sums.tiles) // 4
    tile = sums.tiles[:size]
    lines.fill(tile, 0.0)
    col = view(sums.col.ctypes.data, s * line, line, kind.stat)
    squares.squares_in_tiles(view(job.g, g, line, kind.g), col, tile)
    _from_sums_to_scales(job, p, s, sums, tile, kind.stat)
    for q in range(0, line if len(sums.energy) else 0, size):
        width = min(size, line - q)
        energy = view(sums.energy.ctypes.data, s * line + q, width, kind.stat)
        squares.add_column_energy(view(job.g, g + q, width, kind.g), tile, energy)


@summing
def _from_sums_to_scales(job: Job, p: int, s: int, sums: Sums, tile: Array, stat: Any) -> None:
    """Add a tile's sums to the rows of a line; if energy is wanted, put their scales into the tile in their place."""
    r = (p * job.S + s) * job.K
    lines.gather_slices(tile, job.K, sums.row, r)
    if len(sums.energy):
        for k in range(job.K):
            tile[k] = row_scale_of(job, sums.b, sums.row, r + k, stat)
        lines.repeat(tile[: job.K], narrow(1.0, stat), tile)


@summing
def moments_of_unfactored(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum U², X², and a number that is finite if all of G² is, over a chunk of an unfactored tensor."""
    _, start, stop = jobs.span(job, chunk)
    u2, x2, seen = 0.0, 0.0, 0.0
    for p in range(start, stop, jobs.WIDTH):
        flat = jobs.flat_at(job, p, min(jobs.WIDTH, stop - p), kind)
        energy, total = squares.energy_of_unfactored(flat, job, kind.stat)
        u2 += energy if np.isfinite(energy) else squares.energy_of_unfactored(flat, job, np.float64)[0]
        seen += total
        if job.measures_x:
            x2 += squares.sum_of_squares(flat.x, kind.stat)
    jobs.set_results(job, chunk, u2, x2, seen, 0.0)
