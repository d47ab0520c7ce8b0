"""A tile of the last pass, and the one loop that takes its elements from G to X, or only looks at them.

A tile is LINES lines of LINE elements. A line is a part of a row; or, of a narrow matrix, several rows; or, of an
unfactored tensor, the next elements in memory. `visit` takes a tile through one of three loops over the same elements:

| goal | kernel | reads | leaves |
|---|---|---|---|
| STEP | `last_pass` | G, X, 1/√R, 1/√C | X, the state, ΣX² before and after |
| NORMS | `last_pass` of a shard, before it writes | the same | ΣU², ΣX² |
| SQUARES | `begin_step`, `measure` | X | ΣX² |
"""

from __future__ import annotations

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


@triton.jit
def write(x, s, e, u, KIND: tl.constexpr):
    """X·(1 − λ·ρₜ) − αₜ·Û, rounded as the settings say; return what was there and what is there now, as numbers."""
    old = tl.load(x.x_ptr + e.offsets, mask=e.mask, other=0.0).to(KIND.STAT)
    if KIND.OF_UPDATE:
        u = blend(recall(x, e, KIND), u, s.w1)
        keep(x, e, u, KIND)
        if KIND.OF_DIRECTION:
            u = u * s.alpha
    exact = old
    if KIND.KAHAN:
        lost = tl.load(x.compensation_ptr + e.offsets, mask=e.mask, other=0.0).to(KIND.STAT)
        exact = old + remainder(lost, old, KIND.X)
    exact = exact * s.decay - u
    new = stochastic(exact, e.words, KIND.X) if KIND.STOCHASTIC else narrow(exact, KIND.X)
    tl.store(x.x_ptr + e.offsets, new, mask=e.mask)
    value = new.to(KIND.STAT)
    if KIND.KAHAN:
        lost = tl.where(tl.abs(value) < float("inf"), exact - value, 0.0)
        tl.store(x.compensation_ptr + e.offsets, narrow(lost, KIND.X), mask=e.mask)
    return old, value


