"""First pass, over G: row and column sums of G², and what ΣU² needs of G (see `energy`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adafactor.kernels.cpu.native import jobs, lines, momentum, squares
from adafactor.kernels.cpu.native.compiling import as_written, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.energy import row_scale_of
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view
from adafactor.kernels.cpu.native.jobs import Job, Stretch
from adafactor.kernels.cpu.native.squares import Four


@summing
def moments_of_lines(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum G² of a chunk of whole lines (K = 1) over rows and columns."""
    _sum_chunk(job, chunk, scratch, _sum_four, kind)


@summing
def moments_of_tiles(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum G² of a chunk of lines that consist of short slices (K > 1) over rows and columns."""
    _sum_chunk(job, chunk, scratch, _sum_four_in_tiles, kind)


class Sums(NamedTuple):
    """Where a chunk of G² is summed: its rows in double, and in the thread's own memory columns, energies and tiles."""

    b: int
    stop: int  # the P after the chunk's last
    row: Array
    col: Array
    energy: Array  # empty if it is not wanted
    tiles: Array
    zeros: Array  # a line, in place of one beyond the chunk


@summing
def _sum_chunk(job: Job, chunk: int, scratch: int, sum_four: Callable[..., None], kind: Kind) -> None:
    """Sum a chunk, four lines at a time, a quarter of the chunk apart. Of the last ones some may be missing.

    The thread's own columns are of TALL rows at a time.
    """
    b, start, stop = jobs.span(job, chunk)
    per_row, line, size = job.S * job.K, job.Q * job.K, job.S * job.Q * job.K
    energy_size = size if jobs.energy_in_first_pass(job) else 0
    col = view(job.scratch + job.partial, chunk * size, size, np.float64)
    energy = view(job.scratch + job.column_energy, chunk * size, energy_size, np.float64)
    zeros = view(scratch, 2 * size + 4 * job.tile, line if (stop - start) % 4 else 0, np.float64)
    sums = Sums(
        b,
        stop,
        view(job.scratch + job.row, b * job.P * per_row, job.P * per_row, np.float64),
        view(scratch, 0, size, kind.stat),
        view(scratch, size, energy_size, kind.stat),
        view(scratch, 2 * size, 4 * job.tile, kind.stat),
        zeros,
    )
    lines.fill(sums.row[start * per_row : stop * per_row], 0.0)
    lines.fill(col, 0.0)
    lines.fill(energy, 0.0)
    lines.fill(zeros, 0.0)
    quarter = (stop - start + 3) // 4
    for top in range(0, quarter, jobs.TALL // 4):
        lines.fill(sums.col, 0.0)
        lines.fill(sums.energy, 0.0)
        for i in range(top, min(quarter, top + jobs.TALL // 4)):
            for s in range(job.S):
                sum_four(job, start + i, quarter, s, sums, kind)
        lines.add(col, sums.col)
        lines.add(energy, sums.energy)


class Source(NamedTuple):
    """Where a line of G is, its address, and which row it belongs to: if it is missing, to the first of the four."""

    g: int
    row: int


Sources = tuple[Source, Source, Source, Source]


@summing
def _source(job: Job, first: int, p: int, s: int, sums: Sums, kind: Kind) -> Source:
    """Return the line at p and s, or zeros in its place."""
    if p >= sums.stop:
        return Source(sums.zeros.ctypes.data, first * job.S + s)
    g = view(job.g, sums.b * job.gb + p * job.gp + s * job.gs, 1, kind.g)
    return Source(g.ctypes.data, p * job.S + s)


@summing
def _sources(job: Job, p: int, quarter: int, s: int, sums: Sums, kind: Kind) -> Sources:
    """Return four lines that lie a quarter of the chunk apart."""
    line0, line1 = _source(job, p, p, s, sums, kind), _source(job, p, p + quarter, s, sums, kind)
    line2 = _source(job, p, p + 2 * quarter, s, sums, kind)
    return line0, line1, line2, _source(job, p, p + 3 * quarter, s, sums, kind)


@summing
def _four_at(of: Sources, start: int, size: int, kind: Kind) -> Four:
    """Return stretches of four lines of G, from a number on."""
    g0, g1 = view(of[0].g, start, size, kind.g), view(of[1].g, start, size, kind.g)
    return g0, g1, view(of[2].g, start, size, kind.g), view(of[3].g, start, size, kind.g)


@summing
def _sum_four(job: Job, p: int, quarter: int, s: int, sums: Sums, kind: Kind) -> None:
    """Sum four lines; while they are in the cache, their energy."""
    of, row = _sources(job, p, quarter, s, sums, kind), sums.row
    for q in range(0, job.Q, jobs.WIDTH):
        width = min(jobs.WIDTH, job.Q - q)
        col = view(sums.col.ctypes.data, s * job.Q + q, width, kind.stat)
        t0, t1, t2, t3 = squares.squares_of_four(_four_at(of, q, width, kind), col)
        row[of[0].row] += t0
        row[of[1].row] += t1
        row[of[2].row] += t2
        row[of[3].row] += t3
    if len(sums.energy):
        r0 = row_scale_of(job, sums.b, row, of[0].row, kind.stat)
        r1 = row_scale_of(job, sums.b, row, of[1].row, kind.stat)
        r2 = row_scale_of(job, sums.b, row, of[2].row, kind.stat)
        r3 = row_scale_of(job, sums.b, row, of[3].row, kind.stat)
        energy = view(sums.energy.ctypes.data, s * job.Q, job.Q, kind.stat)
        squares.add_column_energy_of_four(_four_at(of, 0, job.Q, kind), (r0, r1, r2, r3), energy)


@summing
def _sum_four_in_tiles(job: Job, p: int, quarter: int, s: int, sums: Sums, kind: Kind) -> None:
    """Do the same for lines of short slices: a tile takes the sums of a line's slices, and then their scales."""
    of, line, size = _sources(job, p, quarter, s, sums, kind), job.Q * job.K, len(sums.tiles) // 4
    tiles = sums.tiles[:size], sums.tiles[size : 2 * size], sums.tiles[2 * size : 3 * size], sums.tiles[3 * size :]
    lines.fill(sums.tiles, 0.0)
    for q in range(0, line, size):
        width = min(size, line - q)
        col = view(sums.col.ctypes.data, s * line + q, width, kind.stat)
        squares.squares_of_four_tiles(_four_at(of, q, width, kind), col, tiles)
    for i in range(4):
        _from_sums_to_scales(job, of[i].row * job.K, sums, sums.tiles[i * size : (i + 1) * size], kind.stat)
    for q in range(0, line if len(sums.energy) else 0, size):
        width = min(size, line - q)
        energy = view(sums.energy.ctypes.data, s * line + q, width, kind.stat)
        squares.add_column_energy_of_four(_four_at(of, q, width, kind), tiles, energy)


@summing
def _from_sums_to_scales(job: Job, r: int, sums: Sums, tile: Array, stat: Any) -> None:
    """Add a tile's sums to the rows of a line; if energy is wanted, put their scales into the tile in their place."""
    lines.gather_slices(tile, job.K, sums.row, r)
    if len(sums.energy):
        for k in range(job.K):
            tile[k] = row_scale_of(job, sums.b, sums.row, r + k, stat)
        lines.repeat(tile[: job.K], narrow(1.0, stat), tile)


@summing
def moments_of_unfactored(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Sum U², X², and a number that is finite if all of G² is, over a chunk of an unfactored tensor.

    A momentum of the gradient in int8 is read block by block.
    """
    _, i, stop = jobs.span(job, chunk)
    in_blocks = job.momentum == jobs.OF_GRADIENT and job.momentum_format == jobs.INT8
    u2, x2, seen = 0.0, 0.0, 0.0
    while i < stop:
        width = min(jobs.next_block(job, i + 1) - i if in_blocks else jobs.WIDTH, stop - i)
        energy, square, total = sums_of_unfactored(job, jobs.flat_at(job, i, width, kind), scratch, kind)
        u2 += energy
        x2 += square
        seen += total
        i += width
    jobs.set_results(job, chunk, u2, x2, seen, 0.0)


@as_written  # as LLVM may reorder sums, energy − energy is 0 to it even where energy is not finite
def sums_of_unfactored(job: Job, part: Stretch, scratch: int, kind: Kind) -> tuple[float, float, float]:
    """Return these sums of a stretch; U² is summed in double where float32 has no room for it."""
    m = momentum.load(job, part, part.m, view(scratch, 0, len(part.g), kind.stat))
    energy, seen = squares.energy_of_unfactored(part, m, job, kind.stat)
    u2 = energy if np.isfinite(energy) else squares.energy_of_unfactored(part, m, job, np.float64)[0]
    return u2, squares.sum_of_squares(part.x, kind.stat) if job.measures_x else 0.0, seen
