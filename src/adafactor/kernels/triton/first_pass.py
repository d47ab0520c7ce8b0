"""The first pass: R, the column sums of G² and of G²/R, and whether G² is finite. It changes nothing but scratch.

A unit is a run of rows of one matrix. Its program keeps whole rows in registers: row sums give R of these rows, and at
once both column sums, of G² and of G²/R, grow in registers for the whole unit. So G is read once, whatever the cache
does; at its end a unit writes two vectors. ΣU² = mean(R)·Σⱼ(column sum of G²/R)ⱼ/Cⱼ, as soon as C is known.

A row is held in chunks, so that it need not be a power of two long. A row that no program can hold is held by several,
each of which has a part of the columns and reads the others only for the row's sum. They run side by side, so that what
one has read from memory the others find in the cache.

G² fits its type but a sum of it may not: `shrink`, a power of two, keeps sums in range, exactly.

With RAW, means of G² + ε₁ take the place of R, and there is no ΣU²: that is what the ranks of a sharded step add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import blend, decayed, inverse_root, number_at
from adafactor.kernels.triton.matrix import is_stepped, look_up
from adafactor.kernels.triton.momentum import BLOCK, Elements, recall


class Unit(NamedTuple):
    """The rows and columns of a unit, where its numbers go, and what they count."""

    first: Any
    end: Any
    row_end: Any  # without R, 0: 1.0 stands for R
    m: Any
    partial_ptr: Any  # column sums
    w2: Any  # 1 − β̂₂; without R, 0
    eps: Any  # what ε₁ counts in R
    shrink: Any
    share: Any  # what a shrunk sum of G² counts in R


@triton.jit
def load_squares(x, g_ptr, rows, cols, block, mask, KIND: tl.constexpr, OF_GRADIENT: tl.constexpr):
    """Load elements of rows of G; return G², and that of which U² is made: the same, or of the average."""
    g = tl.load(g_ptr[:, None] + (cols * x.g_stride_q)[None, :], mask=mask, other=0.0).to(KIND.STAT)
    square = g * g
    term = square
    if OF_GRADIENT:
        offsets = (rows.to(tl.int64) * x.x_stride_p)[:, None] + (cols * x.x_stride_q)[None, :]
        if KIND.lanes:  # a scale is looked up for each element
            blocks, has_scale = cols // x.columns, mask
        else:
            blocks = block + tl.arange(0, max(cols.shape[0] // BLOCK, 1))
            has_scale = (rows < x.n)[:, None] & (blocks * BLOCK < x.m)[None, :]
        e = Elements(offsets, mask, (rows.to(tl.int64) * x.scale_stride)[:, None] + blocks[None, :], has_scale)
        average = blend(recall(x, e, KIND), g * x.unscale, x.w1)
        term = average * average
    return square, term


@triton.jit
def sum_elsewhere(x, u, g_ptr, rows, first_col, end_col, row, shrink, KIND: tl.constexpr, TILING: tl.constexpr):
    """Add to sums of rows the squares of all columns but these, which are whole chunks."""
    cols, width = tl.arange(0, TILING.chunk), end_col - first_col
    for j in range(0, u.m - width, TILING.chunk):
        j += tl.where(j < first_col, 0, width)
        if KIND.aligned:
            j = tl.multiple_of(j, 16)
        mask = (rows < u.end)[:, None] & (j + cols < u.m)[None, :]
        square = load_squares(x, g_ptr, rows, j + cols, 0, mask, KIND, False)[0]
        row = tl.fma(square, shrink, row)
    return row


@triton.jit
def average_rows(x, u, rows, end, old, sums, RAW: tl.constexpr):
    """Average R of some rows with the sums of their squares, and store it; return it in double, and 1/R."""
    new = sums * u.share
    inverse, mask = new, rows < end
    if RAW:
        new = new.to(tl.float64) + u.eps
        tl.store(x.row.wide_ptr + rows, new, mask=mask & (rows < u.row_end))
    else:
        new = decayed(old, u.w2, x.beta2) + (new + u.eps)
        inverse = inverse_root(new)
        tl.store(x.row.inverse_ptr + rows, inverse, mask=mask)
        tl.store(x.row.new_ptr + rows, new, mask=mask & (rows < u.row_end))
    return tl.where(mask, new.to(tl.float64), 0.0), inverse * inverse


@triton.jit
def add_rows(a):
    """Sum along the rows of a tile: many of them in double, to keep the digits."""
    if a.shape[0] > 32:
        return tl.sum(a.to(tl.float64), 0).to(a.dtype)
    else:
        return tl.sum(a, 0)


@triton.jit
def store_columns(x, u, cols, end_col, square, energy, KIND: tl.constexpr, RAW: tl.constexpr):
    """Store the unit's sums of some columns; return what they add to its ΣU² without C, and 0 where all are finite."""
    mask = (cols < end_col) & (cols < x.col.end)
    tl.store(u.partial_ptr + cols, square, mask=mask)
    if not RAW:
        if not KIND.OF_GRADIENT:
            energy = energy * (x.unscale * x.unscale)
        tl.store(u.partial_ptr + u.m + cols, energy, mask=mask)
    return tl.where(x.col.end > 0, 0.0, tl.sum(energy, 0)), tl.sum(square * 0.0, 0)


