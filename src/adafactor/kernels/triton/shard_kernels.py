"""The kernels of a sharded step, between its walks; `shards.py` says when each is launched and what it leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import address, average, blend, divide, inverse_root, now, total
from adafactor.kernels.triton.fold import newer, settle


@triton.jit(
    do_not_specialize=["first_block", "block_count", "first_matrix", "matrix_count", "first_tensor"],
    do_not_specialize_on_alignment=["grad_scale"],
)
def means(
    tensors,
    matrices,
    blocks,
    given,
    numbers,
    rates,
    notes,
    vectors,
    wide,
    scratch,
    sums,
    flags,
    grad_scale,
    first_block,
    block_count,
    first_matrix,
    matrix_count,
    first_tensor,
    ALIGNED: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for a block of columns, then one for the rows of a matrix, then one for a tensor."""
    program = tl.program_id(0).to(tl.int64)
    if program < block_count:
        block = program + first_block
        matrix = matrices + tl.load(blocks + 2 * block).to(tl.int64) * f.MATRIX
        number = tl.load(matrix + f.OF)
        tensor = tensors + number * f.TENSOR
        if tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0:
            cols = tl.load(blocks + 2 * block + 1) + tl.arange(0, BLOCK)
            m, part = tl.load(tensor + f.M), scratch + tl.load(matrix + f.PARTIAL)
            squares, units = tl.zeros((UNITS, BLOCK), tl.float64), tl.load(matrix + f.OWN_UNITS).to(tl.int32)
            for u in range(0, units, UNITS):
                unit = u + tl.arange(0, UNITS)
                mask = (unit < units)[:, None] & (cols < m)[None, :]
                squares += tl.load(part + 2 * unit.to(tl.int64)[:, None] * m + cols[None, :], mask=mask, other=0.0)
            rows, scale = tl.load(tensor + f.WHOLE_N).to(tl.float64), tl.load(grad_scale).to(tl.float64)
            shrink = tl.load(tensor + f.SHRINK).to(tl.float64, bitcast=True)
            eps = tl.load(numbers + tl.load(tensor + f.GROUP) * f.NUMBERS + f.EPS1)
            here = eps * tl.load(tensor + f.N).to(tl.float64) / rows
            mean = tl.sum(squares, 0) / (rows * shrink * scale * scale) + here
            tl.store(wide + tl.load(matrix + f.NEW_COL) + cols, mean, mask=cols < m)
    elif program < block_count + matrix_count:
        matrix = matrices + (program - block_count + first_matrix) * f.MATRIX
        number = tl.load(matrix + f.OF)
        tensor = tensors + number * f.TENSOR
        n = tl.where(tl.load(tensor + f.ROW) != 0, tl.load(tensor + f.N), 0)
        eps = tl.load(numbers + tl.load(tensor + f.GROUP) * f.NUMBERS + f.EPS1)
        here = eps * tl.load(tensor + f.M).to(tl.float64) / tl.maximum(tl.load(tensor + f.WHOLE_M), 1).to(tl.float64)
        start = tl.load(matrix + f.NEW_ROW)
        for i in range(0, n.to(tl.int32), 1024):
            at = i + tl.arange(0, 1024)
            mean = tl.load(vectors + start + at, mask=at < n, other=0.0).to(tl.float64)
            tl.store(wide + start + at, mean + here, mask=at < n)
    else:
        number = program - block_count - matrix_count + first_tensor
        tensor, note = tensors + number * f.TENSOR, notes + number * f.NOTES
        t, w2, beta2, w1 = now(tensor, number, numbers + tl.load(tensor + f.GROUP) * f.NUMBERS, rates)
        tl.store(note + f.W2, w2)
        tl.store(note + f.BETA2_NOW, beta2)
        tl.store(note + f.W1, w1)
        own, units = sums + tl.load(tensor + f.FIRST_UNIT) * f.SUMS, tl.load(tensor + f.UNITS).to(tl.int32)
        tl.store(flags + number, total(own + f.PROBE, units, f.SUMS, 512))


@triton.jit
def averaged(state, stride, mean, new, count, w2, beta2, ST: tl.constexpr):
    """Average a factor with the means of this step; return the sum of what it is now."""
    acc = tl.zeros((1024,), tl.float64)
    for i in range(0, count, 1024):
        at = i + tl.arange(0, 1024)
        old = tl.load(state + at.to(tl.int64) * stride, mask=at < count, other=0.0).to(tl.float64)
        value = old * beta2 + tl.load(mean + at, mask=at < count, other=0.0) * w2
        tl.store(new + at, value.to(ST), mask=at < count)
        acc += tl.where(at < count, value, 0.0)
    return tl.sum(acc, 0)


