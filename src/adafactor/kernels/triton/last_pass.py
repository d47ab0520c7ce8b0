"""The last pass: X, and what is kept of G: R, C, V̂ and the momentum. Also ΣX², which the next step relies on.

A program has a tile: LINES lines of LINE elements. A line is a part of a row; or, of a narrow matrix, several rows; or,
of an unfactored tensor, the next elements in memory. `visit` takes a tile through one of three loops over the same
elements, from G to X, or only looks at them:

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
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import (
    at_least,
    blend,
    decayed,
    differs,
    divide,
    inverse_root,
    narrow,
    random_words,
    remainder,
    root,
    stochastic,
    total,
)
from adafactor.kernels.triton.matrix import is_stepped, look_up
from adafactor.kernels.triton.momentum import BLOCK, Elements, keep, recall

LINE, LINES = tl.constexpr(sizes.LINE), tl.constexpr(sizes.LINES)
STEP, NORMS, SQUARES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
WIDE, FOLDED, UNFACTORED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
            mean_row = tl.load(x.mean_ptr, mask=(x.row.end > 0) & (x.col.end > 0), other=1.0).to(KIND.STAT)
            c = tl.load(x.col.inverse_ptr + cols, mask=inside & (cols < x.col.end), other=1.0)
            c = (c * root(mean_row) * scale)[None, :]
            if not KIND.OF_GRADIENT:
                c = c * x.unscale
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
                g = g * x.unscale
            if FORM == UNFACTORED:
                v = decayed(tl.load(x.full_ptr + x_offsets, mask=mask, other=1.0), x.w2, x.beta2)
                v += (g * g + x.eps) * x.w2
                r = inverse_root(v)
                if GOAL == STEP:
                    tl.store(x.full_ptr + x_offsets, v, mask=mask)
            elif FORM == FOLDED:
                r = tl.load(x.row.inverse_ptr + (rows[:, None] + row[None, :]), mask=mask, other=1.0)
            else:
                r = tl.load(x.row.inverse_ptr + rows, mask=rows < x.n, other=1.0)[:, None]
            if KIND.OF_GRADIENT:
                g = blend(recall(x, e, KIND), g, x.w1)
                if GOAL == STEP:
                    keep(x, e, g, KIND)
            u = g * r * c
        if GOAL == STEP:
            old, new = write(x, e, u, KIND)
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
def visit_any(x, scale, first, first_col, KIND: tl.constexpr, GOAL: tl.constexpr):
    """Take a tile of any form through the loop."""
    first_sum, second_sum = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    if tl.load(x.matrix_ptr + f.FULL) != 0:
        first_sum, second_sum = visit(x, scale, first, first_col, KIND, GOAL, UNFACTORED)
    elif x.is_narrow:
        first_sum, second_sum = visit(x, scale, first, first_col, KIND, GOAL, FOLDED)
    else:
        first_sum, second_sum = visit(x, scale, first, first_col, KIND, GOAL, WIDE)
    return first_sum, second_sum


# ---- the kernel


@triton.jit
def copy(factor, first, end):
    """Take new numbers of R or C into the state."""
    for i in range(first, end, LINE):
        offsets = i + tl.arange(0, LINE)
        value = tl.load(factor.new_ptr + offsets, mask=offsets < end, other=0.0)
        tl.store(factor.state_ptr + offsets.to(tl.int64) * factor.stride, value, mask=offsets < end)


@triton.jit
def copy_factors(x, first, first_col):
    """Take those numbers of R and C into the state that are of a tile on the edge of the matrix."""
    if (x.row.end > 0) & (first_col == 0):
        end = tl.minimum(first + tl.where(x.is_narrow, LINES * (LINE // x.m), LINES), x.n)
        copy(x.row, first, end.to(tl.int32))
    if (x.col.end > 0) & (first == 0):
        end = tl.minimum(first_col + LINE, x.m)
        copy(x.col, first_col, end.to(tl.int32))


@triton.jit
def clip_divisor(memory, x, KIND: tl.constexpr):
    """RMS(U) and max(1, RMS(U)/d); in single precision where that is what is kept: doubles are slow on many cards."""
    blocks = tl.load(x.tensor_ptr + f.BLOCKS).to(tl.int32)
    u2 = tl.load(x.note_ptr + f.U2) + total(memory.energies_ptr + tl.load(x.tensor_ptr + f.FIRST_BLOCK), blocks, 1)
    mean, clip = u2 * (1.0 / tl.load(x.tensor_ptr + f.COUNT).to(tl.float64)), tl.load(x.group_ptr + rates.CLIP)
    large = mean > 1e30  # beyond it, the root of the mean is taken in two parts
    rms = root((mean * tl.where(large, 2.0**-120, 1.0)).to(KIND.STAT)) * tl.where(large, 2.0**60, 1.0).to(KIND.STAT)
    divisor = tl.where(clip > 0, at_least(1.0, divide(rms, tl.where(clip > 0, clip, 1.0).to(KIND.STAT))), 1.0)
    return rms, divisor


@triton.jit
def report(x, rms_u, divisor):
    """Count a step, and leave what `report()` says of it."""
    step_ptr = tl.load(x.tensor_ptr + f.STEP).to(tl.pointer_type(tl.float32))
    t, steps, clipped = tl.load(step_ptr), tl.load(x.note_ptr + f.STEPS), tl.load(x.note_ptr + f.CLIPPED)
    tl.debug_barrier()  # every thread has read what is written now
    tl.store(step_ptr, t + 1.0)
    tl.store(x.note_ptr + f.STEPS, steps + 1.0)
    tl.store(x.note_ptr + f.CLIPPED, clipped + tl.where(divisor > 1.0, 1.0, 0.0))
    tl.store(x.note_ptr + f.RMS_U, rms_u.to(tl.float64))
    tl.store(x.note_ptr + f.REPORTED_ALPHA, tl.abs(tl.load(x.note_ptr + f.ALPHA)))
    tl.store(x.note_ptr + f.RMS_X, tl.sqrt(tl.load(x.note_ptr + f.X2) / tl.load(x.tensor_ptr + f.COUNT).to(tl.float64)))
    tl.store(x.note_ptr + f.REPORTED_BETA2, tl.load(x.note_ptr + f.BETA2))


@triton.jit(do_not_specialize=["only_ragged"])
def last_pass(memory, only_ragged, KIND: tl.constexpr, WRITES: tl.constexpr):
    """Run a program for each tile. Without WRITES it leaves a shard's ΣU² and ΣX² of the tile, and nothing else."""
    number = tl.program_id(0).to(tl.int64)
    tile_ptr, squares_ptr = memory.tiles_ptr + 3 * number, memory.squares_ptr + number
    place = tl.load(tile_ptr).to(tl.int64)
    if is_stepped(memory, place, only_ragged, KIND):
        x = look_up(memory, place, KIND)
        taken, is_first = tl.load(x.note_ptr + f.TAKEN), number == tl.load(x.tensor_ptr + f.FIRST_TILE)
        first, first_col = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        scale = tl.full((), 1.0, KIND.STAT)
        if WRITES:
            rms_u, divisor = clip_divisor(memory, x, KIND)
            scale = divide(scale if KIND.OF_DIRECTION else x.alpha, divisor)
        if not WRITES:
            u2, x2 = visit_any(x, scale, first, first_col, KIND, NORMS)
            tl.store(memory.energies_ptr + number, u2)
            tl.store(squares_ptr, x2)
        elif taken > 0:
            if is_first:
                report(x, rms_u, divisor)
            copy_factors(x, first, first_col)
            before, after = visit_any(x, scale, first, first_col, KIND, STEP)
            known = tl.load(squares_ptr)
            tl.debug_barrier()  # every thread has read what is written now
            tl.store(squares_ptr, tl.where(differs(before, known), float("nan"), after))  # NaN: to be measured
        elif is_first & (taken == 0):
            skipped = tl.load(x.note_ptr + f.SKIPPED)
            tl.debug_barrier()
            tl.store(x.note_ptr + f.SKIPPED, skipped + 1.0)
