"""First walk: sums of G², and ΣU² as far as it can be had already."""

from __future__ import annotations

from typing import Any

import numpy as np

from adafactor.kernels.native.elements import DOUBLES, at, narrow, summing
from adafactor.kernels.native.job import COLUMN, OF_GRADIENT, TALL, WIDTH, results_of, span, tile_of
from adafactor.kernels.native.lines import (
    add,
    energy_of_whole,
    fill,
    gather_slices,
    heat_of,
    heat_of_four,
    heat_of_four_tiles,
    heat_of_tile,
    repeat,
    squares,
    squares_in_tiles,
    squares_of_four,
    squares_of_four_tiles,
    sum_of_squares,
)


@summing
def sum_lines(job: Any, unit: int, gs: Any, ss: Any, room: Any) -> None:
    """Sums of G² over lines and columns.

    A line's R is known with its sum, so that, while the line is in the cache, Σ(G/√R)² of every column can be had too:
    then C alone is missing for ΣU², and G need not be walked again for it.
    """
    b, start, stop = span(job, unit)
    doubles, size, batch = DOUBLES, job.S * job.Q * job.K, job.S * job.K
    row = at(job.row + 8 * b * job.P * batch, job.P * batch, doubles)
    fill(row, start * batch, stop * batch, 0.0)
    hot = size if job.early else 0
    sums, heats = at(job.partial + 8 * unit * size, size, doubles), at(job.heat + 8 * unit * size, hot, doubles)
    fill(sums, 0, size, 0.0)
    fill(heats, 0, hot, 0.0)
    col, heat, room = room[:size], room[size : size + hot], room[2 * size :]
    tile, quarter = tile_of(job, room), (stop - start) // 4
    for top in range(0, quarter, TALL // 4):
        fill(col, 0, size, narrow(0.0, ss[0]))
        fill(heat, 0, hot, narrow(0.0, ss[0]))
        for i in range(top, min(quarter, top + TALL // 4)):
            if job.K == 1:
                _sum_four(job, b, start + i, quarter, gs, ss, row, col, heat)
            else:
                _sum_four_in_tiles(job, b, start + i, quarter, gs, ss, row, col, heat, room)
        add(sums, col)
        add(heats, heat)
    for top in range(start + 4 * quarter, stop, TALL):
        fill(col, 0, size, narrow(0.0, ss[0]))
        fill(heat, 0, hot, narrow(0.0, ss[0]))
        for p in range(top, min(stop, top + TALL)):
            _sum_one(job, b, p, gs, ss, row, col, heat, tile)
        add(sums, col)
        add(heats, heat)


@summing
def _sum_four(job: Any, b: int, p: int, quarter: int, gs: Any, ss: Any, row: Any, col: Any, heat: Any) -> None:
    step, down = gs.itemsize * quarter * job.gp, quarter * job.S
    for s in range(job.S):
        g, r = job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), p * job.S + s
        for q in range(0, job.Q, WIDTH):
            width, o = min(WIDTH, job.Q - q), g + gs.itemsize * q
            g0, g1 = at(o, width, gs), at(o + step, width, gs)
            g2, g3 = at(o + 2 * step, width, gs), at(o + 3 * step, width, gs)
            part = at(col.ctypes.data + ss.itemsize * (s * job.Q + q), width, ss)
            t0, t1, t2, t3 = squares_of_four(g0, g1, g2, g3, part)
            row[r] += t0
            row[r + down] += t1
            row[r + 2 * down] += t2
            row[r + 3 * down] += t3
        if job.early:
            r0, r1 = scale_of(job, b, row, r, ss), scale_of(job, b, row, r + down, ss)
            r2, r3 = scale_of(job, b, row, r + 2 * down, ss), scale_of(job, b, row, r + 3 * down, ss)
            g0, g1 = at(g, job.Q, gs), at(g + step, job.Q, gs)
            g2, g3 = at(g + 2 * step, job.Q, gs), at(g + 3 * step, job.Q, gs)
            heat_of_four(g0, g1, g2, g3, r0, r1, r2, r3, at(heat.ctypes.data + ss.itemsize * s * job.Q, job.Q, ss))


@summing
def _sum_four_in_tiles(
    job: Any, b: int, p: int, quarter: int, gs: Any, ss: Any, row: Any, col: Any, heat: Any, room: Any
) -> None:
    """The same for lines of short batch slices, whose sums are taken in tiles of them."""
    step, down, line = gs.itemsize * quarter * job.gp, quarter * job.S * job.K, job.Q * job.K
    size = len(tile_of(job, room))
    t0, t1, t2, t3 = room[:size], room[size : 2 * size], room[2 * size : 3 * size], room[3 * size : 4 * size]
    for s in range(job.S):
        g, r = job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), (p * job.S + s) * job.K
        fill(room, 0, 4 * size, narrow(0.0, ss[0]))
        for q in range(0, line, size):
            width, o = min(size, line - q), g + gs.itemsize * q
            g0, g1 = at(o, width, gs), at(o + step, width, gs)
            g2, g3 = at(o + 2 * step, width, gs), at(o + 3 * step, width, gs)
            part = at(col.ctypes.data + ss.itemsize * (s * line + q), width, ss)
            squares_of_four_tiles(g0, g1, g2, g3, part, t0, t1, t2, t3)
        for i in range(4):
            tile = room[i * size : (i + 1) * size]
            gather_slices(tile, job.K, row, r + i * down)
            if job.early:
                for k in range(job.K):
                    tile[k] = scale_of(job, b, row, r + i * down + k, ss)
                repeat(tile, 0, job.K, narrow(1.0, ss[0]), tile)
        for q in range(0, line if job.early else 0, size):
            width, o = min(size, line - q), g + gs.itemsize * q
            g0, g1 = at(o, width, gs), at(o + step, width, gs)
            g2, g3 = at(o + 2 * step, width, gs), at(o + 3 * step, width, gs)
            heat_of_four_tiles(
                g0, g1, g2, g3, t0, t1, t2, t3, at(heat.ctypes.data + ss.itemsize * (s * line + q), width, ss)
            )


@summing
def _sum_one(job: Any, b: int, p: int, gs: Any, ss: Any, row: Any, col: Any, heat: Any, tile: Any) -> None:
    line = job.Q * job.K
    for s in range(job.S):
        g = at(job.g + gs.itemsize * (b * job.gb + p * job.gp + s * job.gs), line, gs)
        part, r = at(col.ctypes.data + ss.itemsize * s * line, line, ss), (p * job.S + s) * job.K
        if job.K == 1:
            for q in range(0, line, WIDTH):
                row[r] += squares(g[q : q + WIDTH], part[q : q + WIDTH])
        else:
            fill(tile, 0, len(tile), narrow(0.0, ss[0]))
            squares_in_tiles(g, part, tile)
            gather_slices(tile, job.K, row, r)
        if job.early:
            part = at(heat.ctypes.data + ss.itemsize * s * line, line, ss)
            if job.K == 1:
                heat_of(g, scale_of(job, b, row, r, ss), part)
            else:
                for k in range(job.K):
                    tile[k] = scale_of(job, b, row, r + k, ss)
                repeat(tile, 0, job.K, narrow(1.0, ss[0]), tile)
                for q in range(0, line, len(tile)):
                    heat_of_tile(g[q : q + len(tile)], tile, part[q : q + len(tile)])


@summing
def scale_of(job: Any, b: int, row: Any, r: int, ss: Any) -> Any:
    """1/√R as R will be, given the sum of its line."""
    if job.estimator == COLUMN:
        return narrow(1.0, ss[0])
    old = at(job.row_state + ss.itemsize * (b * job.P * job.S * job.K + r), 1, ss)[0]
    new = old + job.w2 * ((row[r] + job.Q * job.eps) / job.n_cols - old)
    return narrow(1.0 / np.sqrt(new), ss[0])


@summing
def measure_whole(job: Any, unit: int, xs: Any, gs: Any, ss: Any) -> None:
    """ΣU², ΣX² and a sum that tells whether all is finite, of a unit of what is kept whole."""
    _, start, stop = span(job, unit)
    w1, w2, eps = narrow(job.w1, ss[0]), narrow(job.w2, ss[0]), narrow(job.eps, ss[0])
    averaged, u2, x2, seen = job.momentum == OF_GRADIENT, 0.0, 0.0, 0.0
    for p in range(start, stop, WIDTH):
        width = min(WIDTH, stop - p)
        g, v = at(job.g + gs.itemsize * p, width, gs), at(job.v + ss.itemsize * p, width, ss)
        m = at(job.m + ss.itemsize * p, width, ss) if averaged else v
        energy, total = energy_of_whole(g, v, m, averaged, w1, w2, eps)
        u2 += energy
        seen += total
        if job.measures:
            x2 += sum_of_squares(at(job.x + xs.itemsize * p, width, xs), ss)
    results = results_of(job)
    results[3 * unit], results[3 * unit + 1], results[3 * unit + 2] = u2, x2, seen
