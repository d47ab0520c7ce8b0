"""The first walk: R, the column sums of G² and of G²/R, and whether G² is finite. It changes nothing but scratch.

A unit is a run of rows of one matrix. Its program keeps whole rows in registers: row sums give R of these rows, and at
once both column sums, of G² and of G²/R, grow in registers for the whole unit. So G is read once, whatever the cache
does; at its end a unit writes two vectors. ΣU² = mean(R)·Σⱼ(column sum of G²/R)ⱼ/Cⱼ, as soon as C is known.

G² fits its type but a sum of it may not: `shrink`, a power of two, keeps sums in range, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import address, average, blend, divide, inverse_root, kept, now, reciprocal


@triton.jit
def energy(square, g, moments, at, mask, new, unscale, w1, OF_GRADIENT: tl.constexpr):
    """(G/√R)², shrunk and scaled as `square` is, or that of their average; `new` is R, in a shape that broadcasts."""
    if OF_GRADIENT:
        a = blend(tl.load(moments + at, mask=mask, other=0.0), g * unscale, w1) * inverse_root(new)
        return a * a
    else:
        return square * reciprocal(new)


@triton.jit
def columns_of(matrix, scratch, first_unit, m, ALIGNED: tl.constexpr):
    """Where the column sums of this program's unit belong; not looked up before: registers are scarce."""
    unit = tl.program_id(0).to(tl.int64) + first_unit
    start = tl.load(matrix + f.PARTIAL) + 2 * m.to(tl.int64) * (unit - tl.load(matrix + f.OWN_UNIT))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return scratch + start


@triton.jit
def in_full(energies, shrink, grad_scale, OF_GRADIENT: tl.constexpr):
    """Sums of `energy` as they should be. Once for a column, so that the loop needs fewer registers."""
    if OF_GRADIENT:
        return energies
    else:
        unscale = divide(1.0, tl.load(grad_scale).to(energies.dtype))
        return energies * (unscale * unscale * divide(1.0, shrink))


@triton.jit
def leave(sums, first_unit, row_sum, energy, probe):
    """Leave the sums of this program's unit."""
    unit = tl.program_id(0).to(tl.int64) + first_unit
    tl.store(sums + unit * f.SUMS + f.ROW_SUM, row_sum.to(tl.float64))
    tl.store(sums + unit * f.SUMS + f.ENERGY, energy.to(tl.float64))
    tl.store(sums + unit * f.SUMS + f.PROBE, probe.to(tl.float64))


