"""The last pass reads G again, and reads and writes X; R and C, or V̂, and the momentum go into the state.

A program has a tile of `groups`·ROWS rows and LINE columns, ROWS rows at a time. If FLAT, the tensor is unfactored and
taken as it lies in memory: m elements in lines of LINE, the last of which may be shorter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import (
    BLOCK,
    full_average,
    load,
    mix,
    multiply_blocks,
    narrow,
    random_words,
    remainder,
    to_bfloat16,
    to_int8,
)


@triton.jit
def keep_factor(own_ptr, new_ptr, at, count, is_mine):
    """Write some of the new R or C into the state, if no other program does; return 1/√ of it."""
    new = tl.load(new_ptr + at, mask=at < count, other=1.0)
    tl.store(own_ptr, new, mask=at < tl.where(is_mine, count, 0))
    return tl.rsqrt(new)


@triton.jit
def average_momentum(
    u, momentum_ptr, base, offsets, mask, scale_ptr, scale_strides, matrix, rows, first_col, n, m, w1, words
):
    """Average U into the momentum and return it; what the state keeps of it may be rounded."""
    old = load(momentum_ptr + base + offsets, mask)
    if scale_ptr is not None:
        blocks = first_col // BLOCK + tl.arange(0, u.shape[1] // BLOCK)
        at = scale_ptr + matrix * scale_strides.stack + (rows * scale_strides.row)[:, None] + blocks[None, :]
        inside = (rows < n)[:, None] & (blocks * BLOCK < m)[None, :]
        old = multiply_blocks(old, load(at, inside))
    new = old + (u - old) * w1
    stored = new
    if scale_ptr is not None:
        stored, scales = to_int8(new, words)
        tl.store(at, scales, mask=inside)
    elif momentum_ptr.dtype.element_ty == tl.bfloat16:
        stored = to_bfloat16(new, words >> 16)
    tl.store(momentum_ptr + base + offsets, stored, mask=mask)
    return new


@triton.jit
def subtract(u, x_ptr, compensation_ptr, base, offsets, mask, keep, words, RANDOM: tl.constexpr):
    """Write X·keep − U, rounded; return it."""
    old = load(x_ptr + base + offsets, mask)
    if compensation_ptr is not None:
        old = old + remainder(load(compensation_ptr + base + offsets, mask), old, x_ptr.dtype.element_ty)
    exact = old * keep - u
    new = to_bfloat16(exact, words) if RANDOM else narrow(exact, x_ptr.dtype.element_ty)
    tl.store(x_ptr + base + offsets, new, mask=mask)
    value = new.to(tl.float32)
    if compensation_ptr is not None:
        lost = tl.where(tl.abs(value) < float("inf"), exact - value, 0.0)
        tl.store(compensation_ptr + base + offsets, narrow(lost, x_ptr.dtype.element_ty), mask=mask)
    return value


@triton.jit(do_not_specialize=["n", "groups", "tiles", "lines"])
def squares(
    x_ptr, x2_ptr, n, m, groups, tiles, lines, x_strides, FLAT: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr
):
    """Leave ΣX² of each tile as `last_pass` does, so that a loaded checkpoint continues with the same sums."""
    above, cols = tl.program_id(0) // lines, tl.program_id(0) % lines * LINE + tl.arange(0, LINE)
    own_ptr = x_ptr + (above // tiles).to(tl.int64) * x_strides.stack
    x2 = tl.zeros((ROWS, LINE), tl.float32)
    for i in range(0, groups):
        rows = ((above % tiles * groups + i) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        offsets = (rows * x_strides.row)[:, None] + (cols * x_strides.col)[None, :]
        value = load(own_ptr + offsets, offsets < m if FLAT else (rows < n)[:, None] & (cols < m)[None, :])
        x2 = tl.fma(value, value, x2)
    tl.store(x2_ptr + tl.program_id(0), tl.sum(tl.sum(x2.to(tl.float64), 1), 0))


@triton.jit
def keys(fields_ptr, step_ptr):
    """Make the two keys of this step's random words."""
    t, zero = tl.load(step_ptr).to(tl.int64).to(tl.uint32), tl.full((), 0, tl.uint32)
    key1 = mix(t ^ tl.load(fields_ptr + f.ROOT1).to(tl.int64).to(tl.uint32), zero)
    return key1, mix(t ^ tl.load(fields_ptr + f.ROOT2).to(tl.int64).to(tl.uint32), zero)


