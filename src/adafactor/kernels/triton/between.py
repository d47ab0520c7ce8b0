"""Between the passes: C and its share of ΣU² for every block of columns; the scalars of every tensor.

Nothing is changed but scratch and notes: new C lies beside new R until the last pass takes both into the state. With
RAW, for shards, `fold` leaves only column means of G² + ε₁, and whether G² is finite; `shards.py` says when the other
kernels here are launched and what they leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import TERMS, at_least, inverse_root, number_at, total
from adafactor.kernels.triton.matrix import group_of, look_up

BLOCK = tl.constexpr(sizes.BLOCK)
TOGETHER = tl.constexpr(16)  # units whose column sums are added up at once


@triton.jit
def add_units(part_ptr, units, m, cols):
    """Add up the units' sums of some columns, in double."""
    acc = tl.zeros((TOGETHER, BLOCK), tl.float64)
    for u in range(0, units, TOGETHER):
        unit = u + tl.arange(0, TOGETHER)
        mask = (unit < units)[:, None] & (cols < m)[None, :]
        acc += tl.load(part_ptr + 2 * unit.to(tl.int64)[:, None] * m + cols[None, :], mask=mask, other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def mean_of_rows(memory, x, units, beta2):
    """Return mean(R), or the mean of C where V̂ is divided by that."""
    n, m = tl.load(x.tensor_ptr + f.WHOLE_N).to(tl.float64), x.m.to(tl.float64)
    mean_row = tl.full((), 1.0, tl.float64)
    if x.row.end > 0:
        own_ptr = memory.sums_ptr + tl.load(x.matrix_ptr + f.OWN_UNIT) * f.SUMS
        mean_row = total(own_ptr + f.ROW_SUM, units, f.SUMS) / n
        if tl.load(x.tensor_ptr + f.SWAPPED) != 0:  # new C has the mean of new R, but for what was there before
            old_row = total(x.row.state_ptr, x.n, x.row.stride) / n
            mean_row += beta2 * (total(x.col.state_ptr, x.m.to(tl.int32), x.col.stride) / m - old_row)
    return mean_row


@triton.jit
def fold_columns(memory, x, block, first, KIND: tl.constexpr, RAW: tl.constexpr):
    """Make C of a block of columns, and its share of ΣU²."""
    cols, n = first + tl.arange(0, BLOCK), tl.load(x.tensor_ptr + f.WHOLE_N).to(tl.float64)
    units = tl.load(x.matrix_ptr + f.OWN_UNITS).to(tl.int32)
    partials = units // tl.load(x.tensor_ptr + f.PARTS).to(tl.int32)
    part_ptr = memory.scratch_ptr + number_at(x.matrix_ptr + f.PARTIAL, KIND)
    shrink, scale = tl.load(x.tensor_ptr + f.SHRINK).to(tl.float64, bitcast=True), tl.load(memory.scaling_ptr)
    mean = add_units(part_ptr, partials, x.m, cols) / (n * shrink * scale.to(tl.float64) * scale.to(tl.float64))
    eps = tl.load(x.group_ptr + rates.EPS1)
    if RAW:
        tl.store(x.col.wide_ptr + cols, mean + eps * x.n.to(tl.float64) / n, mask=cols < x.m)
    else:
        w2, beta2 = tl.load(x.note_ptr + f.W2), tl.load(x.note_ptr + f.BETA2)
        old = tl.load(x.col.state_ptr + cols.to(tl.int64) * x.col.stride, mask=cols < x.m, other=1.0)
        new = (old.to(tl.float64) * beta2 + (mean + eps) * w2).to(KIND.STAT)
        tl.store(x.col.new_ptr + cols, new, mask=cols < x.m)
        tl.store(x.col.inverse_ptr + cols, inverse_root(new), mask=cols < x.m)
        mean_row = mean_of_rows(memory, x, units, beta2)
        energy = tl.where(cols < x.m, add_units(part_ptr + x.m, partials, x.m, cols) / new.to(tl.float64), 0.0)
        tl.store(x.mean_ptr, mean_row, mask=first == 0)
        tl.store(memory.energies_ptr + block, tl.sum(energy, 0) * mean_row)


@triton.jit
def write_scalars(memory, tensor_ptr, note_ptr, is_finite, x2, u2):
    """Note whether the step is taken, and how long it is but for clipping, which begins the last pass."""
    group_ptr, found_inf = group_of(memory, tensor_ptr), tl.load(memory.scaling_ptr + 1) != 0
    rms_x = tl.sqrt(x2 / tl.load(tensor_ptr + f.COUNT).to(tl.float64))
    size = tl.where(tl.load(group_ptr + rates.RELATIVE) != 0, at_least(tl.load(group_ptr + rates.EPS2), rms_x), 1.0)
    taken = is_finite | (tl.load(group_ptr + rates.IGNORE) != 0)
    tl.store(note_ptr + f.TAKEN, tl.where(found_inf, -1.0, tl.where(taken, 1.0, 0.0)))
    tl.store(note_ptr + f.ALPHA, size * tl.load(note_ptr + f.RHO) * tl.load(group_ptr + rates.SIGN))
    share = tl.load(note_ptr + f.SHARE) * tl.where(tl.load(group_ptr + rates.DECAY_BY) == rates.BY_ALPHA, size, 1.0)
    tl.store(note_ptr + f.DECAY, 1.0 - share)
    tl.store(note_ptr + f.X2, x2)
    tl.store(note_ptr + f.U2, u2)


@triton.jit(do_not_specialize=["first_block", "block_count", "first_tensor"])
def fold(memory, first_block, block_count, first_tensor, KIND: tl.constexpr, RAW: tl.constexpr):
    """Run a program for each block of columns, then one for each tensor."""
    program = tl.program_id(0).to(tl.int64)
    block, number = program + first_block, program - block_count + first_tensor
    place, first = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    if program < block_count:
        place, first = tl.load(memory.blocks_ptr + 2 * block).to(tl.int64), tl.load(memory.blocks_ptr + 2 * block + 1)
        number = tl.load(memory.matrices_ptr + place * f.MATRIX + f.OF)
    if tl.load(memory.given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0:
        if program < block_count:
            fold_columns(memory, look_up(memory, place, KIND), block, first, KIND, RAW)
        else:
            tensor_ptr, note_ptr = memory.tensors_ptr + number * f.TENSOR, memory.notes_ptr + number * f.NOTES
            own_ptr = memory.sums_ptr + tl.load(tensor_ptr + f.FIRST_UNIT) * f.SUMS
            units, tiles = tl.load(tensor_ptr + f.UNITS).to(tl.int32), tl.load(tensor_ptr + f.TILES).to(tl.int32)
            is_finite = total(own_ptr + f.PROBE, units, f.SUMS) == 0
            if RAW:
                tl.store(note_ptr + f.TAKEN, tl.where(is_finite, 1.0, 0.0))
            else:
                u2 = total(own_ptr + f.ENERGY, units, f.SUMS)
                x2 = total(memory.squares_ptr + tl.load(tensor_ptr + f.FIRST_TILE), tiles, 1)
                write_scalars(memory, tensor_ptr, note_ptr, is_finite, x2, u2)


# ---- of shards alone


@triton.jit
def average(x, factor, count, KIND: tl.constexpr):
    """Average a factor with the means of this step; return the mean of what it is now. Where none is kept it is 1.0."""
    w2, beta2 = tl.load(x.note_ptr + f.W2), tl.load(x.note_ptr + f.BETA2)
    acc = tl.zeros((TERMS,), tl.float64)
    for i in range(0, count, TERMS):
        offsets = i + tl.arange(0, TERMS)
        mask = offsets < factor.end.to(tl.int32)
        old = tl.load(factor.state_ptr + offsets.to(tl.int64) * factor.stride, mask=mask, other=1.0).to(tl.float64)
        new = old * beta2 + tl.load(factor.wide_ptr + offsets, mask=mask, other=1.0) * w2
        inverse = tl.where(mask, inverse_root(new.to(KIND.STAT)), 1.0)
        tl.store(factor.new_ptr + offsets, new.to(KIND.STAT), mask=mask)
        tl.store(factor.inverse_ptr + offsets, inverse, mask=offsets < count)
        acc += tl.where(mask, new, 0.0)
    return tl.sum(acc, 0) / count.to(tl.float64)


@triton.jit
def factors(memory, KIND: tl.constexpr):
    """Run a program for each matrix: R and C; mean(R) unless the ranks have found it."""
    place = tl.program_id(0).to(tl.int64)
    number = tl.load(memory.matrices_ptr + place * f.MATRIX + f.OF)
    is_given = tl.load(memory.given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0
    if is_given & (tl.load(memory.matrices_ptr + place * f.MATRIX + f.FULL) == 0):
        x = look_up(memory, place, KIND)
        mean_row, mean_col = average(x, x.row, x.n, KIND), average(x, x.col, x.m.to(tl.int32), KIND)
        if tl.load(x.tensor_ptr + f.MEAN_GIVEN) == 0:
            is_swapped = tl.load(x.tensor_ptr + f.SWAPPED) != 0
            tl.store(x.mean_ptr, tl.where(is_swapped, mean_col, mean_row))


@triton.jit
def totals(memory, KIND: tl.constexpr):
    """Run a program for each tensor: ΣU² and ΣX² of what is here."""
    number = tl.program_id(0).to(tl.int64)
    if tl.load(memory.given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0:
        tensor_ptr, note_ptr = memory.tensors_ptr + number * f.TENSOR, memory.notes_ptr + number * f.NOTES
        first, tiles = tl.load(tensor_ptr + f.FIRST_TILE), tl.load(tensor_ptr + f.TILES).to(tl.int32)
        tl.store(note_ptr + f.U2, total(memory.energies_ptr + first, tiles, 1))
        tl.store(note_ptr + f.X2, total(memory.squares_ptr + first, tiles, 1))


@triton.jit
def conclude(memory, KIND: tl.constexpr):
    """Run a program for each tensor: its scalars, from sums that all ranks have completed."""
    number = tl.program_id(0).to(tl.int64)
    if tl.load(memory.given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0:
        note_ptr = memory.notes_ptr + number * f.NOTES
        is_finite, x2, u2 = tl.load(note_ptr + f.TAKEN) != 0, tl.load(note_ptr + f.X2), tl.load(note_ptr + f.U2)
        tl.debug_barrier()  # every thread has read what is written now
        write_scalars(memory, memory.tensors_ptr + number * f.TENSOR, note_ptr, is_finite, x2, u2)
