"""Algorithm 5: what takes the place of the first pass, and the whole step of a small tensor in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.between import conclude
from adafactor.kernels.triton.elements import full_average, load
from adafactor.kernels.triton.last_pass import last_pass


@triton.jit(do_not_specialize=["groups"])
def full_sums(
    g_ptr, full_ptr, unit_sums_ptr, u2_ptr, fields_ptr, m, groups, eps1, ROWS: tl.constexpr, LINE: tl.constexpr
):
    """Leave ΣU² of a tile of an unfactored tensor, and whether its G² is finite; the grid is that of `last_pass`."""
    place, w2 = tl.program_id(0), tl.load(fields_ptr + f.W2).to(tl.float32)
    u2, probe = tl.zeros((ROWS * LINE,), tl.float32), tl.zeros((ROWS * LINE,), tl.float32)
    for i in range(0, groups):
        offsets = (place.to(tl.int64) * groups + i) * (ROWS * LINE) + tl.arange(0, ROWS * LINE)
        mask = offsets < m
        g = load(g_ptr + offsets, mask)
        u = g * tl.rsqrt(full_average(full_ptr, offsets, mask, g, eps1, w2))
        u2 += tl.where(mask, u * u, 0.0)
        probe += g * g * 0.0
    tl.store(u2_ptr + place, tl.sum(u2.to(tl.float64), 0))
    tl.store(unit_sums_ptr + place * f.SUMS + f.PROBE, tl.sum(probe.to(tl.float64), 0))


@triton.jit(do_not_specialize=["n", "groups", "count", "number"])
def small_step(
    g_ptr, x_ptr, full_ptr, momentum_ptr, compensation_ptr, unit_sums_ptr, u2_ptr, x2_ptr, fields_ptr, step_ptr,
    n, m, groups, count, x_strides, number, eps1, eps2, clip,
    RELATIVE: tl.constexpr, BY_ALPHA: tl.constexpr, AFTER: tl.constexpr, SIGN: tl.constexpr, IGNORES: tl.constexpr,
    RANDOM: tl.constexpr, RANDOM_MOMENTUM: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Take the whole step of an unfactored tensor that is one tile: most are, biases and norms; one program."""
    full_sums(g_ptr, full_ptr, unit_sums_ptr, u2_ptr, fields_ptr, m, groups, eps1, ROWS, LINE)
    tl.debug_barrier()
    conclude(unit_sums_ptr, u2_ptr, x2_ptr, fields_ptr, step_ptr, 1, 1, 1, count, eps2, clip,
             RELATIVE, BY_ALPHA, AFTER, SIGN, IGNORES)  # fmt: skip
    tl.debug_barrier()
    last_pass(g_ptr, x_ptr, full_ptr, None, None, None, None, None, momentum_ptr, None, compensation_ptr, x2_ptr,
              fields_ptr, step_ptr, n, m, groups, 1, 1, x_strides, x_strides, None, None, None, number, x_strides, eps1,
              True, AFTER, RANDOM, RANDOM_MOMENTUM, ROWS, LINE)  # fmt: skip
