"""The first pass: R, the column sums of G² and of G²/R, and whether G² is finite. It changes nothing but scratch.

A unit is a run of rows of one matrix. Its program keeps whole rows in registers: row sums give R of these rows, and at
once both column sums, of G² and of G²/R, grow in registers for the whole unit. So G is read once, whatever the cache
does; at its end a unit writes two vectors. ΣU² = mean(R)·Σⱼ(column sum of G²/R)ⱼ/Cⱼ, as soon as C is known.

A row is held in chunks, so that it need not be a power of two long. Rows that no program can hold are read twice.
G² fits its type but a sum of it may not: `shrink`, a power of two, keeps sums in range, exactly.

With RAW, means of G² take the place of R, and there is no ΣU²: that is what the ranks of a sharded step add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import address, blend, decayed, divide, inverse_root, is_stepped, number_at
from adafactor.kernels.triton.rates import TABLES

LINE = tl.constexpr(sizes.LINE)


class Unit(NamedTuple):
    """The rows of a unit, where their numbers are, and the rates of the step."""

    g_ptr: Any
    momentum_ptr: Any
    old_ptr: Any  # R in the state
    new_ptr: Any  # new R
    inverse_ptr: Any  # 1/√R
    partial_ptr: Any  # column sums
    g_stride_p: Any
    g_stride_q: Any
    x_stride_p: Any
    x_stride_q: Any
    old_stride: Any
    m: Any
    first: Any
    end: Any
    row_end: Any  # without R, 0: 1.0 stands for R
    col_end: Any  # without C, 0
    w1: Any
    w2: Any
    beta2: Any
    eps: Any  # ε₁·(1 − β̂₂)
    shrink: Any
    share: Any  # what a shrunk sum of G² counts in R
    unscale: Any


@triton.jit
def load_squares(u, g_ptr, rows, cols, mask, ST: tl.constexpr, OF_GRADIENT: tl.constexpr):
    """Load elements of rows of G; return G², shrunk, and that of which U² is made: the same, or of the average."""
    g = tl.load(g_ptr[:, None] + (cols * u.g_stride_q)[None, :], mask=mask, other=0.0).to(ST)
    square = g * g * u.shrink
    term = square
    if OF_GRADIENT:
        offsets = (rows.to(tl.int64) * u.x_stride_p)[:, None] + (cols * u.x_stride_q)[None, :]
        average = blend(tl.load(u.momentum_ptr + offsets, mask=mask, other=0.0), g * u.unscale, u.w1)
        term = average * average
    return square, term


@triton.jit
def average_rows(u, rows, old, sums, RAW: tl.constexpr):
    """Average R of some rows with the sums of their squares, and store it; return it in double, and 1/R."""
    new = sums * u.share
    inverse = new
    if not RAW:
        new = decayed(old, u.w2, u.beta2) + (new + u.eps)
        inverse = inverse_root(new)
        tl.store(u.inverse_ptr + rows, inverse, mask=rows < u.end)
    tl.store(u.new_ptr + rows, new, mask=rows < u.row_end)
    return tl.where(rows < u.end, new.to(tl.float64), 0.0), inverse * inverse


@triton.jit
def add_rows(a):
    """Sum along the rows of a tile: many of them in double, to keep the digits."""
    if a.shape[0] > 32:
        return tl.sum(a.to(tl.float64), 0).to(a.dtype)
    else:
        return tl.sum(a, 0)


@triton.jit
def store_columns(u, cols, square, energy, OF_GRADIENT: tl.constexpr, RAW: tl.constexpr):
    """Store the unit's sums of some columns; return what they add to its ΣU² without C, and 0 where all are finite."""
    tl.store(u.partial_ptr + cols, square, mask=cols < u.col_end)
    if not RAW:
        if not OF_GRADIENT:
            energy = energy * (u.unscale * u.unscale * divide(1.0, u.shrink))
        tl.store(u.partial_ptr + u.m + cols, energy, mask=cols < u.col_end)
    return tl.where(u.col_end > 0, 0.0, tl.sum(energy, 0)), tl.sum(square * 0.0, 0)


