"""Between the passes: C and its share of ΣU² for every block of columns; the scalars of every tensor.

Nothing is changed but scratch and notes: new C lies beside new R until the last pass takes both into the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import address, at_least, inverse_root, number_at, total
from adafactor.kernels.triton.rates import TABLES

BLOCK = tl.constexpr(sizes.BLOCK)
GROUP = tl.constexpr(16)  # units whose column sums are added up at once


@triton.jit
def add_units(part_ptr, units, m, cols):
    """Add up the units' sums of some columns, in double."""
    acc = tl.zeros((GROUP, BLOCK), tl.float64)
    for u in range(0, units, GROUP):
        unit = u + tl.arange(0, GROUP)
        mask = (unit < units)[:, None] & (cols < m)[None, :]
        acc += tl.load(part_ptr + 2 * unit.to(tl.int64)[:, None] * m + cols[None, :], mask=mask, other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def fold_columns(
    matrix_ptr,
    tensor_ptr,
    note_ptr,
    group_ptr,
    vectors_ptr,
    inverses_ptr,
    scratch_ptr,
    sums_ptr,
    grad_scale_ptr,
    cols,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Make C of a block of columns; return mean(R), and ΣU² of these columns."""
    m, units = number_at(tensor_ptr + f.M, ALIGNED), tl.load(matrix_ptr + f.OWN_UNITS).to(tl.int32)
    part_ptr = scratch_ptr + number_at(matrix_ptr + f.PARTIAL, ALIGNED)
    w2, beta2 = tl.load(note_ptr + f.W2), tl.load(note_ptr + f.BETA2)
    n = tl.load(tensor_ptr + f.WHOLE_N).to(tl.float64)
    shrink, scale = tl.load(tensor_ptr + f.SHRINK).to(tl.float64, bitcast=True), tl.load(grad_scale_ptr).to(tl.float64)
    mean = add_units(part_ptr, units, m, cols) / (n * shrink * scale * scale) + tl.load(group_ptr + rates.EPS1)
    state_ptr = address(tensor_ptr + f.COL, ST, False) + tl.load(matrix_ptr + f.COL_OFFSET)
    stride, new_col = tl.load(tensor_ptr + f.COL_STRIDE), tl.load(matrix_ptr + f.NEW_COL)
    old = tl.load(state_ptr + cols.to(tl.int64) * stride, mask=cols < m, other=1.0)
    new = (old.to(tl.float64) * beta2 + mean * w2).to(ST)
    tl.store(vectors_ptr + new_col + cols, new, mask=cols < m)
    tl.store(inverses_ptr + new_col + cols, inverse_root(new), mask=cols < m)
    mean_row = tl.full((), 1.0, tl.float64)
    if tl.load(tensor_ptr + f.ROW) != 0:
        mean_row = total(sums_ptr + tl.load(matrix_ptr + f.OWN_UNIT) * f.SUMS + f.ROW_SUM, units, f.SUMS) / n
        if tl.load(tensor_ptr + f.SWAPPED) != 0:  # new C has the mean of new R, but for what was there before
            row_ptr = address(tensor_ptr + f.ROW, ST, False) + tl.load(matrix_ptr + f.ROW_OFFSET)
            old_row = total(row_ptr, n.to(tl.int32), tl.load(tensor_ptr + f.ROW_STRIDE)) / n
            mean_row += beta2 * (total(state_ptr, m.to(tl.int32), stride) / m.to(tl.float64) - old_row)
    energy = tl.where(cols < m, add_units(part_ptr + m, units, m, cols) / new.to(tl.float64), 0.0)
    return mean_row, tl.sum(energy, 0) * mean_row


@triton.jit
def write_scalars(tensor_ptr, note_ptr, group_ptr, is_finite, found_inf, x2, u2):
    """Note whether the step is taken, and how long it is but for clipping, which begins the last pass."""
    rms_x = tl.sqrt(x2 / tl.load(tensor_ptr + f.COUNT).to(tl.float64))
    size = tl.where(tl.load(group_ptr + rates.RELATIVE) != 0, at_least(tl.load(group_ptr + rates.EPS2), rms_x), 1.0)
    taken = is_finite | (tl.load(group_ptr + rates.IGNORE) != 0)
    tl.store(note_ptr + f.TAKEN, tl.where(found_inf, -1.0, tl.where(taken, 1.0, 0.0)))
    tl.store(note_ptr + f.ALPHA, size * tl.load(note_ptr + f.RHO) * tl.load(group_ptr + rates.SIGN))
    tl.store(note_ptr + f.X2, x2)
    tl.store(note_ptr + f.U2, u2)


@triton.jit(
    do_not_specialize=["first_block", "block_count", "first_tensor"],
    do_not_specialize_on_alignment=["grad_scale_ptr", "found_inf_ptr"],
)
def fold(
    tensors_ptr,
    matrices_ptr,
    blocks_ptr,
    given_ptr,
    numbers_ptr,
    notes_ptr,
    vectors_ptr,
    inverses_ptr,
    scratch_ptr,
    sums_ptr,
    energies_ptr,
    means_ptr,
    squares_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    first_block,
    block_count,
    first_tensor,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Run a program for each block of columns, then one for each tensor."""
    tl.static_assert(TABLES != "")
    program = tl.program_id(0).to(tl.int64)
    block, number = program + first_block, program - block_count + first_tensor
    if program < block_count:
        place = tl.load(blocks_ptr + 2 * block).to(tl.int64)
        matrix_ptr = matrices_ptr + place * f.MATRIX
        number = tl.load(matrix_ptr + f.OF)
        tensor_ptr, note_ptr = tensors_ptr + number * f.TENSOR, notes_ptr + number * f.NOTES
        if tl.load(given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0:
            group_ptr = numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS
            first = tl.load(blocks_ptr + 2 * block + 1)
            mean_row, energy = fold_columns(
                matrix_ptr, tensor_ptr, note_ptr, group_ptr, vectors_ptr, inverses_ptr, scratch_ptr, sums_ptr,
                grad_scale_ptr, first + tl.arange(0, BLOCK), ST, ALIGNED,
            )  # fmt: skip
            tl.store(means_ptr + place, mean_row, mask=first == 0)
            tl.store(energies_ptr + block, energy)
    elif tl.load(given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0:
        tensor_ptr, note_ptr = tensors_ptr + number * f.TENSOR, notes_ptr + number * f.NOTES
        group_ptr = numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS
        own_ptr, units = sums_ptr + tl.load(tensor_ptr + f.FIRST_UNIT) * f.SUMS, tl.load(tensor_ptr + f.UNITS)
        u2 = total(own_ptr + f.ENERGY, units.to(tl.int32), f.SUMS)
        is_finite = total(own_ptr + f.PROBE, units.to(tl.int32), f.SUMS) == 0
        x2 = total(squares_ptr + tl.load(tensor_ptr + f.FIRST_TILE), tl.load(tensor_ptr + f.TILES).to(tl.int32), 1)
        write_scalars(tensor_ptr, note_ptr, group_ptr, is_finite, tl.load(found_inf_ptr) != 0, x2, u2)
