"""The last pass: X, and what is kept of G: R, C, V̂ and the momentum. Also ΣX², which the next step relies on.

A tile is LINES lines of LINE elements. A line is a part of a row; or, of a narrow matrix, several rows; or, of an
unfactored tensor, the next elements in memory. `visit` takes a tile through one of three loops over the same elements:

| goal | kernel | reads | leaves |
|---|---|---|---|
| STEP | `last_pass` | G, X, 1/√R, 1/√C | X, the state, ΣX² before and after |
| NORMS | `norms`, for shards | the same | ΣU², ΣX² |
| SQUARES | `begin_step`, `measure` | X | ΣX² |

Somebody may write to X between two steps, behind torch's back. So before anything is written, `begin_step` compares ΣX²
of the heaviest tile of a tensor and of a sample of the others (`sizes.checked`) with what the last step has left, and
`measure` reads all of those tensors that differ, and those of which nothing is known. What no sample sees the last pass
finds, which reads everything: it leaves a NaN there, and the next step measures. The last pass adds up squares in the
state's type, these two kernels in double, too: where squares leave the range of float32 the sums differ, and X is
measured every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import (
    address,
    at_least,
    blend,
    decayed,
    divide,
    inverse_root,
    is_stepped,
    narrow,
    number_at,
    random_words,
    remainder,
    root,
    stochastic,
    total,
)
from adafactor.kernels.triton.rates import TABLES

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
def differs(x2, known):
    """Whether two sums are not of the same X; a NaN or an infinity is no sum."""
    return tl.where(tl.abs(x2 - known) <= 1e-6 * known, 0, 1) + tl.where(known < float("inf"), 0, 1) > 0


@triton.jit
def copy(from_ptr, to_ptr, stride, first, end):
    """Take new numbers of R or C into the state."""
    for i in range(first, end, LINE):
        offsets = i + tl.arange(0, LINE)
        value = tl.load(from_ptr + offsets, mask=offsets < end, other=0.0)
        tl.store(to_ptr + offsets.to(tl.int64) * stride, value, mask=offsets < end)


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
        across_x, across_g = (
            row * tile.x_stride_p + cols * tile.x_stride_q,
            row * tile.g_stride_p + cols * tile.g_stride_q,
        )
        across_number = row * tile.number_p.to(tl.int32) + cols * tile.number_q
        if ALIGNED:  # then a row is a multiple of 16 elements
            across_x = tl.max_contiguous(tl.multiple_of(across_x, 16), 16)
            across_g = tl.max_contiguous(tl.multiple_of(across_g, 16), 16)
    if FORM != UNFACTORED and GOAL != SQUARES:  # all that is the same for a column, once
        c = (
            tl.load(inverses_ptr + tile.new_col + cols, mask=inside & (cols < tile.col_end), other=1.0)
            * root(s.mean_row)
            * s.scale
        )
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
                r = inverse_root(v) * s.scale
                if GOAL == STEP:
                    tl.store(tile.full_ptr + x_offsets, v, mask=mask)
            elif FORM == FOLDED:
                r = tl.load(inverses_ptr + tile.new_row + (rows[:, None] + row[None, :]), mask=mask, other=1.0)
                r = r * c[None, :]
            else:
                r = tl.load(inverses_ptr + tile.new_row + rows, mask=rows < tile.n, other=1.0)[:, None]
            if MOMENTUM == 2:
                g = blend(tl.load(tile.momentum_ptr + x_offsets, mask=mask, other=0.0), g, s.w1)
                if GOAL == STEP:
                    tl.store(tile.momentum_ptr + x_offsets, g, mask=mask)
            u = g * r
            if FORM == WIDE:
                u = u * c[None, :]
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


@triton.jit
def clip_divisor(u2, clip, count, ST: tl.constexpr):
    """RMS(U) and max(1, RMS(U)/d); in single precision where that is what is kept: doubles are slow on many cards."""
    mean = u2 * (1.0 / count)
    large = mean > 1e30  # beyond it, the root of the mean is taken in two parts
    rms = root((mean * tl.where(large, 2.0**-120, 1.0)).to(ST)) * tl.where(large, 2.0**60, 1.0).to(ST)
    divisor = tl.where(clip > 0, at_least(1.0, divide(rms, tl.where(clip > 0, clip, 1.0).to(ST))), 1.0)
    return rms, divisor


@triton.jit
def report(tensor_ptr, note_ptr, count, rms_u, divisor):
    """Count a step, and leave what `report()` says of it."""
    step_ptr = tl.load(tensor_ptr + f.STEP).to(tl.pointer_type(tl.float32))
    t, steps, clipped = tl.load(step_ptr), tl.load(note_ptr + f.STEPS), tl.load(note_ptr + f.CLIPPED)
    tl.debug_barrier()  # every thread has read what is written now
    tl.store(step_ptr, t + 1.0)
    tl.store(note_ptr + f.STEPS, steps + 1.0)
    tl.store(note_ptr + f.CLIPPED, clipped + tl.where(divisor > 1.0, 1.0, 0.0))
    tl.store(note_ptr + f.RMS_U, rms_u.to(tl.float64))
    tl.store(note_ptr + f.REPORTED_ALPHA, tl.abs(tl.load(note_ptr + f.ALPHA)))
    tl.store(note_ptr + f.RMS_X, tl.sqrt(tl.load(note_ptr + f.X2) / count))
    tl.store(note_ptr + f.REPORTED_BETA2, tl.load(note_ptr + f.BETA2))


@triton.jit(do_not_specialize=["only_ragged"], do_not_specialize_on_alignment=["grad_scale_ptr"])
def last_pass(
    tensors_ptr,
    matrices_ptr,
    tiles_ptr,
    given_ptr,
    numbers_ptr,
    notes_ptr,
    vectors_ptr,
    inverses_ptr,
    energies_ptr,
    means_ptr,
    squares_ptr,
    grad_scale_ptr,
    only_ragged,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Run a program for each tile: (matrix, first row, first column)."""
    tl.static_assert(TABLES != "")
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(tiles_ptr + 3 * number).to(tl.int64)
    matrix_ptr = matrices_ptr + place * f.MATRIX
    of = tl.load(matrix_ptr + f.OF)
    tensor_ptr, note_ptr, g_ptr = tensors_ptr + of * f.TENSOR, notes_ptr + of * f.NOTES, given_ptr + of * f.GIVEN
    taken, is_first = tl.load(note_ptr + f.TAKEN), number == tl.load(tensor_ptr + f.FIRST_TILE)
    if is_stepped(tl.load(g_ptr + f.G_ADDRESS), only_ragged, ALIGNED):
        if taken > 0:
            group_ptr = numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS
            first, first_col = tl.load(tiles_ptr + 3 * number + 1), tl.load(tiles_ptr + 3 * number + 2)
            tile = describe(tensor_ptr, matrix_ptr, g_ptr, first, first_col, GT, DT, ST, ALIGNED)
            count = tl.load(tensor_ptr + f.COUNT).to(tl.float64)
            blocks = tl.load(tensor_ptr + f.BLOCKS).to(tl.int32)
            u2 = tl.load(note_ptr + f.U2) + total(energies_ptr + tl.load(tensor_ptr + f.FIRST_BLOCK), blocks, 1)
            rms_u, divisor = clip_divisor(u2, tl.load(group_ptr + rates.CLIP), count, ST)
            scale = divide(tl.load(note_ptr + f.ALPHA).to(ST), divisor)
            s = rates_of(note_ptr, group_ptr, means_ptr + place, grad_scale_ptr, tile, scale, ST)
            known = tl.load(squares_ptr + number)
            if (tile.row_end > 0) & (first_col == 0):
                end = tl.minimum(first + tl.where(tile.m <= NARROW, LINES * (LINE // tile.m), LINES), tile.n)
                copy(
                    vectors_ptr + tile.new_row,
                    tile.row_ptr,
                    tl.load(tensor_ptr + f.ROW_STRIDE),
                    first,
                    end.to(tl.int32),
                )
            if (tile.col_end > 0) & (first == 0):
                end = tl.minimum(first_col + LINE, tile.m).to(tl.int32)
                copy(vectors_ptr + tile.new_col, tile.col_ptr, tl.load(tensor_ptr + f.COL_STRIDE), first_col, end)
            before, after = visit_any(tensor_ptr, tile, s, inverses_ptr, DT, ST, ALIGNED, MOMENTUM, ROUNDING, STEP)
            tl.store(squares_ptr + number, tl.where(differs(before, known), float("nan"), after))  # to be measured
            if is_first:
                report(tensor_ptr, note_ptr, count, rms_u, divisor)
        elif is_first & (taken == 0):
            skipped = tl.load(note_ptr + f.SKIPPED)
            tl.debug_barrier()
            tl.store(note_ptr + f.SKIPPED, skipped + 1.0)


@triton.jit(do_not_specialize=["only_ragged"], do_not_specialize_on_alignment=["grad_scale_ptr"])
def norms(
    tensors_ptr,
    matrices_ptr,
    tiles_ptr,
    given_ptr,
    numbers_ptr,
    notes_ptr,
    inverses_ptr,
    means_ptr,
    pairs_ptr,
    grad_scale_ptr,
    only_ragged,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
):
    """Run a program for each tile of a shard: ΣU² and ΣX²."""
    tl.static_assert(TABLES != "")
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(tiles_ptr + 3 * number).to(tl.int64)
    matrix_ptr = matrices_ptr + place * f.MATRIX
    of = tl.load(matrix_ptr + f.OF)
    tensor_ptr, note_ptr, g_ptr = tensors_ptr + of * f.TENSOR, notes_ptr + of * f.NOTES, given_ptr + of * f.GIVEN
    if is_stepped(tl.load(g_ptr + f.G_ADDRESS), only_ragged, ALIGNED):
        first, first_col = tl.load(tiles_ptr + 3 * number + 1), tl.load(tiles_ptr + 3 * number + 2)
        tile = describe(tensor_ptr, matrix_ptr, g_ptr, first, first_col, GT, DT, ST, ALIGNED)
        group_ptr, one = numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS, tl.full((), 1.0, ST)
        s = rates_of(note_ptr, group_ptr, means_ptr + place, grad_scale_ptr, tile, one, ST)
        u2, x2 = visit_any(tensor_ptr, tile, s, inverses_ptr, DT, ST, ALIGNED, MOMENTUM, 0, NORMS)
        tl.store(pairs_ptr + 2 * number, u2)
        tl.store(pairs_ptr + 2 * number + 1, x2)


@triton.jit
def sum_squares(
    tensors_ptr, matrices_ptr, tiles_ptr, number, DT: tl.constexpr, ST: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return ΣX² of a tile: to the bit as the last pass does, but where squares leave the range of their type."""
    matrix_ptr = matrices_ptr + tl.load(tiles_ptr + 3 * number).to(tl.int64) * f.MATRIX
    tensor_ptr = tensors_ptr + tl.load(matrix_ptr + f.OF) * f.TENSOR
    first, first_col = tl.load(tiles_ptr + 3 * number + 1), tl.load(tiles_ptr + 3 * number + 2)
    tile = describe(tensor_ptr, matrix_ptr, tensor_ptr, first, first_col, DT, DT, ST, ALIGNED)
    x2, wide = visit_any(tensor_ptr, tile, tile, tensor_ptr, DT, ST, ALIGNED, 0, 0, SQUARES)
    return tl.where(differs(x2, wide), wide, x2)


@triton.jit
def heaviest(squares_ptr, tensor_ptr):
    """Find the tile of a tensor that had the largest ΣX², or one that had a NaN."""
    first, count = tl.load(tensor_ptr + f.FIRST_TILE), tl.load(tensor_ptr + f.TILES).to(tl.int32)
    most, found = tl.full((), -1.0, tl.float64), first
    for i in range(0, count, LINE):
        numbers = first + i + tl.arange(0, LINE)
        sums = tl.load(squares_ptr + numbers, mask=numbers < first + count, other=-1.0)
        sums = tl.where(sums == sums, sums, float("inf"))
        largest = tl.max(sums, 0)
        found = tl.where(largest > most, tl.min(tl.where(sums == largest, numbers, first + count), 0), found)
        most = at_least(largest, most)
    return found


@triton.jit(do_not_specialize=["tensor_count"])
def begin_step(
    tensors_ptr,
    matrices_ptr,
    tiles_ptr,
    checks_ptr,
    given_ptr,
    numbers_ptr,
    notes_ptr,
    squares_ptr,
    changes_ptr,
    tensor_count,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Run a program for each tensor: its rates; then one for each tile to check: (tensor, tile), −1 is the heaviest."""
    tl.static_assert(TABLES != "")
    program = tl.program_id(0).to(tl.int64)
    number, check = program, program - tensor_count
    if check >= 0:
        number = tl.load(checks_ptr + 2 * check).to(tl.int64)
    tensor_ptr, note_ptr, g_ptr = (
        tensors_ptr + number * f.TENSOR,
        notes_ptr + number * f.NOTES,
        given_ptr + number * f.GIVEN,
    )
    if tl.load(g_ptr + f.G_ADDRESS) != 0:
        group_ptr = numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS
        if program < tensor_count:
            rates.write_rates(tensor_ptr, group_ptr, note_ptr)
        elif (tl.load(group_ptr + rates.RELATIVE) != 0) & (tl.load(g_ptr + f.MUST_MEASURE) == 0):
            tile = tl.load(checks_ptr + 2 * check + 1).to(tl.int64)
            if tile < 0:
                tile = heaviest(squares_ptr, tensor_ptr)
            x2 = sum_squares(tensors_ptr, matrices_ptr, tiles_ptr, tile, DT, ST, ALIGNED)
            tl.store(changes_ptr + check, tl.where(differs(x2, tl.load(squares_ptr + tile)), 1, 0))


@triton.jit
def measure(
    tensors_ptr,
    matrices_ptr,
    tiles_ptr,
    shares_ptr,
    given_ptr,
    numbers_ptr,
    squares_ptr,
    changes_ptr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Run a program for some tiles of a tensor, (tensor, first, end); nearly always there is nothing to do."""
    tl.static_assert(TABLES != "")
    program = tl.program_id(0).to(tl.int64)
    number = tl.load(shares_ptr + 3 * program).to(tl.int64)
    tensor_ptr, g_ptr = tensors_ptr + number * f.TENSOR, given_ptr + number * f.GIVEN
    group_ptr = numbers_ptr + tl.load(tensor_ptr + f.GROUP) * rates.NUMBERS
    checks = tl.load(tensor_ptr + f.CHECKS).to(tl.int32)
    is_changed = total(changes_ptr + tl.load(tensor_ptr + f.FIRST_CHECK), checks, 1) > 0
    is_wanted = is_changed | (tl.load(g_ptr + f.MUST_MEASURE) != 0)
    if is_wanted & (tl.load(group_ptr + rates.RELATIVE) != 0) & (tl.load(g_ptr + f.G_ADDRESS) != 0):
        first, end = tl.load(shares_ptr + 3 * program + 1), tl.load(shares_ptr + 3 * program + 2)
        for tile in range(first, end):
            at = tl.full((), 0, tl.int64) + tile
            tl.store(squares_ptr + at, sum_squares(tensors_ptr, matrices_ptr, tiles_ptr, at, DT, ST, ALIGNED))