@triton.jit
def hold_rows(
    u,
    ST: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    RAW: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take ROWS whole rows at a time; return the sums of R, of the ΣU² without C, and of the probe."""
    cols, lane, zero = tl.arange(0, CHUNK), tl.arange(0, ROWS), tl.zeros((ROWS, CHUNK), ST)
    squares, energies = (), ()
    for _ in tl.static_range(CHUNKS):
        squares = squares + (zero,)
        energies = energies + (zero,)
    row_sum = tl.zeros((ROWS,), tl.float64)
    first = (u.first + lane).to(tl.int64)
    g_ptr, old_ptr = u.g_ptr + first * u.g_stride_p, u.old_ptr + first * u.old_stride
    old = tl.load(old_ptr, mask=u.first + lane < u.row_end, other=1.0)
    for i in tl.range(u.first, u.end, ROWS, num_stages=STAGES):
        rows = i + lane
        old_ptr += ROWS * u.old_stride
        ahead = tl.load(old_ptr, mask=rows + ROWS < u.row_end, other=1.0)  # off the critical path
        row, terms, new_squares, new_energies = zero, (), (), ()
        for k in tl.static_range(CHUNKS):
            mask = (rows < u.end)[:, None]
            if k == CHUNKS - 1:
                mask = mask & (k * CHUNK + cols < u.m)[None, :]
            square, term = load_squares(u, g_ptr, rows, k * CHUNK + cols, mask, ST, OF_GRADIENT)
            row += square
            terms = terms + (term,)
            new_squares = new_squares + (squares[k] + square,)
        new, inverse = average_rows(u, rows, old, tl.sum(row, 1), RAW)
        row_sum += new
        if not RAW:
            for k in tl.static_range(CHUNKS):
                new_energies = new_energies + (tl.fma(terms[k], zero + inverse[:, None], energies[k]),)
            energies = new_energies
        squares, old = new_squares, ahead
        g_ptr += ROWS * u.g_stride_p
    energy, probe = tl.full((), 0.0, ST), tl.full((), 0.0, ST)
    for k in tl.static_range(CHUNKS):
        e, p = store_columns(u, k * CHUNK + cols, add_rows(squares[k]), add_rows(energies[k]), OF_GRADIENT, RAW)
        energy += e
        probe += p
    return tl.sum(row_sum, 0), energy, probe


@triton.jit
def read_rows_twice(
    u,
    ST: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    RAW: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read G of the unit for R, then once more for the column sums; return the same."""
    lane, cols, zero = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.zeros((ROWS, CHUNK), ST)
    row_sum = tl.zeros((ROWS,), tl.float64)
    for i in range(u.first, u.end, ROWS):
        rows, row = i + lane, zero
        p = rows.to(tl.int64)
        for j in tl.range(0, u.m, CHUNK, num_stages=STAGES):
            mask = (rows < u.end)[:, None] & (j + cols < u.m)[None, :]
            row += load_squares(u, u.g_ptr + p * u.g_stride_p, rows, j + cols, mask, ST, False)[0]
        old = tl.load(u.old_ptr + p * u.old_stride, mask=rows < u.row_end, other=1.0)
        row_sum += average_rows(u, rows, old, tl.sum(row, 1), RAW)[0]
    tl.debug_barrier()  # 1/√R is read below by other threads than wrote it
    energy, probe = tl.full((), 0.0, ST), tl.full((), 0.0, ST)
    for j in range(0, u.m, CHUNK):
        squares, energies = zero, zero
        for i in tl.range(u.first, u.end, ROWS, num_stages=STAGES):
            rows = i + lane
            mask = (rows < u.end)[:, None] & (j + cols < u.m)[None, :]
            g_ptr = u.g_ptr + rows.to(tl.int64) * u.g_stride_p
            square, term = load_squares(u, g_ptr, rows, j + cols, mask, ST, OF_GRADIENT)
            squares += square
            if not RAW:
                inverse = tl.load(u.inverse_ptr + rows, mask=rows < u.end, other=1.0)
                energies = tl.fma(term, zero + (inverse * inverse)[:, None], energies)
        e, p = store_columns(u, j + cols, tl.sum(squares, 0), tl.sum(energies, 0), OF_GRADIENT, RAW)
        energy += e
        probe += p
    return tl.sum(row_sum, 0), energy, probe


@triton.jit
def sum_unfactored(u, eps, full_ptr, ST: tl.constexpr, OF_GRADIENT: tl.constexpr, ROWS: tl.constexpr):
    """Algorithm 5, for a unit of an unfactored tensor: ΣU² and whether G² is finite."""
    energies, probes = tl.zeros((ROWS * LINE,), ST), tl.zeros((ROWS * LINE,), ST)
    for i in range(u.first, u.end, ROWS):
        offsets = (tl.full((), 0, tl.int64) + i) * LINE + tl.arange(0, ROWS * LINE)
        mask = offsets < u.m
        g = tl.load(u.g_ptr + offsets, mask=mask, other=0.0).to(ST) * u.unscale
        square = g * g
        v = decayed(tl.load(full_ptr + offsets, mask=mask, other=1.0), u.w2, u.beta2) + (square + eps) * u.w2
        if OF_GRADIENT:
            g = blend(tl.load(u.momentum_ptr + offsets, mask=mask, other=0.0), g, u.w1)
        update = g * inverse_root(v)
        energies += tl.where(mask, update * update, 0.0)
        probes += square * 0.0
    return tl.full((), 0.0, tl.float64), tl.sum(energies, 0), tl.sum(probes, 0)


@triton.jit(do_not_specialize=["first_unit", "only_ragged"], do_not_specialize_on_alignment=["grad_scale_ptr"])
def first_pass(
    tensors_ptr,
    matrices_ptr,
    units_ptr,
    given_ptr,
    numbers_ptr,
    notes_ptr,
    vectors_ptr,
    inverses_ptr,
    scratch_ptr,
    sums_ptr,
    grad_scale_ptr,
    first_unit,
    only_ragged,
    GT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    RAW: tl.constexpr,
    FACTORED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run a program for each unit: (matrix, first row, end row)."""
    tl.static_assert(TABLES != "")
    unit = tl.program_id(0).to(tl.int64) + first_unit
    matrix_ptr = matrices_ptr + tl.load(units_ptr + 3 * unit).to(tl.int64) * f.MATRIX
    number = tl.load(matrix_ptr + f.OF)
    tensor_ptr, note_ptr = tensors_ptr + number * f.TENSOR, notes_ptr + number * f.NOTES
    if is_stepped(tl.load(given_ptr + number * f.GIVEN + f.G_ADDRESS), only_ragged, ALIGNED):
        first, end = tl.load(units_ptr + 3 * unit + 1), tl.load(units_ptr + 3 * unit + 2)
        m = number_at(tensor_ptr + f.M, ALIGNED)
        x_offset = number_at(matrix_ptr + f.X_OFFSET, ALIGNED)
        has_row, has_col = tl.load(tensor_ptr + f.ROW) != 0, tl.load(tensor_ptr + f.COL) != 0
        col_end = tl.where(has_col, m, 0).to(tl.int32)
        if ALIGNED:
            col_end = tl.multiple_of(col_end, 16)
        new_row, own_unit = tl.load(matrix_ptr + f.NEW_ROW), unit - tl.load(matrix_ptr + f.OWN_UNIT)
        shrink = tl.load(tensor_ptr + f.SHRINK).to(tl.float64, bitcast=True)
        share = (1.0 / (tl.load(tensor_ptr + f.WHOLE_M).to(tl.float64) * shrink)).to(ST)
        unscale = divide(1.0, tl.load(grad_scale_ptr).to(ST))
        w2, eps = tl.load(note_ptr + f.W2).to(ST), tl.full((), 0.0, ST)
        if not RAW:
            eps = tl.load(numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS + rates.EPS1).to(ST)
            if FACTORED:  # without R, 1.0 stands for it and stays
                w2 = tl.where(has_row, w2, 0.0)
            share = share * w2
        u = Unit(
            g_ptr=address(given_ptr + number * f.GIVEN + f.G_ADDRESS, GT, ALIGNED)
            + number_at(matrix_ptr + f.G_OFFSET, ALIGNED),
            momentum_ptr=address(tensor_ptr + f.MOMENTUM, ST, ALIGNED) + x_offset,
            old_ptr=address(tensor_ptr + f.ROW, ST, False) + tl.load(matrix_ptr + f.ROW_OFFSET),
            new_ptr=vectors_ptr + new_row,
            inverse_ptr=inverses_ptr + new_row,
            partial_ptr=scratch_ptr + number_at(matrix_ptr + f.PARTIAL, ALIGNED) + 2 * m * own_unit,
            g_stride_p=number_at(tensor_ptr + f.G_STRIDE_P, ALIGNED),
            g_stride_q=1 if ALIGNED else tl.load(tensor_ptr + f.G_STRIDE_Q).to(tl.int32),
            x_stride_p=number_at(tensor_ptr + f.X_STRIDE_P, ALIGNED),
            x_stride_q=1 if ALIGNED else tl.load(tensor_ptr + f.X_STRIDE_Q).to(tl.int32),
            old_stride=tl.load(tensor_ptr + f.ROW_STRIDE),
            m=m.to(tl.int32) if FACTORED else m,
            first=first,
            end=end,
            row_end=tl.where(has_row, end, 0),
            col_end=col_end,
            w1=tl.load(note_ptr + f.W1).to(ST),
            w2=w2,
            beta2=tl.load(note_ptr + f.BETA2).to(ST),
            eps=eps * w2,
            shrink=shrink.to(ST),
            share=share * unscale * unscale,
            unscale=unscale,
        )
        if not FACTORED:
            full_ptr = address(tensor_ptr + f.FULL, ST, ALIGNED)
            row_sum, energy, probe = sum_unfactored(u, eps, full_ptr, ST, OF_GRADIENT, ROWS)
        elif CHUNKS > 0:
            row_sum, energy, probe = hold_rows(u, ST, OF_GRADIENT, RAW, ROWS, CHUNK, CHUNKS, STAGES)
        else:
            row_sum, energy, probe = read_rows_twice(u, ST, OF_GRADIENT, RAW, ROWS, CHUNK, STAGES)
        tl.store(sums_ptr + unit * f.SUMS + f.ROW_SUM, row_sum)
        tl.store(sums_ptr + unit * f.SUMS + f.ENERGY, energy.to(tl.float64))
        tl.store(sums_ptr + unit * f.SUMS + f.PROBE, probe.to(tl.float64))
