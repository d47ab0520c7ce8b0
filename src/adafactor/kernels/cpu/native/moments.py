"""First walk, over G: row and column sums of G², and what ΣU² needs of G (see `energy`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.cpu.native.elements import array_at, narrow, size_of, summing
from adafactor.kernels.cpu.native.energy import row_scale_of
from adafactor.kernels.cpu.native.job import (
    OF_GRADIENT,
    RESULTS,
    TALL,
    WIDTH,
    energy_in_first_walk,
    span,
    tile_length,
)
from adafactor.kernels.cpu.native.lines import (
    add,
    add_column_energy,
    add_column_energy_of_four,
    energy_of_whole,
    energy_of_whole_in_double,
    fill,
    gather_slices,
    repeat,
    squares,
    squares_in_tiles,
    squares_of_four,
    squares_of_four_tiles,
    sum_of_squares,
)


@summing
def moments_of_lines(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Sum G² of a unit of whole lines (K = 1) over rows and columns.

    Four lines at a time, a quarter of the unit apart; then those that are left over.
    """
    b, start, stop = span(job, unit)
    size = job.S * job.Q
    kept = size if energy_in_first_walk(job) else 0
    row = array_at(job.row + 8 * b * job.P * job.S, job.P * job.S, np.float64)
    sums = array_at(job.partial + 8 * unit * size, size, np.float64)
    energies = array_at(job.column_energy + 8 * unit * size, kept, np.float64)
    fill(row, start * job.S, stop * job.S, 0.0)
    _clear(sums, energies)
    # the thread's own, for TALL rows at a time
    col = array_at(scratch, size, kind.stat)
    energy = array_at(scratch + size * col.itemsize, kept, kind.stat)
    quarter = (stop - start) // 4
    for top in range(0, quarter, TALL // 4):
        _clear(col, energy)
        for i in range(top, min(quarter, top + TALL // 4)):
            _sum_four(job, b, start + i, quarter, row, col, energy, kind)
        add(sums, col)
        add(energies, energy)
    for top in range(start + 4 * quarter, stop, TALL):
        _clear(col, energy)
        for p in range(top, min(stop, top + TALL)):
            _sum_one(job, b, p, row, col, energy, kind)
        add(sums, col)
        add(energies, energy)


@summing
def moments_of_tiles(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Sum G² of a unit of lines that consist of short slices (K > 1) over rows and columns."""
    b, start, stop = span(job, unit)
    size = job.S * job.Q * job.K
    kept = size if energy_in_first_walk(job) else 0
    row = array_at(job.row + 8 * b * job.P * job.S * job.K, job.P * job.S * job.K, np.float64)
    sums = array_at(job.partial + 8 * unit * size, size, np.float64)
    energies = array_at(job.column_energy + 8 * unit * size, kept, np.float64)
    fill(row, start * job.S * job.K, stop * job.S * job.K, 0.0)
    _clear(sums, energies)
    # the thread's own, for TALL rows at a time
    col = array_at(scratch, size, kind.stat)
    energy = array_at(scratch + size * col.itemsize, kept, kind.stat)
    tiles = array_at(scratch + 2 * size * col.itemsize, 4 * tile_length(job), kind.stat)
    quarter = (stop - start) // 4
    for top in range(0, quarter, TALL // 4):
        _clear(col, energy)
        for i in range(top, min(quarter, top + TALL // 4)):
            _sum_four_in_tiles(job, b, start + i, quarter, row, col, energy, tiles, kind)
        add(sums, col)
        add(energies, energy)
    for top in range(start + 4 * quarter, stop, TALL):
        _clear(col, energy)
        for p in range(top, min(stop, top + TALL)):
            _sum_one_in_tiles(job, b, p, row, col, energy, tiles, kind)
        add(sums, col)
        add(energies, energy)


@summing
def _clear(col: Any, energy: Any) -> None:
    """Set the columns' sums and energies to zero."""
    fill(col, 0, len(col), narrow(0.0, col[0]))
    fill(energy, 0, len(energy), narrow(0.0, energy[0]))


@summing
def _sum_four(job: Any, b: int, p: int, quarter: int, row: Any, col: Any, energy: Any, kind: Any) -> None:
    """Sum four lines that lie a quarter of the unit apart; while they are in the cache, their energy."""
    item, down, kept = size_of(kind.g), quarter * job.S, col.itemsize
    step = item * quarter * job.gp
    for s in range(job.S):
        g, r = job.g + item * (b * job.gb + p * job.gp + s * job.gs), p * job.S + s
        for q in range(0, job.Q, WIDTH):
            width, o = min(WIDTH, job.Q - q), g + item * q
            g0, g1 = array_at(o, width, kind.g), array_at(o + step, width, kind.g)
            g2, g3 = array_at(o + 2 * step, width, kind.g), array_at(o + 3 * step, width, kind.g)
            part = array_at(col.ctypes.data + kept * (s * job.Q + q), width, kind.stat)
            t0, t1, t2, t3 = squares_of_four(g0, g1, g2, g3, part)
            row[r] += t0
            row[r + down] += t1
            row[r + 2 * down] += t2
            row[r + 3 * down] += t3
        if len(energy):
            r0, r1 = row_scale_of(job, b, row, r, kind.stat), row_scale_of(job, b, row, r + down, kind.stat)
            r2 = row_scale_of(job, b, row, r + 2 * down, kind.stat)
            r3 = row_scale_of(job, b, row, r + 3 * down, kind.stat)
            g0, g1 = array_at(g, job.Q, kind.g), array_at(g + step, job.Q, kind.g)
            g2, g3 = array_at(g + 2 * step, job.Q, kind.g), array_at(g + 3 * step, job.Q, kind.g)
            part = array_at(energy.ctypes.data + kept * s * job.Q, job.Q, kind.stat)
            add_column_energy_of_four(g0, g1, g2, g3, r0, r1, r2, r3, part)


@summing
def _sum_one(job: Any, b: int, p: int, row: Any, col: Any, energy: Any, kind: Any) -> None:
    """Sum one line, and its energy."""
    for s in range(job.S):
        g = array_at(job.g + size_of(kind.g) * (b * job.gb + p * job.gp + s * job.gs), job.Q, kind.g)
        part, r = array_at(col.ctypes.data + col.itemsize * s * job.Q, job.Q, kind.stat), p * job.S + s
        for q in range(0, job.Q, WIDTH):
            row[r] += squares(g[q : q + WIDTH], part[q : q + WIDTH])
        if len(energy):
            part = array_at(energy.ctypes.data + col.itemsize * s * job.Q, job.Q, kind.stat)
            add_column_energy(g, row_scale_of(job, b, row, r, kind.stat), part)


@summing
def _sum_four_in_tiles(
    job: Any, b: int, p: int, quarter: int, row: Any, col: Any, energy: Any, tiles: Any, kind: Any
) -> None:
    """Do the same for lines of short slices: a tile takes the sums of a line's slices, and then their scales."""
    item, down, line, kept = size_of(kind.g), quarter * job.S * job.K, job.Q * job.K, col.itemsize
    step, size = item * quarter * job.gp, len(tiles) // 4
    t0, t1, t2, t3 = tiles[:size], tiles[size : 2 * size], tiles[2 * size : 3 * size], tiles[3 * size :]
    for s in range(job.S):
        g, r = job.g + item * (b * job.gb + p * job.gp + s * job.gs), (p * job.S + s) * job.K
        fill(tiles, 0, len(tiles), narrow(0.0, kind.stat))
        for q in range(0, line, size):
            width, o = min(size, line - q), g + item * q
            g0, g1 = array_at(o, width, kind.g), array_at(o + step, width, kind.g)
            g2, g3 = array_at(o + 2 * step, width, kind.g), array_at(o + 3 * step, width, kind.g)
            part = array_at(col.ctypes.data + kept * (s * line + q), width, kind.stat)
            squares_of_four_tiles(g0, g1, g2, g3, part, t0, t1, t2, t3)
        for i in range(4):
            tile = tiles[i * size : (i + 1) * size]
            _from_sums_to_scales(job, b, row, r + i * down, tile, len(energy) > 0, kind.stat)
        for q in range(0, line if len(energy) else 0, size):
            width, o = min(size, line - q), g + item * q
            g0, g1 = array_at(o, width, kind.g), array_at(o + step, width, kind.g)
            g2, g3 = array_at(o + 2 * step, width, kind.g), array_at(o + 3 * step, width, kind.g)
            part = array_at(energy.ctypes.data + kept * (s * line + q), width, kind.stat)
            add_column_energy_of_four(g0, g1, g2, g3, t0, t1, t2, t3, part)


@summing
def _sum_one_in_tiles(job: Any, b: int, p: int, row: Any, col: Any, energy: Any, tiles: Any, kind: Any) -> None:
    """Do the same for one line of short slices."""
    line, tile = job.Q * job.K, tiles[: len(tiles) // 4]
    for s in range(job.S):
        g = array_at(job.g + size_of(kind.g) * (b * job.gb + p * job.gp + s * job.gs), line, kind.g)
        part, r = array_at(col.ctypes.data + col.itemsize * s * line, line, kind.stat), (p * job.S + s) * job.K
        fill(tile, 0, len(tile), narrow(0.0, kind.stat))
        squares_in_tiles(g, part, tile)
        _from_sums_to_scales(job, b, row, r, tile, len(energy) > 0, kind.stat)
        if len(energy):
            part = array_at(energy.ctypes.data + col.itemsize * s * line, line, kind.stat)
            for q in range(0, line, len(tile)):
                add_column_energy(g[q : q + len(tile)], tile, part[q : q + len(tile)])


@summing
def _from_sums_to_scales(job: Any, b: int, row: Any, r: int, tile: Any, wanted: bool, stat: Any) -> None:
    """Add a tile's sums to the rows; if wanted, put the rows' scales into the tile in their place."""
    gather_slices(tile, job.K, row, r)
    if wanted:
        for k in range(job.K):
            tile[k] = row_scale_of(job, b, row, r + k, stat)
        repeat(tile, 0, job.K, narrow(1.0, stat), tile)


@summing
def moments_of_whole(job: Any, phase: int, unit: int, scratch: int, kind: Any) -> None:
    """Sum U², X², and a number that is finite if all of G² is, over a unit of an unfactored tensor."""
    _, start, stop = span(job, unit)
    u2, x2, seen = 0.0, 0.0, 0.0
    for p in range(start, stop, WIDTH):
        width = min(WIDTH, stop - p)
        g = array_at(job.g + size_of(kind.g) * p, width, kind.g)
        v = array_at(job.full + size_of(kind.stat) * p, width, kind.stat)
        m = array_at(job.m + v.itemsize * p, width, kind.stat) if job.momentum == OF_GRADIENT else v
        energy, total = energy_of_whole(g, v, m, job)
        u2 += energy if np.isfinite(energy) else energy_of_whole_in_double(g, v, m, job)
        seen += total
        if job.measures_x:
            x2 += sum_of_squares(array_at(job.x + size_of(kind.x) * p, width, kind.x), kind.stat)
    results = array_at(job.units + 8 * RESULTS * unit, RESULTS, np.float64)
    results[0], results[1], results[2] = u2, x2, seen
