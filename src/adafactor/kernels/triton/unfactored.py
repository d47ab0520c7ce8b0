"""Algorithm 5: what takes the place of the first pass, and the whole step of a small tensor in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.between import conclude
from adafactor.kernels.triton.elements import full_average, load
from adafactor.kernels.triton.last_pass import last_pass


@triton.jit(do_not_specialize=["n", "groups", "lines"])
def full_sums(
    g_ptr, full_ptr, unit_sums_ptr, u2_ptr, fields_ptr, n, m, groups, lines, x_strides, eps1,
    FLAT: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Leave ΣU² of a tile of an unfactored tensor, and whether its G² is finite; the grid is that of `last_pass`."""
    place, tile = tl.program_id(0), tl.program_id(0) // lines
    w2 = tl.load(fields_ptr + f.W2).to(tl.float32)
    cols, lane = tl.program_id(0) % lines * LINE + tl.arange(0, LINE), tl.arange(0, ROWS)
    u2, probe = tl.zeros((ROWS, LINE), tl.float32), tl.zeros((ROWS, LINE), tl.float32)
    for i in range(0, groups):
        rows = ((tile * groups + i) * ROWS + lane).to(tl.int64)
        offsets = (rows * x_strides.row)[:, None] + cols[None, :]
        mask = offsets < m if FLAT else (rows < n)[:, None] & (cols < m)[None, :]
        g = load(g_ptr + offsets, mask)
        u = g * tl.rsqrt(full_average(full_ptr, offsets, mask, g, eps1, w2))
        u2 += tl.where(mask, u * u, 0.0)
        probe += g * g * 0.0
    tl.store(u2_ptr + place, tl.sum(tl.sum(u2.to(tl.float64), 1), 0))
    tl.store(unit_sums_ptr + place * f.SUMS + f.PROBE, tl.sum(tl.sum(probe.to(tl.float64), 1), 0))


@triton.jit(do_not_specialize=["n", "groups", "count", "number", "number_strides"])
def small_step(
    g_ptr, x_ptr, full_ptr, momentum_ptr, scale_ptr, compensation_ptr, unit_sums_ptr, u2_ptr, x2_ptr, fields_ptr,
    step_ptr, n, m, groups, count, x_strides, scale_strides, number, number_strides, eps1, eps2, clip,
    RELATIVE: tl.constexpr, BY_ALPHA: tl.constexpr, AFTER: tl.constexpr, SIGN: tl.constexpr, IGNORES: tl.constexpr,
    FLAT: tl.constexpr, RANDOM: tl.constexpr, RANDOM_MOMENTUM: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Take the whole step of an unfactored tensor that is one tile: most are, biases and norms; one program."""
    full_sums(g_ptr, full_ptr, unit_sums_ptr, u2_ptr, fields_ptr, n, m, groups, 1, x_strides, eps1, FLAT, ROWS, LINE)
    tl.debug_barrier()
    conclude(unit_sums_ptr, u2_ptr, x2_ptr, fields_ptr, step_ptr, 1, 1, 1, count, eps2, clip,
             RELATIVE, BY_ALPHA, AFTER, SIGN, IGNORES)  # fmt: skip
    tl.debug_barrier()
    last_pass(g_ptr, x_ptr, full_ptr, None, None, None, None, None, momentum_ptr, scale_ptr, compensation_ptr, x2_ptr,
              fields_ptr, step_ptr, n, m, groups, 1, 1, x_strides, x_strides, None, None, scale_strides,
              number, number_strides, eps1, FLAT, AFTER, RANDOM, RANDOM_MOMENTUM, ROWS, LINE)  # fmt: skip