@triton.jit
def factors(tensors, matrices, given, notes, vectors, wide, row_means, is_known, ST: tl.constexpr):
    """One program for a matrix: R and C; mean(R) unless the ranks have found it."""
    place = tl.program_id(0).to(tl.int64)
    matrix = matrices + place * f.MATRIX
    number = tl.load(matrix + f.OF)
    tensor = tensors + number * f.TENSOR
    if (tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0) & (tl.load(tensor + f.FULL) == 0):
        note = notes + number * f.NOTES
        w2, beta2 = tl.load(note + f.W2), tl.load(note + f.BETA2_NOW)
        row, col = tl.load(tensor + f.ROW), tl.load(tensor + f.COL)
        n, m = tl.load(tensor + f.N), tl.load(tensor + f.M)
        at_row, at_col = tl.load(matrix + f.NEW_ROW), tl.load(matrix + f.NEW_COL)
        known = tl.load(row_means + place)
        sum_r = averaged(
            row.to(tl.pointer_type(ST)) + tl.load(matrix + f.ROW_OFFSET),
            tl.load(tensor + f.ROW_STRIDE),
            wide + at_row,
            vectors + at_row,
            tl.where(row != 0, n, 0).to(tl.int32),
            w2,
            beta2,
            ST,
        )
        sum_c = averaged(
            col.to(tl.pointer_type(ST)) + tl.load(matrix + f.COL_OFFSET),
            tl.load(tensor + f.COL_STRIDE),
            wide + at_col,
            vectors + at_col,
            tl.where(col != 0, m, 0).to(tl.int32),
            w2,
            beta2,
            ST,
        )
        own = tl.where(tl.load(tensor + f.SWAPPED) != 0, sum_c / m.to(tl.float64), sum_r / n.to(tl.float64))
        tl.debug_barrier()  # every thread has read what is written now
        tl.store(row_means + place, tl.where(tl.load(is_known + number) != 0, known, own))


