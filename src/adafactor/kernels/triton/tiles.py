"""A tile of the last pass, and the one loop that takes its elements from G to X, or only looks at them.

A tile is LINES lines of LINE elements. A line is a part of a row; or, of a narrow matrix, several rows; or, of an
unfactored tensor, the next elements in memory. `visit` takes a tile through one of three loops over the same elements:

| goal | kernel | reads | leaves |
|---|---|---|---|
| STEP | `last_pass` | G, X, 1/√R, 1/√C | X, the state, ΣX² before and after |
| NORMS | `norms`, for shards | the same | ΣU², ΣX² |
| SQUARES | `begin_step`, `measure` | X | ΣX² |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import (
    address,
    blend,
    decayed,
    divide,
    inverse_root,
    narrow,
    number_at,
    random_words,
    remainder,
    root,
    stochastic,
)

LINE, LINES, NARROW = tl.constexpr(sizes.LINE), tl.constexpr(sizes.LINES), tl.constexpr(sizes.NARROW)
STEP, NORMS, SQUARES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
WIDE, FOLDED, UNFACTORED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Tile(NamedTuple):
    """The elements of a tile, and where their numbers are."""

    g_ptr: Any
    x_ptr: Any
    momentum_ptr: Any
    compensation_ptr: Any
    full_ptr: Any
    row_ptr: Any  # the state's R and C
    col_ptr: Any
    new_row: Any  # where the new ones begin among the vectors, and their inverse roots among the inverses
    new_col: Any
    g_stride_p: Any
    g_stride_q: Any
    x_stride_p: Any
    x_stride_q: Any
    number: Any  # of the matrix' first element
    number_p: Any
    number_q: Any
    n: Any
    m: Any
    first: Any
    first_col: Any
    row_end: Any  # n and m; without R or C, 0: 1.0 stands for it
    col_end: Any


class Rates(NamedTuple):
    """The scalars of a step."""

    scale: Any  # αₜ / max(1, RMS(U)/d)
    decay: Any
    w1: Any
    w2: Any
    beta2: Any
    eps: Any
    unscale: Any
    mean_row: Any
    key1: Any
    key2: Any


@triton.jit
def describe(
    tensor_ptr,
    matrix_ptr,
    g_ptr,
    first,
    first_col,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Look up a tile's tensor."""
    x_offset = number_at(matrix_ptr + f.X_OFFSET, ALIGNED)
    n, m = tl.load(tensor_ptr + f.N).to(tl.int32), number_at(tensor_ptr + f.M, ALIGNED)
    col_end = tl.where(tl.load(tensor_ptr + f.COL) != 0, m, 0)
    if ALIGNED:
        col_end = tl.multiple_of(col_end, 16)
    return Tile(
        g_ptr=address(g_ptr, GT, ALIGNED) + number_at(matrix_ptr + f.G_OFFSET, ALIGNED),
        x_ptr=address(tensor_ptr + f.X, DT, ALIGNED) + x_offset,
        momentum_ptr=address(tensor_ptr + f.MOMENTUM, ST, ALIGNED) + x_offset,
        compensation_ptr=address(tensor_ptr + f.COMPENSATION, DT, ALIGNED) + x_offset,
        full_ptr=address(tensor_ptr + f.FULL, ST, ALIGNED),
        row_ptr=address(tensor_ptr + f.ROW, ST, False) + tl.load(matrix_ptr + f.ROW_OFFSET),
        col_ptr=address(tensor_ptr + f.COL, ST, False) + tl.load(matrix_ptr + f.COL_OFFSET),
        new_row=tl.load(matrix_ptr + f.NEW_ROW),
        new_col=tl.load(matrix_ptr + f.NEW_COL),
        g_stride_p=number_at(tensor_ptr + f.G_STRIDE_P, ALIGNED),
        g_stride_q=1 if ALIGNED else tl.load(tensor_ptr + f.G_STRIDE_Q).to(tl.int32),
        x_stride_p=number_at(tensor_ptr + f.X_STRIDE_P, ALIGNED),
        x_stride_q=1 if ALIGNED else tl.load(tensor_ptr + f.X_STRIDE_Q).to(tl.int32),
        number=tl.load(matrix_ptr + f.NUMBER),
        number_p=tl.load(tensor_ptr + f.NUMBER_P),
        number_q=tl.load(tensor_ptr + f.NUMBER_Q).to(tl.int32),
        n=n,
        m=m,
        first=first,
        first_col=first_col,
        row_end=tl.where(tl.load(tensor_ptr + f.ROW) != 0, n, 0),
        col_end=col_end,
    )


