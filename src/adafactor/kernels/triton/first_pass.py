"""The first pass reads G: R, the column sums of G² and of G²/R, and whether G² is finite. It writes scratch only.

A program has a unit of rows of one matrix, and keeps ROWS whole rows at a time in registers, in CHUNKS pieces of CHUNK
columns. So R of a row is known as soon as the row is there, and both column sums grow in registers; at its end the
program writes two vectors of m numbers. G is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton.elements import average, load
from adafactor.kernels.triton.fields import PROBE, ROW_SUM, SUMS, W2


@triton.jit(do_not_specialize=["n", "unit"])
def first_pass(
    g_ptr, column_sums_ptr, row_ptr, new_row_ptr, unit_sums_ptr, fields_ptr,
    n, m, unit, g_strides, row_strides, eps1,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take the rows of a unit; the grid is (matrices of the stack, units)."""
    matrix, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * unit
    place, end = matrix * tl.num_programs(1) + tl.program_id(1), tl.minimum(first + unit, n)
    w2 = tl.load(fields_ptr + W2).to(tl.float32)
    lane, cols = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    zero = tl.zeros((ROWS, CHUNK), tl.float32)
    squares, ratios = (), ()
    for _ in tl.static_range(CHUNKS):
        squares, ratios = squares + (zero,), ratios + (zero,)
    row_sum, probe = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    for i in tl.range(first, end, ROWS, num_stages=STAGES):
        rows = (i + lane).to(tl.int64)
        inside = rows < end
        line_ptr = g_ptr + matrix * g_strides.stack + (rows * g_strides.row)[:, None] + (cols * g_strides.col)[None, :]
        g2, sum_of_row = (), zero
        for k in tl.static_range(CHUNKS):
            g = load(line_ptr + k * CHUNK * g_strides.col, inside[:, None] & (cols + k * CHUNK < m)[None, :])
            g2, sum_of_row = g2 + (g * g,), tl.fma(g, g, sum_of_row)
        mean = tl.sum(sum_of_row, 1) / m + eps1
        new = tl.full((ROWS,), 1.0, tl.float32)
        if row_ptr is not None:
            old = tl.load(row_ptr + matrix * row_strides.stack + rows * row_strides.row, mask=inside, other=1.0)
            new = average(old, mean, w2)
            tl.store(new_row_ptr + matrix * n + rows, new, mask=inside)
        row_sum += tl.where(inside, new, 0.0).to(tl.float64)
        probe += tl.where(inside, mean, 0.0).to(tl.float64)
        inverse = (1.0 / new)[:, None] + zero
        more_squares, more_ratios = (), ()
        for k in tl.static_range(CHUNKS):
            more_squares = more_squares + (squares[k] + g2[k],)
            more_ratios = more_ratios + (tl.fma(g2[k], inverse, ratios[k]),)
        squares, ratios = more_squares, more_ratios
    for k in tl.static_range(CHUNKS):
        at = cols + k * CHUNK
        tl.store(column_sums_ptr + place * 2 * m + at, tl.sum(squares[k], 0), mask=at < m)
        tl.store(column_sums_ptr + place * 2 * m + m + at, tl.sum(ratios[k], 0), mask=at < m)
    tl.store(unit_sums_ptr + place * SUMS + ROW_SUM, tl.sum(row_sum, 0))
    tl.store(unit_sums_ptr + place * SUMS + PROBE, tl.sum(probe, 0))