@triton.jit
def hold_rows(
    x, u, first_col, end_col, KIND: tl.constexpr, TILING: tl.constexpr, STAGES: tl.constexpr, RAW: tl.constexpr
):
    """Take some rows at a time, or a part of them; return the sums of R, of the ΣU² without C, and of the probe."""
    ROWS: tl.constexpr = TILING.rows
    CHUNK: tl.constexpr = TILING.chunk
    CHUNKS: tl.constexpr = TILING.chunks
    end = u.end
    if TILING.is_part:
        end = tl.where(first_col == 0, end, 0)  # R is left to the program that has the first columns
        if KIND.aligned:
            first_col, end_col = tl.multiple_of(first_col, 16), tl.multiple_of(end_col, 16)
    cols, lane, zero = first_col + tl.arange(0, CHUNK), tl.arange(0, ROWS), tl.zeros((ROWS, CHUNK), KIND.STAT)
    shrink, squares, energies = zero + u.shrink, (), ()
    for _ in tl.static_range(CHUNKS):
        squares = squares + (zero,)
        energies = energies + (zero,)
    row_sum = tl.zeros((ROWS,), tl.float64)
    first = (u.first + lane).to(tl.int64)
    g_ptr, old_ptr = x.g_ptr + first * x.g_stride_p, x.row.state_ptr + first * x.row.stride
    old = tl.load(old_ptr, mask=u.first + lane < u.row_end, other=1.0)
    for i in tl.range(u.first, u.end, ROWS, num_stages=STAGES):
        rows = i + lane
        old_ptr += ROWS * x.row.stride
        ahead = tl.load(old_ptr, mask=rows + ROWS < u.row_end, other=1.0)  # off the critical path
        row, terms, new_squares, new_energies = zero, (), (), ()
        if TILING.is_part:
            after = tl.minimum(first_col + CHUNK * CHUNKS, end_col)
            row = sum_elsewhere(x, u, g_ptr, rows, first_col, after, row, shrink, KIND, TILING)
        for k in tl.static_range(CHUNKS):
            mask = (lane == 0)[:, None] if ROWS == 1 else (rows < u.end)[:, None]
            if TILING.is_part or k == CHUNKS - 1:
                mask = mask & (k * CHUNK + cols < end_col)[None, :]
            at, block = k * CHUNK + cols, (first_col + k * CHUNK) // BLOCK
            square, term = load_squares(x, g_ptr, rows, at, block, mask, KIND, KIND.OF_GRADIENT)
            row = tl.fma(square, shrink, row)
            terms = terms + (term,)
            new_squares = new_squares + (tl.fma(square, shrink, squares[k]),)
        new, inverse = average_rows(x, u, rows, end, old, tl.sum(row, 1), RAW)
        row_sum += new
        if not RAW:
            for k in tl.static_range(CHUNKS):
                new_energies = new_energies + (tl.fma(terms[k], zero + inverse[:, None], energies[k]),)
            energies = new_energies
        squares, old = new_squares, ahead
        g_ptr += ROWS * x.g_stride_p
    energy, probe = tl.full((), 0.0, KIND.STAT), tl.full((), 0.0, KIND.STAT)
    for k in tl.static_range(CHUNKS):
        e, p = store_columns(x, u, k * CHUNK + cols, end_col, add_rows(squares[k]), add_rows(energies[k]), KIND, RAW)
        energy += e
        probe += p
    return tl.sum(row_sum, 0), energy, probe


