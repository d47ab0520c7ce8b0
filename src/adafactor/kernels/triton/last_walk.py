"""The last walk: X, and what is kept of G: R, C, V̂ and the momentum. Also ΣX², which the next step relies on.

A piece is PIECE rows of BLOCK columns. Nothing is done for a tensor whose step is not taken. Somebody may write to X
between two steps, behind torch's back, so before anything is written two walks by a step of length zero, which find
the same bits in the same X, see to it that ΣX² is true:

| | reads | leaves |
|---|---|---|
| `CHECK` | the heaviest piece of a tensor and a sample of the others (`cut.checked`) | whether one was changed |
| `MEASURE` | tensors of which one was, and those of which nothing is known | ΣX² of every piece |
| `STEP` | everything | X; and whether a piece was changed that `CHECK` did not see: the next step measures |
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import (
    address,
    at_least,
    average,
    blend,
    divide,
    inverse_root,
    narrow,
    random_words,
    remainder,
    root,
    stochastic,
    total,
)
from adafactor.kernels.triton.fold import newer

MEASURE, STEP, CHECK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def write(
    x,
    m,
    kept,
    at,
    mask,
    live_mask,
    number,
    u,
    scalars,
    DT: tl.constexpr,
    ST: tl.constexpr,
    OF_UPDATE: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """X·(1 − ρₜ·λ) − αₜ·Û, rounded as the settings say; return what was there and what is there now, as numbers."""
    scale, decay, w1, key1, key2 = scalars
    old = tl.load(x + at, mask=mask, other=0.0).to(ST)
    change = u * scale
    if OF_UPDATE:
        change = blend(tl.load(m + at, mask=live_mask, other=0.0), change, w1)
        tl.store(m + at, change, mask=live_mask)
    exact = old
    if ROUNDING == 2:
        exact = old + remainder(tl.load(kept + at, mask=live_mask, other=0.0).to(ST), old, DT)
    exact = exact * decay - change
    if ROUNDING == 1:
        new = stochastic(exact, random_words(number, key1, key2), DT)
    else:
        new = narrow(exact, DT)
    tl.store(x + at, new, mask=live_mask)
    value = new.to(ST)
    if ROUNDING == 2:
        lost = tl.where(tl.abs(value) < float("inf"), exact - value, 0.0)
        tl.store(kept + at, narrow(lost, DT), mask=live_mask)
    unit = f.X_UNIT
    return old * unit, tl.where(live_mask, value, old) * unit


@triton.jit
def lines(
    places,
    strides,
    extent,
    scalars,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A piece of a matrix; return ΣX² before and after."""
    g, x, m, kept, new_row, new_col, row, col = places
    gp, gq, xp, xq, row_stride, col_stride, number_p, number_q = strides
    n, width, first, first_col, row_end, col_end, live_end, origin = extent
    scale, decay, w1, key1, key2, unscale, mean_row = scalars
    cols = first_col + tl.arange(0, BLOCK)
    if ALIGNED:
        cols = tl.max_contiguous(tl.multiple_of(cols, BLOCK), BLOCK)
        across_g, across_x = cols, cols
    else:
        across_g, across_x = cols * gq, cols * xq
    inside = cols < width
    c = tl.load(new_col + cols, mask=cols < col_end, other=1.0)
    if first == 0:
        tl.store(col + cols.to(tl.int64) * col_stride, c, mask=cols < col_end)
    c = inverse_root(c)
    before, after = tl.zeros((ROWS, BLOCK), ST), tl.zeros((ROWS, BLOCK), ST)
    end = tl.minimum(first + PIECE, n)
    for i in tl.range(first, end, ROWS, num_stages=STAGES, disable_licm=ROUNDING == 1):
        rows = i + tl.arange(0, ROWS)
        far = rows.to(tl.int64)
        mask = (rows < end)[:, None] & inside[None, :]
        live_mask = (rows < tl.minimum(end, live_end))[:, None] & inside[None, :]
        own = rows < tl.minimum(end, row_end)
        r = tl.load(new_row + rows, mask=own, other=1.0)
        tl.store(row + far * row_stride, r, mask=(rows < tl.where(first_col == 0, tl.minimum(end, row_end), 0)))
        r = inverse_root(divide(r, mean_row))
        at = far[:, None] * xp + across_x[None, :]
        a = tl.load(g + far[:, None] * gp + across_g[None, :], mask=live_mask, other=0.0).to(ST) * unscale
        if MOMENTUM == 2:
            a = blend(tl.load(m + at, mask=live_mask, other=0.0), a, w1)
            tl.store(m + at, a, mask=live_mask)
        u = a * r[:, None] * c[None, :]
        number = origin + far[:, None] * number_p + cols.to(tl.int64)[None, :] * number_q
        s = (scale, decay, w1, key1, key2)
        was, is_ = write(x, m, kept, at, mask, live_mask, number, u, s, DT, ST, MOMENTUM == 1, ROUNDING)
        before += was * was
        after += is_ * is_
    return tl.sum(tl.sum(before, 1), 0), tl.sum(tl.sum(after, 1), 0)


