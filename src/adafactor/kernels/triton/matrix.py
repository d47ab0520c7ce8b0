"""What every kernel is given, and what it looks up first: a matrix of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates
from adafactor.kernels.triton.elements import address, divide, number_at


class Memory(NamedTuple):
    """All that kernels read and write but the tensors, whose addresses are in tables. `fields.py` has the columns."""

    tensors_ptr: Any
    matrices_ptr: Any
    units_ptr: Any  # of the first pass: matrix, first row, end row, first column
    blocks_ptr: Any  # of columns: matrix, first column
    tiles_ptr: Any  # of the last pass: matrix, first row, first column
    shares_ptr: Any  # what a program measures: tensor, first tile, end tile
    checks_ptr: Any  # tensor, tile; −1: the heaviest
    given_ptr: Any
    numbers_ptr: Any
    scaling_ptr: Any  # a GradScaler's scale and found_inf
    notes_ptr: Any
    squares_ptr: Any  # ΣX² of every tile
    changes_ptr: Any  # of every check: 1 if X is not what the last step has left
    vectors_ptr: Any  # new R and C
    inverses_ptr: Any  # 1/√R and 1/√C
    scratch_ptr: Any  # column sums of units
    sums_ptr: Any
    energies_ptr: Any  # ΣU² of every block of columns; of shards, of every tile
    means_ptr: Any  # mean(R) of every matrix
    wide_ptr: Any  # of shards: means of G² + ε₁, in double, as new R and C lie among the vectors


class Factor(NamedTuple):
    """R or C of a matrix: where its numbers are, in the order of P or Q."""

    state_ptr: Any
    stride: Any  # in the state; the others lie side by side
    new_ptr: Any
    inverse_ptr: Any  # 1/√ of the new ones
    wide_ptr: Any  # of shards: means of G² + ε₁, in double
    end: Any  # how many there are; 0 where the factor is not kept: 1.0 stands for it


class Matrix(NamedTuple):
    """The rows of the tables that are of a matrix; where its numbers are, and how far apart; the rates of its step."""

    matrix_ptr: Any
    tensor_ptr: Any
    note_ptr: Any
    group_ptr: Any
    mean_ptr: Any  # mean(R)
    g_ptr: Any
    x_ptr: Any
    momentum_ptr: Any
    scale_ptr: Any
    compensation_ptr: Any
    full_ptr: Any
    row: Any  # R
    col: Any  # C
    scale_stride: Any
    columns: Any  # of a block of int8
    matrices: Any  # that it reaches over: this one and the next ones
    g_stride_p: Any
    g_stride_q: Any
    x_stride_p: Any
    x_stride_q: Any
    n: Any
    m: Any
    # the scalars of its step, in the precision of the statistics
    w1: Any  # 1 − β̂₁ₜ
    w2: Any  # 1 − β̂₂ₜ
    beta2: Any
    eps: Any  # ε₁
    decay: Any  # of X, that weight decay leaves
    alpha: Any  # αₜ, negative to maximise
    unscale: Any  # 1/scale


@triton.jit
def is_stepped(memory, place, only_ragged, KIND: tl.constexpr):
    """Whether this variant of a kernel steps a matrix: one that loads 16 bytes at once leaves others to the ragged."""
    number = tl.load(memory.matrices_ptr + place * f.MATRIX + f.OF)
    g_address = tl.load(memory.given_ptr + number * f.GIVEN + f.G_ADDRESS)
    if KIND.aligned:
        return (g_address != 0) & (g_address % 16 == 0)
    else:
        return (g_address != 0) & ((only_ragged == 0) | (g_address % 16 != 0))


@triton.jit
def group_of(memory, tensor_ptr):
    """Return the row of a tensor's settings."""
    return memory.numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS


@triton.jit
def look_up_factor(memory, state_ptr, stride_ptr, new_ptr, length, KIND: tl.constexpr):
    """Look up a factor of this length, given where in the tables it is described."""
    new = tl.load(new_ptr)
    return Factor(
        state_ptr=address(state_ptr, KIND.STAT, False),
        stride=tl.load(stride_ptr),
        new_ptr=memory.vectors_ptr + new,
        inverse_ptr=memory.inverses_ptr + new,
        wide_ptr=memory.wide_ptr + new,
        end=tl.where(tl.load(state_ptr) != 0, length, 0),
    )


@triton.jit
def look_up(memory, place, KIND: tl.constexpr):
    """Look up the matrix at this place in the table."""
    matrix_ptr = memory.matrices_ptr + place * f.MATRIX
    number = tl.load(matrix_ptr + f.OF)
    tensor_ptr, note_ptr = memory.tensors_ptr + number * f.TENSOR, memory.notes_ptr + number * f.NOTES
    group_ptr = group_of(memory, tensor_ptr)
    g_address = memory.given_ptr + number * f.GIVEN + f.G_ADDRESS
    n, m = tl.load(tensor_ptr + f.N).to(tl.int32), number_at(tensor_ptr + f.M, KIND)
    return Matrix(
        matrix_ptr=matrix_ptr,
        tensor_ptr=tensor_ptr,
        note_ptr=note_ptr,
        group_ptr=group_ptr,
        mean_ptr=memory.means_ptr + place,
        g_ptr=address(g_address, KIND.G, KIND.aligned) + number_at(matrix_ptr + f.G_OFFSET, KIND),
        x_ptr=address(matrix_ptr + f.X, KIND.X, KIND.aligned),
        momentum_ptr=address(matrix_ptr + f.MOMENTUM, KIND.MOMENTUM, KIND.aligned),
        scale_ptr=address(matrix_ptr + f.SCALE, tl.float32, False),
        compensation_ptr=address(matrix_ptr + f.COMPENSATION, KIND.X, KIND.aligned),
        full_ptr=address(matrix_ptr + f.FULL, KIND.STAT, KIND.aligned),
        row=look_up_factor(memory, matrix_ptr + f.ROW, tensor_ptr + f.ROW_STRIDE, matrix_ptr + f.NEW_ROW, n, KIND),
        col=look_up_factor(memory, matrix_ptr + f.COL, tensor_ptr + f.COL_STRIDE, matrix_ptr + f.NEW_COL, m, KIND),
        scale_stride=tl.load(tensor_ptr + f.SCALE_STRIDE),
        columns=tl.load(tensor_ptr + f.COLUMNS).to(tl.int32),
        matrices=tl.load(tensor_ptr + f.MATRICES).to(tl.int32),
        g_stride_p=number_at(tensor_ptr + f.G_STRIDE_P, KIND),
        g_stride_q=1 if KIND.aligned else tl.load(tensor_ptr + f.G_STRIDE_Q).to(tl.int32),
        x_stride_p=number_at(tensor_ptr + f.X_STRIDE_P, KIND),
        x_stride_q=1 if KIND.aligned else tl.load(tensor_ptr + f.X_STRIDE_Q).to(tl.int32),
        n=n,
        m=m,
        w1=tl.load(note_ptr + f.W1).to(KIND.STAT),
        w2=tl.load(note_ptr + f.W2).to(KIND.STAT),
        beta2=tl.load(note_ptr + f.BETA2).to(KIND.STAT),
        eps=tl.load(group_ptr + rates.EPS1).to(KIND.STAT),
        decay=tl.load(note_ptr + f.DECAY).to(KIND.STAT),
        alpha=tl.load(note_ptr + f.ALPHA).to(KIND.STAT),
        unscale=divide(1.0, tl.load(memory.scaling_ptr).to(KIND.STAT)),
    )