@triton.jit
def sum_unfactored(x, u, KIND: tl.constexpr, ROWS: tl.constexpr):
    """Algorithm 5, for a unit of an unfactored tensor: ΣU² and whether G² is finite."""
    energies, probes = tl.zeros((ROWS * sizes.LINE,), KIND.STAT), tl.zeros((ROWS * sizes.LINE,), KIND.STAT)
    count = x.n * x.m if KIND.lanes else x.m
    for i in range(u.first, u.end, ROWS):
        offsets = (tl.full((), 0, tl.int64) + i) * sizes.LINE + tl.arange(0, ROWS * sizes.LINE)
        mask = offsets < count
        g = tl.load(x.g_ptr + offsets, mask=mask, other=0.0).to(KIND.STAT) * x.unscale
        square = g * g
        v = decayed(tl.load(x.full_ptr + offsets, mask=mask, other=1.0), x.w2, x.beta2) + (square + x.eps) * x.w2
        if KIND.OF_GRADIENT:
            if KIND.lanes:
                blocks, has_scale = offsets // x.m * x.scale_stride + offsets % x.m // x.columns, mask
            else:
                blocks = (tl.full((), 0, tl.int64) + i) * (sizes.LINE // BLOCK)
                blocks += tl.arange(0, ROWS * sizes.LINE // BLOCK)
                has_scale = blocks * BLOCK < x.m
            g = blend(recall(x, Elements(offsets, mask, blocks, has_scale), KIND), g, x.w1)
        update = g * inverse_root(v)
        energies += tl.where(mask, update * update, 0.0)
        probes += square * 0.0
    return tl.full((), 0.0, tl.float64), tl.sum(energies, 0), tl.sum(probes, 0)


@triton.jit
def describe_unit(memory, x, number, first, end, KIND: tl.constexpr, RAW: tl.constexpr):
    """Find out where the numbers of a unit go, and what they count."""
    shrink = tl.load(x.tensor_ptr + f.SHRINK).to(tl.float64, bitcast=True)
    whole = tl.load(x.tensor_ptr + f.WHOLE_M).to(tl.float64)
    share, w2 = (1.0 / (whole * shrink)).to(KIND.STAT), x.w2
    if RAW:
        eps = tl.load(x.group_ptr + rates.EPS1) * x.m.to(tl.float64) / whole
    else:
        w2 = tl.where(x.row.end > 0, w2, 0.0)  # without R, 1.0 stands for it and stays
        share, eps = share * w2, x.eps * w2
    partial = (number - tl.load(x.matrix_ptr + f.OWN_UNIT)) // tl.load(x.tensor_ptr + f.PARTS)
    return Unit(
        first=first,
        end=end,
        row_end=tl.minimum(x.row.end, end),
        m=x.m.to(tl.int32),
        partial_ptr=memory.scratch_ptr + number_at(x.matrix_ptr + f.PARTIAL, KIND) + 2 * x.m * partial,
        w2=w2,
        eps=eps,
        shrink=shrink.to(KIND.STAT),
        share=share * x.unscale * x.unscale,
    )


@triton.jit(do_not_specialize=["first_unit", "only_ragged"])
def first_pass(
    memory,
    first_unit,
    only_ragged,
    KIND: tl.constexpr,
    TILING: tl.constexpr,
    STAGES: tl.constexpr,
    RAW: tl.constexpr,
):
    """Run a program for each unit."""
    number = tl.program_id(0).to(tl.int64) + first_unit
    unit_ptr, sums_ptr = memory.units_ptr + 4 * number, memory.sums_ptr + number * f.SUMS
    place = tl.load(unit_ptr).to(tl.int64)
    if is_stepped(memory, place, only_ragged, KIND):
        x = look_up(memory, place, KIND)
        first, end, first_col = tl.load(unit_ptr + 1), tl.load(unit_ptr + 2), tl.load(unit_ptr + 3)
        u = describe_unit(memory, x, number, first, end, KIND, RAW)
        if TILING.chunks == 0:
            row_sum, energy, probe = sum_unfactored(x, u, KIND, TILING.rows)
        elif not TILING.is_part:
            row_sum, energy, probe = hold_rows(x, u, 0, u.m, KIND, TILING, STAGES, RAW)
        else:
            end_col = tl.minimum(first_col + TILING.width, u.m)
            row_sum, energy, probe = hold_rows(x, u, first_col, end_col, KIND, TILING, STAGES, RAW)
            if TILING.chunk * TILING.chunks < TILING.width:  # one half after the other
                middle = first_col + TILING.chunk * TILING.chunks
                _, more_energy, more_probe = hold_rows(x, u, middle, end_col, KIND, TILING, STAGES, RAW)
                energy, probe = energy + more_energy, probe + more_probe
        tl.store(sums_ptr + f.ROW_SUM, row_sum)
        tl.store(sums_ptr + f.ENERGY, energy.to(tl.float64))
        tl.store(sums_ptr + f.PROBE, probe.to(tl.float64))
