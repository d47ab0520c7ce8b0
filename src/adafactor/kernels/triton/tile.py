"""A tile of the last pass: LINES lines of LINE elements, which a program takes through one loop.

A line is a part of a row; or, of a narrow matrix, several rows; or, of an unfactored tensor, the next elements in
memory; or some blocks of an int8 momentum. The loop goes from G to X, or only looks at them:

| goal | kernel | reads | leaves |
|---|---|---|---|
| STEP | `last_pass` | G, X, 1/√R, 1/√C | X, the state but R and C, ΣX² before and after |
| NORMS | `last_pass` of a shard, before it writes | the same | ΣU², ΣX² |
| SQUARES | `begin_step`, `measure` | X | ΣX² |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import sizes
from adafactor.kernels.triton.elements import (
    blend,
    decayed,
    inverse_root,
    narrow,
    random_words,
    remainder,
    root,
    stochastic,
)
from adafactor.kernels.triton.momentum import BLOCK, Elements, keep, recall

LINE, LINES = tl.constexpr(sizes.LINE), tl.constexpr(sizes.LINES)
STEP, NORMS, SQUARES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
WIDE, FOLDED, UNFACTORED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Lanes(NamedTuple):
    """Where the elements of a line are: those of its first row, or of all its rows, from its first element on."""

    fold: Any  # rows of a line
    row: Any  # of each lane
    cols: Any
    inside: Any  # whether it has an element
    across_x: Any
    across_g: Any
    number: Any  # what is added to the number of an element
    matrix: Any  # from that of the line to that of the lane
    vector: Any  # from R and C of the one to those of the other


@triton.jit
def wide_lanes(x, first_col, KIND: tl.constexpr):
    """Take a part of a row, or of memory."""
    lane = tl.arange(0, LINE)
    cols = first_col + lane
    if KIND.aligned:
        cols = tl.max_contiguous(tl.multiple_of(cols, LINE), LINE)
    number = lane * tl.load(x.tensor_ptr + f.NUMBER_Q).to(tl.int32)
    return Lanes(1, 0, cols, cols < x.m, cols * x.x_stride_q, cols * x.g_stride_q, number, 0, 0)


@triton.jit
def folded_lanes(x, KIND: tl.constexpr):
    """Take as many rows of a narrow matrix as there is room for."""
    lane, m = tl.arange(0, LINE), x.m.to(tl.int32)
    fold, row, cols = LINE // m, lane // m, lane % m
    across_x = row * x.x_stride_p + cols * x.x_stride_q
    across_g = row * x.g_stride_p + cols * x.g_stride_q
    if KIND.aligned:  # then a row is a multiple of 16 elements
        across_x = tl.max_contiguous(tl.multiple_of(across_x, 16), 16)
        across_g = tl.max_contiguous(tl.multiple_of(across_g, 16), 16)
    number_p, number_q = tl.load(x.tensor_ptr + f.NUMBER_P), tl.load(x.tensor_ptr + f.NUMBER_Q)
    number = row * number_p.to(tl.int32) + cols * number_q.to(tl.int32)
    return Lanes(fold, row[None, :], cols, lane < fold * m, across_x, across_g, number, 0, 0)


@triton.jit
def block_lanes(x, first_col, KIND: tl.constexpr):
    """Take blocks of int8 that are no runs of a row: columns of it, and the same ones of the next matrices."""
    lane = tl.arange(0, LINE)
    place = lane % KIND.lanes
    matrix, col = place % x.matrices, lane // KIND.lanes * x.columns + place // x.matrices
    cols = first_col + col
    own_ptr = x.matrix_ptr + matrix * f.MATRIX
    apart = tl.load(own_ptr + f.X) - tl.load(x.matrix_ptr + f.X)
    across_x = cols * x.x_stride_q + apart // (KIND.X.primitive_bitwidth // 8)
    across_g = cols * x.g_stride_q + (tl.load(own_ptr + f.G_OFFSET) - tl.load(x.matrix_ptr + f.G_OFFSET))
    number = col * tl.load(x.tensor_ptr + f.NUMBER_Q).to(tl.int32) + matrix  # what follows Q is numbered one by one
    vector = tl.load(own_ptr + f.NEW_ROW) - tl.load(x.matrix_ptr + f.NEW_ROW)
    inside = (place < x.columns * x.matrices) & (cols < x.m)
    return Lanes(1, 0, cols, inside, across_x, across_g, number, matrix, vector)


@triton.jit
def column_factors(x, lanes, scale, KIND: tl.constexpr):
    """Return all that is the same for a column: √mean(R)/√C, times the scale of the step."""
    mean_row = tl.load(x.mean_ptr + lanes.matrix).to(KIND.STAT)
    mean_row = tl.where((x.row.end > 0) & (x.col.end > 0), mean_row, 1.0)
    c_ptr, mask = x.col.inverse_ptr + (lanes.cols + lanes.vector), lanes.inside & (lanes.cols < x.col.end)
    c = tl.load(c_ptr, mask=mask, other=1.0) * root(mean_row) * scale
    if not KIND.OF_GRADIENT:
        c = c * x.unscale
    return c[None, :]


@triton.jit
def update(x, e, g_offsets, r_offsets, has_r, c, KIND: tl.constexpr, GOAL: tl.constexpr, FORM: tl.constexpr):
    """Return U times the scale of the step; STEP also stores V̂, and the momentum of gradients."""
    g = tl.load(x.g_ptr + g_offsets, mask=e.mask, other=0.0).to(KIND.STAT)
    if FORM == UNFACTORED or KIND.OF_GRADIENT:
        g = g * x.unscale
    if FORM == UNFACTORED:
        v = decayed(tl.load(x.full_ptr + e.offsets, mask=e.mask, other=1.0), x.w2, x.beta2)
        v += (g * g + x.eps) * x.w2
        r = inverse_root(v)
        if GOAL == STEP:
            tl.store(x.full_ptr + e.offsets, v, mask=e.mask)
    else:
        r = tl.load(x.row.inverse_ptr + r_offsets, mask=has_r, other=1.0)
    if KIND.OF_GRADIENT:
        g = blend(recall(x, e, KIND), g, x.w1)
        if GOAL == STEP:
            keep(x, e, g, KIND)
    return g * r * c


@triton.jit
def write(x, e, u, KIND: tl.constexpr):
    """X·(1 − λ·ρₜ) − αₜ·Û, rounded as the settings say; return what was there and what is there now, as numbers."""
    old = tl.load(x.x_ptr + e.offsets, mask=e.mask, other=0.0).to(KIND.STAT)
    if KIND.OF_UPDATE:
        u = blend(recall(x, e, KIND), u, x.w1)
        keep(x, e, u, KIND)
        if KIND.OF_DIRECTION:
            u = u * x.alpha
    exact = old
    if KIND.KAHAN:
        lost = tl.load(x.compensation_ptr + e.offsets, mask=e.mask, other=0.0).to(KIND.STAT)
        exact = old + remainder(lost, old, KIND.X)
    exact = exact * x.decay - u
    new = stochastic(exact, e.words, KIND.X) if KIND.STOCHASTIC else narrow(exact, KIND.X)
    tl.store(x.x_ptr + e.offsets, new, mask=e.mask)
    value = new.to(KIND.STAT)
    if KIND.KAHAN:
        lost = tl.where(tl.abs(value) < float("inf"), exact - value, 0.0)
        tl.store(x.compensation_ptr + e.offsets, narrow(lost, KIND.X), mask=e.mask)
    return old, value


@triton.jit
def visit(x, scale, first, first_col, KIND: tl.constexpr, GOAL: tl.constexpr, FORM: tl.constexpr):
    """Take a tile, which begins at this row and column, through the loop; SQUARES needs no scale.

    Returns:
        ΣX² before and after (STEP), ΣU² and ΣX² (NORMS), or ΣX² as STEP makes it and in double (SQUARES).
    """
    # whatever the goal: the sums are the same
    ROWS: tl.constexpr = min(KIND.LINES_AT_ONCE, 2) if FORM == UNFACTORED else KIND.LINES_AT_ONCE
    if FORM == FOLDED:
        lanes = folded_lanes(x, KIND)
    elif KIND.lanes:
        lanes = block_lanes(x, first_col, KIND)
    else:
        lanes = wide_lanes(x, first_col, KIND)
    c = scale
    if GOAL != SQUARES and FORM != UNFACTORED:
        c = column_factors(x, lanes, scale, KIND)
    block = x.columns if KIND.lanes else BLOCK
    blocks = first_col // block + tl.arange(0, LINE // KIND.BLOCK_LANES)
    # a line's first elements are moved on by additions: a product of 64 bits is three instructions
    line = tl.arange(0, ROWS)
    start = (first + line * lanes.fold).to(tl.int64)
    x_start, g_start, scale_start = start * x.x_stride_p, start * x.g_stride_p, start * x.scale_stride
    if GOAL == STEP and KIND.RANDOM:
        key1 = tl.load(x.note_ptr + f.KEY1).to(tl.int64).to(tl.uint32)
        key2 = tl.load(x.note_ptr + f.KEY2).to(tl.int64).to(tl.uint32)
        number_p, number_q = tl.load(x.tensor_ptr + f.NUMBER_P), tl.load(x.tensor_ptr + f.NUMBER_Q)
        number = tl.load(x.matrix_ptr + f.NUMBER) + start * number_p + first_col.to(tl.int64) * number_q
    first_sum = tl.zeros((ROWS, LINE), KIND.STAT)
    second_sum = tl.zeros((ROWS, LINE), KIND.STAT if GOAL == STEP else tl.float64)
    for i in range(0, tl.minimum(LINES, tl.cdiv(x.n - first, lanes.fold)), ROWS):
        rows = (first + (i + line) * lanes.fold)[:, None] + lanes.row
        x_offsets = x_start[:, None] + lanes.across_x[None, :]
        is_flat: tl.constexpr = FORM == UNFACTORED and not KIND.lanes
        mask = x_offsets < x.m if is_flat else (rows < x.n) & lanes.inside[None, :]
        scale_offsets, has_scale, words = None, None, None
        if KIND.IN_BLOCKS:
            scale_offsets = scale_start[:, None] + blocks[None, :]
            has_scale = scale_offsets * BLOCK < x.m if is_flat else (rows < x.n) & (blocks * block < x.m)[None, :]
        if GOAL == STEP and KIND.RANDOM:
            words = random_words(number[:, None], lanes.number.to(tl.uint32)[None, :], key1, key2)
            number += ROWS * lanes.fold * number_p
        e = Elements(x_offsets, mask, scale_offsets, has_scale, words)
        if GOAL != SQUARES:
            g_offsets, r_offsets = g_start[:, None] + lanes.across_g[None, :], rows + lanes.vector
            u = update(x, e, g_offsets, r_offsets, rows < x.n, c, KIND, GOAL, FORM)
        if GOAL == STEP:
            old, new = write(x, e, u, KIND)
            first_sum, second_sum = tl.fma(old, old, first_sum), tl.fma(new, new, second_sum)
        else:
            value = tl.load(x.x_ptr + x_offsets, mask=mask, other=0.0).to(KIND.STAT)
            a, wide = u if GOAL == NORMS else value, value.to(tl.float64)
            first_sum, second_sum = tl.fma(a, a, first_sum), tl.fma(wide, wide, second_sum)
        x_start += ROWS * lanes.fold * x.x_stride_p
        g_start += ROWS * lanes.fold * x.g_stride_p
        scale_start += ROWS * lanes.fold * x.scale_stride
    # in double, so that the sum is the same whatever the compiler takes for the best order
    return tl.sum(tl.sum(first_sum.to(tl.float64), 1), 0), tl.sum(tl.sum(second_sum.to(tl.float64), 1), 0)


@triton.jit
def visit_any(x, scale, first, first_col, KIND: tl.constexpr, GOAL: tl.constexpr):
    """Take a tile of any form through the loop."""
    first_sum, second_sum = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    if tl.load(x.matrix_ptr + f.FULL) != 0:
        first_sum, second_sum = visit(x, scale, first, first_col, KIND, GOAL, UNFACTORED)
    elif KIND.IN_BLOCKS:  # a line has blocks of one row
        first_sum, second_sum = visit(x, scale, first, first_col, KIND, GOAL, WIDE)
    elif x.m <= sizes.NARROW:
        first_sum, second_sum = visit(x, scale, first, first_col, KIND, GOAL, FOLDED)
    else:
        first_sum, second_sum = visit(x, scale, first, first_col, KIND, GOAL, WIDE)
    return first_sum, second_sum
