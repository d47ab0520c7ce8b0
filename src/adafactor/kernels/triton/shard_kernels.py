"""The kernels of a sharded step that no other step has; `shards.py` says when each is launched and what it leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import TERMS, inverse_root, total
from adafactor.kernels.triton.fold import write_scalars
from adafactor.kernels.triton.matrix import look_up


@triton.jit
def average(memory, x, state_ptr, stride, at, count, end, KIND: tl.constexpr):
    """Average a factor with the means of this step; return the mean of what it is now. Without it, 1.0 stands for it.

    Args:
        memory: where the means are, and the new factor goes.
        x: the matrix.
        state_ptr: the factor as it was.
        stride: of the factor.
        at: where it begins among the vectors.
        count: how many numbers it has.
        end: the same; 0 where there is no such factor.
        KIND: of the tensor.
    """
    w2, beta2 = tl.load(x.note_ptr + f.W2), tl.load(x.note_ptr + f.BETA2)
    acc = tl.zeros((TERMS,), tl.float64)
    for i in range(0, count, TERMS):
        offsets = i + tl.arange(0, TERMS)
        mask = offsets < end
        old = tl.load(state_ptr + offsets.to(tl.int64) * stride, mask=mask, other=1.0).to(tl.float64)
        new = old * beta2 + tl.load(memory.wide_ptr + at + offsets, mask=mask, other=1.0) * w2
        inverse = tl.where(mask, inverse_root(new.to(KIND.STAT)), 1.0)
        tl.store(memory.vectors_ptr + at + offsets, new.to(KIND.STAT), mask=mask)
        tl.store(memory.inverses_ptr + at + offsets, inverse, mask=offsets < count)
        acc += tl.where(mask, new, 0.0)
    return tl.sum(acc, 0) / count.to(tl.float64)


@triton.jit
def factors(memory, KIND: tl.constexpr):
    """Run a program for each matrix: R and C; mean(R) unless the ranks have found it."""
    place = tl.program_id(0).to(tl.int64)
    number = tl.load(memory.matrices_ptr + place * f.MATRIX + f.OF)
    is_given = tl.load(memory.given_ptr + number * f.GIVEN + f.G_ADDRESS) != 0
    if is_given & (tl.load(memory.tensors_ptr + number * f.TENSOR + f.FULL) == 0):
        x = look_up(memory, place, KIND)
        mean_row = average(memory, x, x.row_ptr, x.row_stride, x.new_row, x.n, x.row_end, KIND)
        m, col_end = x.m.to(tl.int32), x.col_end.to(tl.int32)
        mean_col = average(memory, x, x.col_ptr, x.col_stride, x.new_col, m, col_end, KIND)
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
