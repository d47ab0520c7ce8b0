"""Between the passes: C, and ΣU² = mean(R)·Σⱼ(column sum of G²/R)ⱼ/Cⱼ; then the scalars of the step."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import average, total

COLUMNS, TOGETHER = tl.constexpr(32), tl.constexpr(64)  # columns of a program; units that it adds up at a time


@triton.jit
def add_units(column_sums_ptr, units, m, cols):
    """Add up the units' sums of some columns, of G² and of G²/R, in double."""
    squares, ratios = tl.zeros((TOGETHER, COLUMNS), tl.float64), tl.zeros((TOGETHER, COLUMNS), tl.float64)
    for u in range(0, units, TOGETHER):
        unit = u + tl.arange(0, TOGETHER)
        mask = (unit < units)[:, None] & (cols < m)[None, :]
        at = column_sums_ptr + unit.to(tl.int64)[:, None] * 2 * m + cols[None, :]
        squares += tl.load(at, mask=mask, other=0.0)
        ratios += tl.load(at + m, mask=mask, other=0.0)
    return tl.sum(squares, 0), tl.sum(ratios, 0)


@triton.jit(do_not_specialize=["n", "whole_n", "m", "units", "matrices"])
def columns(
    column_sums_ptr, unit_sums_ptr, means_ptr, mean_row_ptr, row_ptr, col_ptr, new_col_ptr, u2_ptr, fields_ptr,
    n, whole_n, m, units, matrices, col_strides, eps1, FOLDS: tl.constexpr, AVERAGES: tl.constexpr,
):  # fmt: skip
    """Fold the units' sums, and average C with them; the grid is matrices × blocks of columns.

    A shard does one after the other (FOLDS, then AVERAGES), and meanwhile the ranks complete what lies in `means` (of
    G² + ε₁) and `mean_row` (of R); what it has of the column sums of G²/R stays beside it.
    """
    blocks = tl.cdiv(m, COLUMNS)
    block, matrix = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    cols = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < m
    at, behind = matrix * m + cols, matrices.to(tl.int64) * m
    if FOLDS:
        square, ratio = add_units(column_sums_ptr + matrix * units * 2 * m, units, m, cols)
        mean, mean_row = (square + eps1 * n) / whole_n, tl.full((), 1.0, tl.float64)
        if row_ptr is not None and col_ptr is not None:
            mean_row = total(unit_sums_ptr + matrix * units * f.SUMS + f.ROW_SUM, units, f.SUMS) / whole_n
        if block == 0:
            tl.store(mean_row_ptr + matrix, mean_row)
        if not AVERAGES:
            tl.store(means_ptr + at, mean, mask=inside)
            tl.store(means_ptr + behind + at, ratio, mask=inside)
    else:
        mean = tl.load(means_ptr + at, mask=inside, other=1.0)
        ratio, mean_row = tl.load(means_ptr + behind + at, mask=inside, other=0.0), tl.load(mean_row_ptr + matrix)
    if AVERAGES:
        if col_ptr is not None:
            old = tl.load(col_ptr + matrix * col_strides.stack + cols * col_strides.row, mask=inside, other=1.0)
            new = average(old.to(tl.float64), mean, tl.load(fields_ptr + f.W2)).to(tl.float32)
            tl.store(new_col_ptr + at, new, mask=inside)
            ratio = ratio / new.to(tl.float64)
        tl.store(u2_ptr + tl.program_id(0), tl.sum(tl.where(inside, ratio, 0.0), 0) * mean_row)


@triton.jit(do_not_specialize=["units", "blocks", "tiles"])
def conclude(
    unit_sums_ptr, u2_ptr, x2_ptr, fields_ptr, step_ptr, units, blocks, tiles, count, eps2, clip,
    RELATIVE: tl.constexpr, BY_ALPHA: tl.constexpr, AFTER: tl.constexpr, SIGN: tl.constexpr, IGNORES: tl.constexpr,
):  # fmt: skip
    """Decide whether the step is taken, and how long it is; one program."""
    rms_u = tl.sqrt(total(u2_ptr, blocks, 1) / count)
    rms_x = tl.sqrt(total(x2_ptr, tiles, 1) / count)
    size = tl.full((), 1.0, tl.float64)
    if RELATIVE:
        size = tl.where(rms_x < eps2, eps2, rms_x)  # a NaN stays one
    alpha, divisor = size * tl.load(fields_ptr + f.RHO), tl.full((), 1.0, tl.float64)
    if clip is not None:
        divisor = tl.where(rms_u / clip < 1.0, 1.0, rms_u / clip)
    taken = tl.abs(total(unit_sums_ptr + f.PROBE, units, f.SUMS)) < float("inf")
    if IGNORES:
        taken = tl.full((), 1, tl.int1)
    decay = tl.load(fields_ptr + f.DECAY) * (size if BY_ALPHA else 1.0)
    t, steps, beta2 = tl.load(step_ptr), tl.load(fields_ptr + f.STEPS), tl.load(fields_ptr + f.BETA2)
    clipped, skipped = tl.load(fields_ptr + f.CLIPPED), tl.load(fields_ptr + f.SKIPPED)
    tl.debug_barrier()  # every thread has read what is written now
    tl.store(fields_ptr + f.TAKEN, tl.where(taken, 1.0, 0.0))
    if taken:
        tl.store(fields_ptr + f.SCALE, (1.0 if AFTER else SIGN * alpha) / divisor)
        tl.store(fields_ptr + f.KEEP, 1.0 - decay)
        tl.store(step_ptr, t + 1.0)
        tl.store(fields_ptr + f.ALPHA, SIGN * alpha)
        tl.store(fields_ptr + f.RMS_X, rms_x)
        tl.store(fields_ptr + f.RMS_U, rms_u)
        tl.store(fields_ptr + f.LAST_BETA2, beta2)
        tl.store(fields_ptr + f.STEPS, steps + 1.0)
        tl.store(fields_ptr + f.CLIPPED, clipped + tl.where(divisor > 1.0, 1.0, 0.0))
    else:
        tl.store(fields_ptr + f.SKIPPED, skipped + 1.0)