@triton.jit
def whole(
    places,
    extent,
    scalars,
    rate,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A piece of a tensor whose second moment is kept whole; return ΣX² before and after."""
    g, x, m, kept, full = places
    count, live_count, first, n, origin, number_p = extent
    scale, decay, w1, key1, key2, unscale = scalars
    w2, beta2, eps = rate
    SIZE: tl.constexpr = ROWS * f.LINE
    before, after = tl.zeros((SIZE,), ST), tl.zeros((SIZE,), ST)
    for i in range(first, tl.minimum(first + PIECE, n), ROWS):
        at = (tl.full((), 0, tl.int64) + i) * f.LINE + tl.arange(0, SIZE)
        mask, live_mask = at < count, at < live_count
        a = tl.load(g + at, mask=live_mask, other=0.0).to(ST) * unscale
        v = average(tl.load(full + at, mask=live_mask, other=1.0), a * a + eps, w2, beta2)
        tl.store(full + at, v, mask=live_mask)
        if MOMENTUM == 2:
            a = blend(tl.load(m + at, mask=live_mask, other=0.0), a, w1)
            tl.store(m + at, a, mask=live_mask)
        u = a * inverse_root(tl.where(live_mask, v, 1.0))
        s = (scale, decay, w1, key1, key2)
        number = origin + at * number_p
        was, is_ = write(x, m, kept, at, mask, live_mask, number, u, s, DT, ST, MOMENTUM == 1, ROUNDING)
        before += was * was
        after += is_ * is_
    return tl.sum(before, 0), tl.sum(after, 0)


@triton.jit
def clipped(u2, clip, count, ST: tl.constexpr):
    """RMS(U) and max(1, RMS(U)/d); in single precision where that is what is kept: doubles are slow on many cards."""
    mean = u2 * (1.0 / count)
    large = mean > 1e30  # beyond it, the root of the mean is taken in two parts
    rms = root((mean * tl.where(large, 2.0**-120, 1.0)).to(ST)) * tl.where(large, 2.0**60, 1.0).to(ST)
    divisor = tl.where(clip > 0, at_least(1.0, divide(rms, tl.where(clip > 0, clip, 1.0).to(ST))), 1.0)
    return rms, divisor


@triton.jit
def piece_of(
    tables,
    piece,
    scale,
    decay,
    live,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take one piece through the walk, with this scale of U; return ΣX² before and after."""
    tensors, matrices, pieces, given, numbers, notes, vectors, means, grad_scale = tables
    place = tl.load(pieces + 3 * piece).to(tl.int64)
    matrix = matrices + place * f.MATRIX
    number = tl.load(matrix + f.OF)
    tensor, note = tensors + number * f.TENSOR, notes + number * f.NOTES
    group = numbers + tl.load(tensor + f.GROUP) * f.NUMBERS
    first, first_col = tl.load(pieces + 3 * piece + 1), tl.load(pieces + 3 * piece + 2)
    g_offset, x_offset = tl.load(matrix + f.G_OFFSET), tl.load(matrix + f.X_OFFSET)
    n, width = tl.load(tensor + f.N).to(tl.int32), tl.load(tensor + f.M)
    gp, gq = tl.load(tensor + f.GP), tl.load(tensor + f.GQ).to(tl.int32)
    xp, xq = tl.load(tensor + f.XP), tl.load(tensor + f.XQ).to(tl.int32)
    if ALIGNED:
        g_offset, x_offset = tl.multiple_of(g_offset, 16), tl.multiple_of(x_offset, 16)
        gp, xp, width = tl.multiple_of(gp, 16), tl.multiple_of(xp, 16), tl.multiple_of(width, 16)
    g = address(given, number * f.GIVEN + f.G_ADDRESS, GT, ALIGNED) + g_offset
    x = address(tensor, f.X, DT, ALIGNED) + x_offset
    m = address(tensor, f.MOMENTUM, ST, ALIGNED) + x_offset
    kept = address(tensor, f.COMPENSATION, DT, ALIGNED) + x_offset
    key1 = tl.load(note + f.KEY1).to(tl.int64).to(tl.uint32)
    key2 = tl.load(note + f.KEY2).to(tl.int64).to(tl.uint32)
    w1, w2 = tl.load(note + f.W1).to(ST), tl.load(note + f.W2).to(ST)
    unscale = divide(1.0, tl.load(grad_scale).to(ST))
    origin, number_p = tl.load(matrix + f.NUMBER), tl.load(tensor + f.NUMBER_P)
    before, after = tl.full((), 0.0, ST), tl.full((), 0.0, ST)
    if tl.load(tensor + f.FULL) != 0:
        live_count = tl.where(live, width, 0)
        if ALIGNED:
            live_count = tl.multiple_of(live_count, 16)
        before, after = whole(
            (g, x, m, kept, address(tensor, f.FULL, ST, ALIGNED)),
            (width, live_count, first, n, origin, number_p),
            (scale, decay, w1, key1, key2, unscale),
            (w2, tl.load(note + f.BETA2_NOW).to(ST), tl.load(group + f.EPS1).to(ST)),
            GT,
            DT,
            ST,
            ALIGNED,
            MOMENTUM,
            ROUNDING,
            32,
            2,
        )
    else:
        length = width.to(tl.int32)
        row_address, col_address = tl.load(tensor + f.ROW), tl.load(tensor + f.COL)
        has_row, has_col = row_address != 0, col_address != 0
        row = row_address.to(tl.pointer_type(ST)) + tl.load(matrix + f.ROW_OFFSET)
        col = col_address.to(tl.pointer_type(ST)) + tl.load(matrix + f.COL_OFFSET)
        new_row, new_col = vectors + tl.load(matrix + f.NEW_ROW), vectors + tl.load(matrix + f.NEW_COL)
        mean_row = tl.load(means + place, mask=has_row & has_col & live, other=1.0).to(ST)
        places = (g, x, m, kept, new_row, new_col, row, col)
        strides = (
            gp,
            gq,
            xp,
            xq,
            tl.load(tensor + f.ROW_STRIDE),
            tl.load(tensor + f.COL_STRIDE),
            number_p,
            tl.load(tensor + f.NUMBER_Q),
        )
        # nothing is live while ΣX² is measured, and a matrix may have no R or no C (§3.2)
        live_end, row_end = tl.where(live, n, 0), tl.where(live & has_row, n, 0)
        col_end = tl.where(live & has_col, length, 0)
        if ALIGNED:
            col_end = tl.multiple_of(col_end, 16)
        extent = (n, length, first, first_col, row_end, col_end, live_end, origin)
        s = (scale, decay, w1, key1, key2, unscale, mean_row)
        HALF: tl.constexpr = 2 if ST == tl.float64 else 1
        if length <= 128:
            before, after = lines(
                places, strides, extent, s, GT, DT, ST, ALIGNED, MOMENTUM, ROUNDING, 128, 16 // HALF, 128, STAGES
            )
        else:
            before, after = lines(
                places, strides, extent, s, GT, DT, ST, ALIGNED, MOMENTUM, ROUNDING, 32, 4 // HALF, 512, STAGES
            )
    return before, after


@triton.jit
def visit(
    tables,
    piece,
    scalars,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take a piece through the walk; leave its ΣX², and a note if it is not what the last step has left."""
    squares, carried, left, note, mode, scale, decay = scalars
    before, after = piece_of(tables, piece, scale, decay, mode == STEP, GT, DT, ST, ALIGNED, MOMENTUM, ROUNDING, STAGES)
    known = tl.load(squares + piece * f.SQUARES + carried, mask=mode != MEASURE, other=0.0)  # which writes it below
    NEAR: tl.constexpr = 1e-6 if ST == tl.float32 else 1e-14
    is_known = tl.abs(before - known) <= NEAR * known  # of a NaN nothing is known
    tl.store(note + f.STALE, 1.0, mask=(mode != MEASURE) & (not is_known))
    tl.store(squares + piece * f.SQUARES + left, after, mask=mode != CHECK)


@triton.jit
def heaviest(squares, tensor, turn):
    """The piece of a tensor that had the largest ΣX², or one that had a NaN."""
    first, count = tl.load(tensor + f.FIRST_PIECE), tl.load(tensor + f.PIECES).to(tl.int32)
    most, found = tl.full((), -1.0, tl.float64), first
    for i in range(0, count, 512):
        at = first + i + tl.arange(0, 512)
        sums = tl.load(squares + at * f.SQUARES + turn, mask=at < first + count, other=-1.0).to(tl.float64)
        sums = tl.where(sums == sums, sums, float("inf"))
        largest = tl.max(sums, 0)
        found = tl.where(largest > most, tl.min(tl.where(sums == largest, at, first + count), 0), found)
        most = at_least(largest, most)
    return found


@triton.jit(do_not_specialize=["what"], do_not_specialize_on_alignment=["grad_scale"])
def last_walk(
    tensors,
    matrices,
    pieces,
    spans,
    given,
    numbers,
    notes,
    vectors,
    energies,
    means,
    squares,
    grad_scale,
    what,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One program for a piece, or if SHARED for some, of a tensor: (tensor, first, end); −1 is the heaviest."""
    program = tl.program_id(0).to(tl.int64)
    number = tl.load(spans + 3 * program).to(tl.int64)
    tensor, note = tensors + number * f.TENSOR, notes + number * f.NOTES
    group = numbers + tl.load(tensor + f.GROUP) * f.NUMBERS
    mode = tl.full((), 0, tl.int32) + what
    live, taken = mode == STEP, tl.load(note + f.TAKEN)
    must_measure = tl.load(given + number * f.GIVEN + f.MUST_MEASURE) != 0
    if mode == MEASURE:
        must_measure = must_measure | (tl.load(note + f.STALE) != 0)
    wanted = (must_measure == (mode == MEASURE)) & (tl.load(group + f.RELATIVE) != 0)
    if live:
        wanted = taken > 0
    first, end = tl.load(spans + 3 * program + 1).to(tl.int64), tl.load(spans + 3 * program + 2).to(tl.int64)
    is_here = tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0
    reports = live & is_here & (first == tl.load(tensor + f.FIRST_PIECE))
    if is_here & wanted:
        clip, count = tl.load(group + f.CLIP), tl.load(tensor + f.COUNT).to(tl.float64)
        blocks = tl.where(live, tl.load(tensor + f.BLOCKS), 0).to(tl.int32)
        u2 = tl.load(note + f.U2) + total(energies + tl.load(tensor + f.FIRST_BLOCK), blocks, 1, 512)
        rms_u, divisor = clipped(u2, clip, count, ST)
        alpha = tl.load(note + f.ALPHA)
        scale = tl.where(live, divide(alpha.to(ST), divisor), 0.0)
        decay = tl.where(live, tl.load(note + f.DECAY), 1.0).to(ST)
        turn = tl.load(note + f.TURN)
        if not live:
            turn = newer(note)
        carried, left = turn.to(tl.int64), tl.where(live, 1.0 - turn, turn).to(tl.int64)
        if first < 0:
            first = heaviest(squares, tensor, carried)
        tables = (tensors, matrices, pieces, given, numbers, notes, vectors, means, grad_scale)
        s = (squares, carried, left, note, mode, scale, decay)
        if SHARED:
            for piece in tl.range(first, end, disable_licm=True):
                visit(tables, piece, s, GT, DT, ST, ALIGNED, MOMENTUM, ROUNDING, STAGES)
        else:
            visit(tables, first, s, GT, DT, ST, ALIGNED, MOMENTUM, ROUNDING, STAGES)
        if reports:
            t = tl.load(tensor + f.STEP).to(tl.pointer_type(tl.float32))
            steps = tl.load(t)
            x2, noted_steps, noted_clips = tl.load(note + f.X2), tl.load(note + f.STEPS), tl.load(note + f.CLIPPED)
            tl.debug_barrier()  # every thread has read what is written now
            tl.store(t, steps + 1.0)
            tl.store(note + f.TURNED, 1.0)
            tl.store(note + f.STEPS, noted_steps + 1.0)
            tl.store(note + f.CLIPPED, noted_clips + tl.where(divisor > 1.0, 1.0, 0.0))
            tl.store(note + f.NOTED_RMS_U, rms_u.to(tl.float64))
            tl.store(note + f.NOTED_ALPHA, tl.abs(alpha))
            tl.store(note + f.NOTED_RMS_X, tl.sqrt(x2 * (1.0 / f.X_UNIT / f.X_UNIT) / count))
            tl.store(note + f.NOTED_BETA2, tl.load(note + f.BETA2_NOW))
    elif reports & (taken == 0):
        skipped = tl.load(note + f.SKIPPED)
        tl.debug_barrier()
        tl.store(note + f.SKIPPED, skipped + 1.0)