@triton.jit
def rows_at_once(
    places,
    strides,
    extent,
    rates,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows `first` to `end`, ROWS whole rows in registers at a time; WIDTH is the power of two not below m."""
    g, moments, state, new_row, matrix, scratch, sums, grad_scale = places
    gp, gq, xp, xq, row_stride = strides
    first_unit, m, first, end, row_end, col_end = extent
    w1, w2, beta2, eps, shrink, share, unscale = rates
    cols = tl.arange(0, WIDTH)
    lane = tl.arange(0, ROWS)
    square_sum, energy_sum = tl.zeros((WIDTH,), ST), tl.zeros((WIDTH,), ST)
    row_sum = tl.zeros((ROWS,), ST)
    across = cols if ALIGNED else cols * gq
    old = tl.load(state + (first + lane).to(tl.int64) * row_stride, mask=first + lane < row_end, other=1.0)
    for i in tl.range(first, end, ROWS, num_stages=STAGES):
        rows = i + lane
        inside = rows < end
        mask = inside[:, None] & (cols < m)[None, :]
        far = rows.to(tl.int64)
        x = tl.load(g + far[:, None] * gp + across[None, :], mask=mask, other=0.0).to(ST)
        # R of the next rows: off the critical path
        ahead = tl.load(state + (far + ROWS) * row_stride, mask=rows + ROWS < row_end, other=1.0)
        square = x * x * shrink
        new = kept(old, w2, beta2) + (tl.sum(square, 1) * share + eps)  # the only meeting of the warps in an iteration
        tl.store(new_row + rows, new, mask=rows < row_end)
        row_sum += tl.where(inside, new * shrink, 0.0)
        square_sum += tl.sum(square, 0)  # a thread holds all ROWS of its columns: nothing is exchanged
        at_m = far[:, None] * xp + (cols if ALIGNED else cols * xq)[None, :]
        energy_sum += tl.sum(energy(square, x, moments, at_m, mask, new[:, None], unscale, w1, OF_GRADIENT), 0)
        old = ahead
    partial = columns_of(matrix, scratch, first_unit, m, ALIGNED)
    energy_sum = in_full(energy_sum, shrink, grad_scale, OF_GRADIENT)
    late = tl.arange(WIDTH, 2 * WIDTH) - WIDTH  # `cols`, but not kept in registers during the loop
    tl.store(partial + late, square_sum, mask=late < col_end)
    tl.store(partial + m + late, energy_sum, mask=late < col_end)
    own = tl.where(col_end > 0, 0.0, tl.sum(energy_sum, 0))
    leave(sums, first_unit, tl.sum(row_sum, 0), own, tl.sum(square_sum * 0.0, 0))


@triton.jit
def short_rows(
    places,
    strides,
    extent,
    rates,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same for short rows, one row to a warp.

    The tile is (WIDTH / CHUNK, ROWS, CHUNK), CHUNK being 512 bytes, so that a row's sum needs no other warp; the column
    sums are kept for each row of the tile until the end.
    """
    g, moments, state, new_row, matrix, scratch, sums, grad_scale = places
    gp, gq, xp, xq, row_stride = strides
    first_unit, m, first, end, row_end, col_end = extent
    w1, w2, beta2, eps, shrink, share, unscale = rates
    cols = tl.arange(0, WIDTH // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    lane = tl.arange(0, ROWS)
    one, spread = (first < end).to(tl.int32), tl.zeros((1, 32), tl.int32)  # a stride that the compiler does not know
    square_sum = tl.zeros((WIDTH // CHUNK, ROWS, CHUNK), ST)
    energy_sum = tl.zeros((WIDTH // CHUNK, ROWS, CHUNK), ST)
    row_sum = tl.zeros((ROWS,), ST)
    step = gp.to(tl.int64) * ROWS
    across = cols if ALIGNED else cols * gq
    old = tl.load(state + (first + lane).to(tl.int64) * row_stride, mask=first + lane < row_end, other=1.0)
    here = g + (first + lane).to(tl.int64) * gp
    for i in tl.range(first, end, ROWS, num_stages=STAGES):
        rows = i + lane
        inside = rows < end
        mask = inside[None, :, None] & (cols < m)[:, None, :]
        far = rows.to(tl.int64)
        x = tl.load(here[None, :, None] + across[:, None, :], mask=mask, other=0.0).to(ST)
        ahead = tl.load(state + (far + ROWS) * row_stride, mask=rows + ROWS < row_end, other=1.0)
        square = x * x * shrink
        new = kept(old, w2, beta2) + (tl.sum(tl.sum(square, 0), 1) * share + eps)
        # spread over lanes that are masked: a vector of ROWS would be handed round among the warps first
        owner = (rows < row_end)[:, None] & (tl.arange(0, 32) == 0)[None, :]
        tl.store(new_row + (rows[:, None] * one + spread), new[:, None] + spread.to(ST), mask=owner)
        row_sum += tl.where(inside, new * shrink, 0.0)
        square_sum += square
        at_m = far[None, :, None] * xp + (cols if ALIGNED else cols * xq)[:, None, :]
        energy_sum += energy(square, x, moments, at_m, mask, new[None, :, None], unscale, w1, OF_GRADIENT)
        old = ahead
        here += step
    squares = tl.sum(square_sum, 1)
    probe = tl.sum(tl.sum(squares * 0.0, 1), 0)
    partial = columns_of(matrix, scratch, first_unit, m, ALIGNED)
    COUNT: tl.constexpr = WIDTH // CHUNK
    late = (tl.arange(COUNT, 2 * COUNT) - COUNT)[:, None] * CHUNK + (tl.arange(CHUNK, 2 * CHUNK) - CHUNK)[None, :]
    tl.store(partial + late, squares, mask=late < col_end)
    energies = in_full(tl.sum(energy_sum, 1), shrink, grad_scale, OF_GRADIENT)
    tl.store(partial + m + late, energies, mask=late < col_end)
    own = tl.where(col_end > 0, 0.0, tl.sum(tl.sum(energies, 1), 0))
    leave(sums, first_unit, tl.sum(row_sum, 0), own, probe)


@triton.jit
def rows_twice(
    places,
    strides,
    extent,
    rates,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The same for rows that no program can hold: G is read twice, first for R, then for the column sums."""
    g, moments, state, new_row, matrix, scratch, sums, grad_scale = places
    gp, gq, xp, xq, row_stride = strides
    first_unit, m, first, end, row_end, col_end = extent
    w1, w2, beta2, eps, shrink, share, unscale = rates
    lane = tl.arange(0, ROWS)
    row_sum = tl.zeros((ROWS,), ST)
    for i in range(first, end, ROWS):
        rows = i + lane
        far = rows.to(tl.int64)
        square_sum = tl.zeros((ROWS, WIDTH), ST)
        for j in range(0, m, WIDTH):
            cols = j + tl.arange(0, WIDTH)
            across = cols if ALIGNED else cols * gq
            mask = (rows < end)[:, None] & (cols < m)[None, :]
            x = tl.load(g + far[:, None] * gp + across[None, :], mask=mask, other=0.0).to(ST)
            square_sum += x * x * shrink
        old = tl.load(state + far * row_stride, mask=rows < row_end, other=1.0)
        new = kept(old, w2, beta2) + (tl.sum(square_sum, 1) * share + eps)
        tl.store(new_row + rows, new, mask=rows < end)
        row_sum += tl.where(rows < end, new * shrink, 0.0)
    partial = columns_of(matrix, scratch, first_unit, m, ALIGNED)
    tl.debug_barrier()  # the new R is read below by other threads than wrote it
    energy_all, probe = tl.zeros((WIDTH,), ST), tl.zeros((WIDTH,), ST)
    for j in range(0, m, WIDTH):
        cols = j + tl.arange(0, WIDTH)
        across = cols if ALIGNED else cols * gq
        squares, energies = tl.zeros((ROWS, WIDTH), ST), tl.zeros((ROWS, WIDTH), ST)
        for i in range(first, end, ROWS):
            rows = i + lane
            far = rows.to(tl.int64)
            mask = (rows < end)[:, None] & (cols < m)[None, :]
            x = tl.load(g + far[:, None] * gp + across[None, :], mask=mask, other=0.0).to(ST)
            square = x * x * shrink
            squares += square
            at_m = far[:, None] * xp + (cols if ALIGNED else cols * xq)[None, :]
            new = tl.load(new_row + rows, mask=rows < end, other=1.0)
            energies += energy(square, x, moments, at_m, mask, new[:, None], unscale, w1, OF_GRADIENT)
        square_sum = tl.sum(squares, 0)
        energy_sum = in_full(tl.sum(energies, 0), shrink, grad_scale, OF_GRADIENT)
        tl.store(partial + cols, square_sum, mask=cols < col_end)
        tl.store(partial + m + cols, energy_sum, mask=cols < col_end)
        energy_all += energy_sum
        probe += square_sum * 0.0
    leave(sums, first_unit, tl.sum(row_sum, 0), tl.where(col_end > 0, 0.0, tl.sum(energy_all, 0)), tl.sum(probe, 0))


@triton.jit
def whole(
    g,
    moments,
    state,
    sums,
    first_unit,
    count,
    first,
    end,
    w1,
    w2,
    beta2,
    eps,
    unscale,
    ST: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    LINES: tl.constexpr,
):
    """Algorithm 5, for a tensor whose second moment is kept whole: ΣU² and whether G² is finite."""
    energy_sum, probe = tl.zeros((LINES * f.LINE,), ST), tl.zeros((LINES * f.LINE,), ST)
    for i in range(first, end, LINES):
        at = (tl.full((), 0, tl.int64) + i) * f.LINE + tl.arange(0, LINES * f.LINE)
        mask = at < count
        x = tl.load(g + at, mask=mask, other=0.0).to(ST) * unscale
        square = x * x
        v = average(tl.load(state + at, mask=mask, other=1.0), square + eps, w2, beta2)
        if OF_GRADIENT:
            x = blend(tl.load(moments + at, mask=mask, other=0.0), x, w1)
        u = x * inverse_root(v)
        energy_sum += tl.where(mask, u * u, 0.0)
        probe += square * 0.0
    leave(sums, first_unit, tl.full((), 0.0, ST), tl.sum(energy_sum, 0), tl.sum(probe, 0))


@triton.jit(do_not_specialize=["first_unit"], do_not_specialize_on_alignment=["grad_scale"])
def first_walk(
    tensors,
    matrices,
    units,
    given,
    numbers,
    rates,
    vectors,
    scratch,
    sums,
    grad_scale,
    first_unit,
    GT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
    LONG: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program for a unit: (matrix, first row, end row)."""
    unit = tl.program_id(0).to(tl.int64) + first_unit
    matrix = matrices + tl.load(units + 3 * unit).to(tl.int64) * f.MATRIX
    number = tl.load(matrix + f.OF)
    tensor = tensors + number * f.TENSOR
    if tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0:
        first, end = tl.load(units + 3 * unit + 1), tl.load(units + 3 * unit + 2)
        g_offset, x_offset = tl.load(matrix + f.G_OFFSET), tl.load(matrix + f.X_OFFSET)
        m = tl.load(tensor + f.M)
        gp, gq = tl.load(tensor + f.GP).to(tl.int32), tl.load(tensor + f.GQ).to(tl.int32)
        xp, xq = tl.load(tensor + f.XP).to(tl.int32), tl.load(tensor + f.XQ).to(tl.int32)
        if ALIGNED:
            g_offset, x_offset = tl.multiple_of(g_offset, 16), tl.multiple_of(x_offset, 16)
            m = tl.multiple_of(m, 16)
            gp, xp = tl.multiple_of(gp, 16), tl.multiple_of(xp, 16)
        g = address(given, number * f.GIVEN + f.G_ADDRESS, GT, ALIGNED) + g_offset
        moments = address(tensor, f.MOMENTUM, ST, ALIGNED) + x_offset
        group = numbers + tl.load(tensor + f.GROUP) * f.NUMBERS
        eps = tl.load(group + f.EPS1).to(ST)
        unscale = divide(1.0, tl.load(grad_scale).to(ST))
        t, w2, beta2, w1 = now(tensor, number, group, rates)
        w2, beta2, w1 = w2.to(ST), beta2.to(ST), w1.to(ST)
        if tl.load(tensor + f.FULL) != 0:
            if not LONG:
                state = address(tensor, f.FULL, ST, ALIGNED)
                whole(
                    g,
                    moments,
                    state,
                    sums,
                    first_unit,
                    m,
                    first,
                    end,
                    w1,
                    w2,
                    beta2,
                    eps,
                    unscale,
                    ST,
                    OF_GRADIENT,
                    TILE // 1024,
                )
        else:
            has_row, has_col = tl.load(tensor + f.ROW) != 0, tl.load(tensor + f.COL) != 0
            state = address(tensor, f.ROW, ST, False) + tl.load(matrix + f.ROW_OFFSET)
            new_row = vectors + tl.load(matrix + f.NEW_ROW)
            shrink = tl.load(tensor + f.SHRINK).to(tl.float64, bitcast=True)
            share = (1.0 / (tl.load(tensor + f.WHOLE_M).to(tl.float64) * shrink)).to(ST)
            w2 = tl.where(has_row, w2, 0.0)  # without R, 1.0 stands for it and stays
            length = m.to(tl.int32)
            a = (g, moments, state, new_row, matrix, scratch, sums, grad_scale)
            b = (gp, gq, xp, xq, tl.load(tensor + f.ROW_STRIDE).to(tl.int32))
            # a matrix may have no R or no C (§3.2): then it ends before its first row or column
            row_end, col_end = tl.where(has_row, end, 0), tl.where(has_col, length, 0)
            if ALIGNED:
                col_end = tl.multiple_of(col_end, 16)
            c = (first_unit, length, first, end, row_end, col_end)
            d = (w1, w2, beta2, eps * w2, shrink.to(ST), share * unscale * unscale * w2, unscale)
            if LONG:
                if ALIGNED and length <= TILE // 2:
                    rows_at_once(a, b, c, d, ST, ALIGNED, OF_GRADIENT, 2, TILE // 2, STAGES)
                elif ALIGNED and length <= TILE:
                    rows_at_once(a, b, c, d, ST, ALIGNED, OF_GRADIENT, 1, TILE, STAGES)
                else:
                    rows_twice(a, b, c, d, ST, ALIGNED, OF_GRADIENT, 4, TILE // 8)
            elif length <= 128:
                rows_at_once(a, b, c, d, ST, ALIGNED, OF_GRADIENT, TILE // 128, 128, STAGES)
            elif length <= 1024:
                short_rows(
                    a, b, c, d, ST, ALIGNED, OF_GRADIENT, TILE // 1024, 1024, 4096 // GT.primitive_bitwidth, STAGES
                )
            elif length <= TILE // 4:
                rows_at_once(a, b, c, d, ST, ALIGNED, OF_GRADIENT, 4, TILE // 4, STAGES)
            else:
                rows_at_once(a, b, c, d, ST, ALIGNED, OF_GRADIENT, 2, TILE // 2, STAGES)