@triton.jit(do_not_specialize_on_alignment=["grad_scale"])
def energy_walk(
    tensors,
    matrices,
    pieces,
    given,
    numbers,
    notes,
    vectors,
    row_means,
    energies,
    grad_scale,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One program for a piece of the last walk: ΣU² and ΣX²."""
    piece = tl.program_id(0).to(tl.int64)
    place = tl.load(pieces + 3 * piece).to(tl.int64)
    matrix = matrices + place * f.MATRIX
    number = tl.load(matrix + f.OF)
    tensor, note = tensors + number * f.TENSOR, notes + number * f.NOTES
    if tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0:
        first, first_col = tl.load(pieces + 3 * piece + 1), tl.load(pieces + 3 * piece + 2)
        g_offset, x_offset = tl.load(matrix + f.G_OFFSET), tl.load(matrix + f.X_OFFSET)
        n, m = tl.load(tensor + f.N), tl.load(tensor + f.M)
        gp, xp = tl.load(tensor + f.GP), tl.load(tensor + f.XP)
        if ALIGNED:
            g_offset, x_offset = tl.multiple_of(g_offset, 16), tl.multiple_of(x_offset, 16)
            gp, xp, m = tl.multiple_of(gp, 16), tl.multiple_of(xp, 16), tl.multiple_of(m, 16)
        g = address(given, number * f.GIVEN + f.G_ADDRESS, GT, ALIGNED) + g_offset
        x = address(tensor, f.X, DT, ALIGNED) + x_offset
        moments = address(tensor, f.MOMENTUM, ST, ALIGNED) + x_offset
        unscale = divide(1.0, tl.load(grad_scale).to(ST))
        w1, w2 = tl.load(note + f.W1).to(ST), tl.load(note + f.W2).to(ST)
        beta2 = tl.load(note + f.BETA2_NOW).to(ST)
        u2, x2 = tl.zeros((4, 512), ST), tl.zeros((4, 512), ST)
        lane, line = tl.arange(0, 4), tl.arange(0, 512)
        if tl.load(tensor + f.FULL) != 0:
            eps = tl.load(numbers + tl.load(tensor + f.GROUP) * f.NUMBERS + f.EPS1).to(ST)
            state = address(tensor, f.FULL, ST, ALIGNED)
            for i in range(first, tl.minimum(first + 32, n.to(tl.int32)), 4):
                at = (i + lane).to(tl.int64)[:, None] * f.LINE + line[None, :]
                inside = at < m
                a = tl.load(g + at, mask=inside, other=0.0).to(ST) * unscale
                v = average(tl.load(state + at, mask=inside, other=1.0), a * a + eps, w2, beta2)
                if MOMENTUM == 2:
                    a = blend(tl.load(moments + at, mask=inside, other=0.0), a, w1)
                u = a * inverse_root(v)
                w = tl.load(x + at, mask=inside, other=0.0).to(ST) * f.X_UNIT
                u2 += tl.where(inside, u * u, 0.0)
                x2 += w * w
        else:
            gq, xq = tl.load(tensor + f.GQ), tl.load(tensor + f.XQ)
            has_row, has_col = tl.load(tensor + f.ROW) != 0, tl.load(tensor + f.COL) != 0
            row_end, col_end = tl.where(has_row, n, 0), tl.where(has_col, m, 0)
            mean_row = tl.where(has_row & has_col, tl.load(row_means + place), 1.0).to(ST)
            narrow = m <= 128
            height, width = tl.where(narrow, 128, 32), tl.where(narrow, 128, 512)
            cols = first_col + line
            last_col = tl.minimum(m, first_col + width)
            if ALIGNED:
                last_col, col_end = tl.multiple_of(last_col, 16), tl.multiple_of(col_end, 16)
            across_g, across_x = cols.to(tl.int64), cols.to(tl.int64)
            if not ALIGNED:
                across_g, across_x = across_g * gq, across_x * xq
            c = inverse_root(tl.load(vectors + tl.load(matrix + f.NEW_COL) + cols, mask=cols < col_end, other=1.0))
            for i in range(first, tl.minimum(first + height, n.to(tl.int32)), 4):
                rows = (i + lane).to(tl.int64)
                inside = (rows < tl.minimum(first + height, n))[:, None] & (cols < last_col)[None, :]
                r = tl.load(vectors + tl.load(matrix + f.NEW_ROW) + rows, mask=rows < row_end, other=1.0)
                r = inverse_root(divide(r, mean_row))
                a = tl.load(g + rows[:, None] * gp + across_g[None, :], mask=inside, other=0.0).to(ST) * unscale
                at = rows[:, None] * xp + across_x[None, :]
                if MOMENTUM == 2:
                    a = blend(tl.load(moments + at, mask=inside, other=0.0), a, w1)
                u = a * r[:, None] * c[None, :]
                w = tl.load(x + at, mask=inside, other=0.0).to(ST) * f.X_UNIT
                u2 += u * u
                x2 += w * w
        tl.store(energies + 2 * piece, tl.sum(tl.sum(u2, 1), 0).to(tl.float64))
        tl.store(energies + 2 * piece + 1, tl.sum(tl.sum(x2, 1), 0).to(tl.float64))


@triton.jit
def totals(tensors, given, energies, pairs):
    """One program for a tensor: ΣU² and ΣX² of what is here."""
    number = tl.program_id(0).to(tl.int64)
    if tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0:
        tensor = tensors + number * f.TENSOR
        own, count = energies + 2 * tl.load(tensor + f.FIRST_PIECE), tl.load(tensor + f.PIECES).to(tl.int32)
        tl.store(pairs + 2 * number, total(own, count, 2, 512))
        tl.store(pairs + 2 * number + 1, total(own + 1, count, 2, 512) * (1.0 / f.X_UNIT / f.X_UNIT))


@triton.jit(do_not_specialize_on_alignment=["found_inf"])
def conclude(tensors, given, numbers, rates, notes, pairs, finite, found_inf):
    """One program for a tensor: its scalars, from sums that all ranks have completed."""
    number = tl.program_id(0).to(tl.int64)
    tensor, note = tensors + number * f.TENSOR, notes + number * f.NOTES
    if tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0:
        group = numbers + tl.load(tensor + f.GROUP) * f.NUMBERS
        now_ = now(tensor, number, group, rates)
        is_finite, found = tl.load(finite + number) != 0, tl.load(found_inf) != 0
        u2, x2 = tl.load(pairs + 2 * number), tl.load(pairs + 2 * number + 1) * (f.X_UNIT * f.X_UNIT)
        settle(tensor, note, group, rates + number * f.RATES, now_, newer(note), is_finite, found, x2, u2)