@triton.jit
def write(
    tile,
    offsets,
    mask,
    words,
    u,
    s,
    DT: tl.constexpr,
    ST: tl.constexpr,
    OF_UPDATE: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """X·(1 − ρₜ·λ) − αₜ·Û, rounded as the settings say; return what was there and what is there now, as numbers."""
    old = tl.load(tile.x_ptr + offsets, mask=mask, other=0.0).to(ST)
    if OF_UPDATE:
        u = blend(tl.load(tile.momentum_ptr + offsets, mask=mask, other=0.0), u, s.w1)
        tl.store(tile.momentum_ptr + offsets, u, mask=mask)
    exact = old
    if ROUNDING == 2:
        lost = tl.load(tile.compensation_ptr + offsets, mask=mask, other=0.0).to(ST)
        exact = old + remainder(lost, old, DT)
    exact = exact * s.decay - u
    new = stochastic(exact, words, DT) if ROUNDING == 1 else narrow(exact, DT)
    tl.store(tile.x_ptr + offsets, new, mask=mask)
    value = new.to(ST)
    if ROUNDING == 2:
        lost = tl.where(tl.abs(value) < float("inf"), exact - value, 0.0)
        tl.store(tile.compensation_ptr + offsets, narrow(lost, DT), mask=mask)
    return old, value


@triton.jit
def visit(
    tile,
    s,
    inverses_ptr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    GOAL: tl.constexpr,
    FORM: tl.constexpr,
):
    """Take a tile through the loop.

    Returns:
        ΣX² before and after (STEP), ΣU² and ΣX² (NORMS), or ΣX² as STEP makes it and in double (SQUARES).
    """
    ROWS: tl.constexpr = 2 if FORM == UNFACTORED or ST == tl.float64 else 4  # whatever the goal: the sums are the same
    lane, line = tl.arange(0, LINE), tl.arange(0, ROWS)
    # of a line: how many rows there are, and the row and column of each element
    fold, row, cols = 1, 0, tile.first_col + lane
    if ALIGNED:
        cols = tl.max_contiguous(tl.multiple_of(cols, LINE), LINE)
    inside = cols < tile.m
    across_x, across_g, across_number = cols * tile.x_stride_q, cols * tile.g_stride_q, lane * tile.number_q
    if FORM == FOLDED:
        m = tile.m.to(tl.int32)
        fold, row, cols = LINE // m, lane // m, lane % m
        inside = lane < fold * m
        across_x = row * tile.x_stride_p + cols * tile.x_stride_q
        across_g = row * tile.g_stride_p + cols * tile.g_stride_q
        across_number = row * tile.number_p.to(tl.int32) + cols * tile.number_q
        if ALIGNED:  # then a row is a multiple of 16 elements
            across_x = tl.max_contiguous(tl.multiple_of(across_x, 16), 16)
            across_g = tl.max_contiguous(tl.multiple_of(across_g, 16), 16)
    if GOAL != SQUARES:  # all that is the same for a column, once
        c = s.scale
        if FORM != UNFACTORED:
            c = tl.load(inverses_ptr + tile.new_col + cols, mask=inside & (cols < tile.col_end), other=1.0)
            c = (c * root(s.mean_row) * s.scale)[None, :]
            if MOMENTUM != 2:
                c = c * s.unscale
    # a line's first elements are moved on by additions: a product of 64 bits is three instructions
    start = (tile.first + line * fold).to(tl.int64)
    x_start, g_start = start * tile.x_stride_p, start * tile.g_stride_p
    number = tile.number + start * tile.number_p + tile.first_col.to(tl.int64) * tile.number_q
    first_sum = tl.zeros((ROWS, LINE), ST)
    second_sum = tl.zeros((ROWS, LINE), ST if GOAL == STEP else tl.float64)
    for i in range(0, tl.minimum(LINES, tl.cdiv(tile.n - tile.first, fold)), ROWS):
        rows = tile.first + (i + line) * fold
        x_offsets, g_offsets = x_start[:, None] + across_x[None, :], g_start[:, None] + across_g[None, :]
        if FORM == UNFACTORED:
            mask = x_offsets < tile.m
        elif FORM == FOLDED:
            mask = (rows[:, None] + row[None, :] < tile.n) & inside[None, :]
        else:
            mask = (rows < tile.n)[:, None] & inside[None, :]
        if GOAL != SQUARES:
            g = tl.load(tile.g_ptr + g_offsets, mask=mask, other=0.0).to(ST)
            if FORM == UNFACTORED or MOMENTUM == 2:
                g = g * s.unscale
            if FORM == UNFACTORED:
                v = decayed(tl.load(tile.full_ptr + x_offsets, mask=mask, other=1.0), s.w2, s.beta2)
                v += (g * g + s.eps) * s.w2
                r = inverse_root(v)
                if GOAL == STEP:
                    tl.store(tile.full_ptr + x_offsets, v, mask=mask)
            elif FORM == FOLDED:
                r = tl.load(inverses_ptr + tile.new_row + (rows[:, None] + row[None, :]), mask=mask, other=1.0)
            else:
                r = tl.load(inverses_ptr + tile.new_row + rows, mask=rows < tile.n, other=1.0)[:, None]
            if MOMENTUM == 2:
                g = blend(tl.load(tile.momentum_ptr + x_offsets, mask=mask, other=0.0), g, s.w1)
                if GOAL == STEP:
                    tl.store(tile.momentum_ptr + x_offsets, g, mask=mask)
            u = g * r * c
        if GOAL == STEP:
            words = u
            if ROUNDING == 1:
                words = random_words(number[:, None], across_number.to(tl.uint32)[None, :], s.key1, s.key2)
            old, new = write(tile, x_offsets, mask, words, u, s, DT, ST, MOMENTUM == 1, ROUNDING)
            first_sum, second_sum = tl.fma(old, old, first_sum), tl.fma(new, new, second_sum)
        else:
            x = tl.load(tile.x_ptr + x_offsets, mask=mask, other=0.0).to(ST)
            a, wide = u if GOAL == NORMS else x, x.to(tl.float64)
            first_sum, second_sum = tl.fma(a, a, first_sum), tl.fma(wide, wide, second_sum)
        x_start += ROWS * fold * tile.x_stride_p
        g_start += ROWS * fold * tile.g_stride_p
        number += ROWS * fold * tile.number_p
    # in double, so that the sum is the same whatever the compiler takes for the best order
    return tl.sum(tl.sum(first_sum.to(tl.float64), 1), 0), tl.sum(tl.sum(second_sum.to(tl.float64), 1), 0)


@triton.jit
def visit_any(
    tensor_ptr,
    tile,
    s,
    inverses_ptr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    GOAL: tl.constexpr,
):
    """Take a tile of any form through the loop."""
    first_sum, second_sum = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    if tl.load(tensor_ptr + f.FULL) != 0:
        first_sum, second_sum = visit(tile, s, inverses_ptr, DT, ST, ALIGNED, MOMENTUM, ROUNDING, GOAL, UNFACTORED)
    elif tile.m <= NARROW:
        first_sum, second_sum = visit(tile, s, inverses_ptr, DT, ST, ALIGNED, MOMENTUM, ROUNDING, GOAL, FOLDED)
    else:
        first_sum, second_sum = visit(tile, s, inverses_ptr, DT, ST, ALIGNED, MOMENTUM, ROUNDING, GOAL, WIDE)
    return first_sum, second_sum


@triton.jit
def rates_of(note_ptr, group_ptr, mean_ptr, grad_scale_ptr, tile, scale, ST: tl.constexpr):
    """Look up the scalars of a step."""
    return Rates(
        scale=scale,
        decay=tl.load(note_ptr + f.DECAY).to(ST),
        w1=tl.load(note_ptr + f.W1).to(ST),
        w2=tl.load(note_ptr + f.W2).to(ST),
        beta2=tl.load(note_ptr + f.BETA2).to(ST),
        eps=tl.load(group_ptr + rates.EPS1).to(ST),
        unscale=divide(1.0, tl.load(grad_scale_ptr).to(ST)),
        mean_row=tl.load(mean_ptr, mask=(tile.row_end > 0) & (tile.col_end > 0), other=1.0).to(ST),
        key1=tl.load(note_ptr + f.KEY1).to(tl.int64).to(tl.uint32),
        key2=tl.load(note_ptr + f.KEY2).to(tl.int64).to(tl.uint32),
    )
