"""The kernels of a sharded step, between its passes; `shards.py` says when each is launched and what it leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import inverse_root, total
from adafactor.kernels.triton.fold import add_units, write_scalars
from adafactor.kernels.triton.rates import TABLES

BLOCK = tl.constexpr(sizes.BLOCK)
TERMS = tl.constexpr(sizes.TERMS)


@triton.jit(
    do_not_specialize=["first_block", "block_count", "matrix_count", "first_tensor"],
    do_not_specialize_on_alignment=["grad_scale_ptr"],
)
def means(
    tensors_ptr,
    matrices_ptr,
    blocks_ptr,
    numbers_ptr,
    vectors_ptr,
    wide_ptr,
    scratch_ptr,
    sums_ptr,
    flags_ptr,
    grad_scale_ptr,
    first_block,
    block_count,
    matrix_count,
    first_tensor,
):
    """Run a program for each block of columns, then one for the rows of each matrix, then one for each tensor."""
    tl.static_assert(TABLES != "")
    program = tl.program_id(0).to(tl.int64)
    if program < block_count + matrix_count:
        is_block, block = program < block_count, program + first_block
        place = tl.load(blocks_ptr + 2 * block, mask=is_block, other=0).to(tl.int64)
        matrix_ptr = matrices_ptr + tl.where(is_block, place, program - block_count) * f.MATRIX
        tensor_ptr = tensors_ptr + tl.load(matrix_ptr + f.OF) * f.TENSOR
        n, m = tl.load(tensor_ptr + f.N), tl.load(tensor_ptr + f.M)
        eps = tl.load(numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS + rates.EPS1)
        if is_block:
            rows, scale = tl.load(tensor_ptr + f.WHOLE_N).to(tl.float64), tl.load(grad_scale_ptr).to(tl.float64)
            shrink = tl.load(tensor_ptr + f.SHRINK).to(tl.float64, bitcast=True)
            cols = tl.load(blocks_ptr + 2 * block + 1) + tl.arange(0, BLOCK)
            units = tl.load(matrix_ptr + f.OWN_UNITS).to(tl.int32)
            squares = add_units(scratch_ptr + tl.load(matrix_ptr + f.PARTIAL), units, m, cols)
            mean = squares / (rows * shrink * scale * scale) + eps * n.to(tl.float64) / rows
            tl.store(wide_ptr + tl.load(matrix_ptr + f.NEW_COL) + cols, mean, mask=cols < m)
        else:
            start, whole = tl.load(matrix_ptr + f.NEW_ROW), tl.maximum(tl.load(tensor_ptr + f.WHOLE_M), 1)
            count = tl.where(tl.load(tensor_ptr + f.ROW) != 0, n, 0).to(tl.int32)
            for i in range(0, count, TERMS):
                offsets = i + tl.arange(0, TERMS)
                row = tl.load(vectors_ptr + start + offsets, mask=offsets < count, other=0.0).to(tl.float64)
                row += eps * m.to(tl.float64) / whole.to(tl.float64)
                tl.store(wide_ptr + start + offsets, row, mask=offsets < count)
    else:
        number = program - block_count - matrix_count + first_tensor
        tensor_ptr = tensors_ptr + number * f.TENSOR
        own_ptr, units = sums_ptr + tl.load(tensor_ptr + f.FIRST_UNIT) * f.SUMS, tl.load(tensor_ptr + f.UNITS)
        tl.store(flags_ptr + number, total(own_ptr + f.PROBE, units.to(tl.int32), f.SUMS))


@triton.jit
def average(state_ptr, stride, mean_ptr, new_ptr, inverse_ptr, count, w2, beta2, ST: tl.constexpr):
    """Average a factor with the means of this step; return the sum of what it is now."""
    acc = tl.zeros((TERMS,), tl.float64)
    for i in range(0, count, TERMS):
        offsets = i + tl.arange(0, TERMS)
        mask = offsets < count
        old = tl.load(state_ptr + offsets.to(tl.int64) * stride, mask=mask, other=1.0).to(tl.float64)
        new = old * beta2 + tl.load(mean_ptr + offsets, mask=mask, other=1.0) * w2
        tl.store(new_ptr + offsets, new.to(ST), mask=mask)
        tl.store(inverse_ptr + offsets, inverse_root(new.to(ST)), mask=mask)
        acc += tl.where(mask, new, 0.0)
    return tl.sum(acc, 0)


@triton.jit
def factors(
    tensors_ptr,
    matrices_ptr,
    given_ptr,
    notes_ptr,
    vectors_ptr,
    inverses_ptr,
    wide_ptr,
    means_ptr,
    is_known_ptr,
    ST: tl.constexpr,
):
    """Run a program for each matrix: R and C; mean(R) unless the ranks have found it."""
    tl.static_assert(TABLES != "")
    place = tl.program_id(0).to(tl.int64)
    matrix_ptr = matrices_ptr + place * f.MATRIX
    number = tl.load(matrix_ptr + f.OF)
    tensor_ptr, note_ptr = tensors_ptr + number * f.TENSOR, notes_ptr + number * f.NOTES
    if (tl.load(given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0) & (tl.load(tensor_ptr + f.FULL) == 0):
        w2, beta2 = tl.load(note_ptr + f.W2), tl.load(note_ptr + f.BETA2)
        row, col = tl.load(tensor_ptr + f.ROW), tl.load(tensor_ptr + f.COL)
        n, m = tl.load(tensor_ptr + f.N), tl.load(tensor_ptr + f.M)
        at, known = tl.load(matrix_ptr + f.NEW_ROW), tl.load(means_ptr + place)
        state_ptr = row.to(tl.pointer_type(ST)) + tl.load(matrix_ptr + f.ROW_OFFSET)
        stride, count = tl.load(tensor_ptr + f.ROW_STRIDE), tl.where(row != 0, n, 0).to(tl.int32)
        sum_r = average(state_ptr, stride, wide_ptr + at, vectors_ptr + at, inverses_ptr + at, count, w2, beta2, ST)
        if row == 0:  # 1.0 stands for R
            for i in range(0, n.to(tl.int32), TERMS):
                offsets = i + tl.arange(0, TERMS)
                tl.store(inverses_ptr + at + offsets, tl.full((TERMS,), 1.0, ST), mask=offsets < n)
        at = tl.load(matrix_ptr + f.NEW_COL)
        state_ptr = col.to(tl.pointer_type(ST)) + tl.load(matrix_ptr + f.COL_OFFSET)
        stride, count = tl.load(tensor_ptr + f.COL_STRIDE), tl.where(col != 0, m, 0).to(tl.int32)
        sum_c = average(state_ptr, stride, wide_ptr + at, vectors_ptr + at, inverses_ptr + at, count, w2, beta2, ST)
        own = tl.where(tl.load(tensor_ptr + f.SWAPPED) != 0, sum_c / m.to(tl.float64), sum_r / n.to(tl.float64))
        tl.debug_barrier()  # every thread has read what is written now
        tl.store(means_ptr + place, tl.where(tl.load(is_known_ptr + number) != 0, known, own))


@triton.jit
def totals(tensors_ptr, given_ptr, pairs_ptr, norms_ptr):
    """Run a program for each tensor: ΣU² and ΣX² of what is here."""
    tl.static_assert(TABLES != "")
    number = tl.program_id(0).to(tl.int64)
    if tl.load(given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0:
        tensor_ptr = tensors_ptr + number * f.TENSOR
        own_ptr = pairs_ptr + 2 * tl.load(tensor_ptr + f.FIRST_TILE)
        count = tl.load(tensor_ptr + f.TILES).to(tl.int32)
        tl.store(norms_ptr + 2 * number, total(own_ptr, count, 2))
        tl.store(norms_ptr + 2 * number + 1, total(own_ptr + 1, count, 2))


@triton.jit(do_not_specialize_on_alignment=["found_inf_ptr"])
def conclude(tensors_ptr, given_ptr, numbers_ptr, notes_ptr, norms_ptr, finite_ptr, found_inf_ptr):
    """Run a program for each tensor: its scalars, from sums that all ranks have completed."""
    tl.static_assert(TABLES != "")
    number = tl.program_id(0).to(tl.int64)
    tensor_ptr, note_ptr = tensors_ptr + number * f.TENSOR, notes_ptr + number * f.NOTES
    if tl.load(given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0:
        group_ptr = numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS
        is_finite, found_inf = tl.load(finite_ptr + number) != 0, tl.load(found_inf_ptr) != 0
        u2, x2 = tl.load(norms_ptr + 2 * number), tl.load(norms_ptr + 2 * number + 1)
        write_scalars(tensor_ptr, note_ptr, group_ptr, is_finite, found_inf, x2, u2)