@triton.jit
def visit(memory, x, s, scale, first, first_col, KIND: tl.constexpr, GOAL: tl.constexpr, FORM: tl.constexpr):
    """Take a tile, which begins at this row and column, through the loop; SQUARES needs no rates and no scale.

    Returns:
        ΣX² before and after (STEP), ΣU² and ΣX² (NORMS), or ΣX² as STEP makes it and in double (SQUARES).
    """
    # whatever the goal: the sums are the same
    ROWS: tl.constexpr = min(KIND.LINES_AT_ONCE, 2) if FORM == UNFACTORED else KIND.LINES_AT_ONCE
    lane, line = tl.arange(0, LINE), tl.arange(0, ROWS)
    # of a line: how many rows there are, and the row and column of each element
    fold, row, cols = 1, 0, first_col + lane
    if KIND.aligned:
        cols = tl.max_contiguous(tl.multiple_of(cols, LINE), LINE)
    inside = cols < x.m
    across_x, across_g = cols * x.x_stride_q, cols * x.g_stride_q
    if FORM == FOLDED:
        m = x.m.to(tl.int32)
        fold, row, cols = LINE // m, lane // m, lane % m
        inside = lane < fold * m
        across_x = row * x.x_stride_p + cols * x.x_stride_q
        across_g = row * x.g_stride_p + cols * x.g_stride_q
        if KIND.aligned:  # then a row is a multiple of 16 elements
            across_x = tl.max_contiguous(tl.multiple_of(across_x, 16), 16)
            across_g = tl.max_contiguous(tl.multiple_of(across_g, 16), 16)
    if GOAL != SQUARES:  # all that is the same for a column, once
        c = scale
        if FORM != UNFACTORED:
            mean_row = tl.load(x.mean_ptr, mask=(x.row_end > 0) & (x.col_end > 0), other=1.0).to(KIND.STAT)
            c = tl.load(memory.inverses_ptr + x.new_col + cols, mask=inside & (cols < x.col_end), other=1.0)
            c = (c * root(mean_row) * scale)[None, :]
            if not KIND.OF_GRADIENT:
                c = c * s.unscale
    # a line's first elements are moved on by additions: a product of 64 bits is three instructions
    start = (first + line * fold).to(tl.int64)
    x_start, g_start = start * x.x_stride_p, start * x.g_stride_p
    scale_start, blocks = start * x.scale_stride, first_col // BLOCK + tl.arange(0, LINE // BLOCK)
    if GOAL == STEP and KIND.RANDOM:
        key1 = tl.load(x.note_ptr + f.KEY1).to(tl.int64).to(tl.uint32)
        key2 = tl.load(x.note_ptr + f.KEY2).to(tl.int64).to(tl.uint32)
        number_p, number_q = tl.load(x.tensor_ptr + f.NUMBER_P), tl.load(x.tensor_ptr + f.NUMBER_Q).to(tl.int32)
        number = tl.load(x.matrix_ptr + f.NUMBER) + start * number_p + first_col.to(tl.int64) * number_q
        across_number = lane * number_q
        if FORM == FOLDED:
            across_number = row * number_p.to(tl.int32) + cols * number_q
    first_sum = tl.zeros((ROWS, LINE), KIND.STAT)
    second_sum = tl.zeros((ROWS, LINE), KIND.STAT if GOAL == STEP else tl.float64)
    for i in range(0, tl.minimum(LINES, tl.cdiv(x.n - first, fold)), ROWS):
        rows = first + (i + line) * fold
        x_offsets, g_offsets = x_start[:, None] + across_x[None, :], g_start[:, None] + across_g[None, :]
        if FORM == UNFACTORED:
            mask = x_offsets < x.m
        elif FORM == FOLDED:
            mask = (rows[:, None] + row[None, :] < x.n) & inside[None, :]
        else:
            mask = (rows < x.n)[:, None] & inside[None, :]
        scale_offsets = scale_start[:, None] + blocks[None, :]
        scale_mask = (rows < x.n)[:, None] & (blocks * BLOCK < x.m)[None, :]
        if FORM == UNFACTORED:
            scale_mask = scale_offsets * BLOCK < x.m
        words = None
        if GOAL == STEP and KIND.RANDOM:
            words = random_words(number[:, None], across_number.to(tl.uint32)[None, :], key1, key2)
            number += ROWS * fold * number_p
        e = Elements(x_offsets, mask, scale_offsets, scale_mask, words)
        if GOAL != SQUARES:
            g = tl.load(x.g_ptr + g_offsets, mask=mask, other=0.0).to(KIND.STAT)
            if FORM == UNFACTORED or KIND.OF_GRADIENT:
                g = g * s.unscale
            if FORM == UNFACTORED:
                v = decayed(tl.load(x.full_ptr + x_offsets, mask=mask, other=1.0), s.w2, s.beta2)
                v += (g * g + s.eps) * s.w2
                r = inverse_root(v)
                if GOAL == STEP:
                    tl.store(x.full_ptr + x_offsets, v, mask=mask)
            elif FORM == FOLDED:
                r = tl.load(memory.inverses_ptr + x.new_row + (rows[:, None] + row[None, :]), mask=mask, other=1.0)
            else:
                r = tl.load(memory.inverses_ptr + x.new_row + rows, mask=rows < x.n, other=1.0)[:, None]
            if KIND.OF_GRADIENT:
                g = blend(recall(x, e, KIND), g, s.w1)
                if GOAL == STEP:
                    keep(x, e, g, KIND)
            u = g * r * c
        if GOAL == STEP:
            old, new = write(x, s, e, u, KIND)
            first_sum, second_sum = tl.fma(old, old, first_sum), tl.fma(new, new, second_sum)
        else:
            value = tl.load(x.x_ptr + x_offsets, mask=mask, other=0.0).to(KIND.STAT)
            a, wide = u if GOAL == NORMS else value, value.to(tl.float64)
            first_sum, second_sum = tl.fma(a, a, first_sum), tl.fma(wide, wide, second_sum)
        x_start += ROWS * fold * x.x_stride_p
        g_start += ROWS * fold * x.g_stride_p
        scale_start += ROWS * fold * x.scale_stride
    # in double, so that the sum is the same whatever the compiler takes for the best order
    return tl.sum(tl.sum(first_sum.to(tl.float64), 1), 0), tl.sum(tl.sum(second_sum.to(tl.float64), 1), 0)


@triton.jit
def visit_any(memory, x, s, scale, first, first_col, KIND: tl.constexpr, GOAL: tl.constexpr):
    """Take a tile of any form through the loop."""
    first_sum, second_sum = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    if tl.load(x.tensor_ptr + f.FULL) != 0:
        first_sum, second_sum = visit(memory, x, s, scale, first, first_col, KIND, GOAL, UNFACTORED)
    elif x.is_narrow:
        first_sum, second_sum = visit(memory, x, s, scale, first, first_col, KIND, GOAL, FOLDED)
    else:
        first_sum, second_sum = visit(memory, x, s, scale, first, first_col, KIND, GOAL, WIDE)
    return first_sum, second_sum