@triton.jit(do_not_specialize=["n", "groups", "tiles", "lines", "row_strides", "col_strides", "scale_strides", "number",
                               "number_strides"])  # fmt: skip
def last_pass(
    g_ptr, x_ptr, full_ptr, row_ptr, col_ptr, new_row_ptr, new_col_ptr, mean_row_ptr, momentum_ptr, scale_ptr,
    compensation_ptr, x2_ptr, fields_ptr, step_ptr, n, m, groups, tiles, lines,
    x_strides, g_strides, row_strides, col_strides, scale_strides, number, number_strides, eps1,
    FLAT: tl.constexpr, AFTER: tl.constexpr, RANDOM: tl.constexpr, RANDOM_MOMENTUM: tl.constexpr,
    ROWS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Take a tile from G to X; the grid is matrices × tiles of rows × tiles of columns (`lines`)."""
    if tl.load(fields_ptr + f.TAKEN) == 0:
        return
    above, first_col = tl.program_id(0) // lines, tl.program_id(0) % lines * LINE
    matrix, tile = (above // tiles).to(tl.int64), tiles - 1 - above % tiles  # the last ones are still in the cache
    base = matrix * x_strides.stack
    first, cols, lane = tile * groups * ROWS, first_col + tl.arange(0, LINE), tl.arange(0, ROWS)
    scale, keep = tl.load(fields_ptr + f.SCALE).to(tl.float32), tl.load(fields_ptr + f.KEEP).to(tl.float32)
    w1, w2 = tl.load(fields_ptr + f.W1).to(tl.float32), tl.load(fields_ptr + f.W2).to(tl.float32)
    alpha = tl.load(fields_ptr + f.ALPHA).to(tl.float32)
    if full_ptr is None:
        scale = scale * tl.sqrt(tl.load(mean_row_ptr + matrix)).to(tl.float32)
    c = tl.zeros((LINE,), tl.float32) + scale
    if col_ptr is not None:
        own_col_ptr = col_ptr + matrix * col_strides.stack + cols.to(tl.int64) * col_strides.row
        c = keep_factor(own_col_ptr, new_col_ptr + matrix * m, cols, m, first == 0) * scale
    if RANDOM or RANDOM_MOMENTUM:
        key1, key2 = keys(fields_ptr, step_ptr)
        start = number + matrix * number_strides.stack + first_col.to(tl.int64) * number_strides.col
        ahead = (tl.arange(0, LINE) * number_strides.col).to(tl.uint32)
    g_ptr += matrix * g_strides.stack
    x2 = tl.zeros((ROWS, LINE), tl.float32)
    for i in range(0, groups):
        rows = (first + i * ROWS + lane).to(tl.int64)
        offsets = (rows * x_strides.row)[:, None] + (cols * x_strides.col)[None, :]
        mask = offsets < m if FLAT else (rows < n)[:, None] & (cols < m)[None, :]
        u = load(g_ptr + (rows * g_strides.row)[:, None] + (cols * g_strides.col)[None, :], mask)
        if full_ptr is not None:
            v = full_average(full_ptr, offsets, mask, u, eps1, w2)
            u = u * tl.rsqrt(v)
            tl.store(full_ptr + offsets, v, mask=mask)
        if row_ptr is not None:
            own_row_ptr = row_ptr + matrix * row_strides.stack + rows * row_strides.row
            u = u * keep_factor(own_row_ptr, new_row_ptr + matrix * n, rows, n, first_col == 0)[:, None]
        u, words = u * c[None, :], None
        if RANDOM or RANDOM_MOMENTUM:
            words = random_words((start + rows * number_strides.row)[:, None], ahead[None, :], key1, key2)
        if momentum_ptr is not None:
            u = average_momentum(
                u, momentum_ptr, base, offsets, mask, scale_ptr, scale_strides, matrix, rows, first_col, n, m, w1, words
            )
            if AFTER:  # a momentum of the direction: αₜ comes after it
                u = u * alpha
        value = subtract(u, x_ptr, compensation_ptr, base, offsets, mask, keep, words, RANDOM)
        x2 = tl.fma(value, value, x2)
    place = (matrix * tiles + tile) * lines + first_col // LINE
    tl.store(x2_ptr + place, tl.sum(tl.sum(x2.to(tl.float64), 1), 0))
