"""The step once more, where it relied on a ΣX² that was no longer true.

X may be written to behind torch's back, through `p.data`. Then ΣX² as the last walk found it is not what the step
relied on, and this walk takes the difference between the right step and the one that was taken. Else it only looks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import at_least, divide, total
from adafactor.kernels.triton.last_walk import clipped, piece_of


@triton.jit
def mend(
    tensors,
    matrices,
    pieces,
    shares,
    given,
    numbers,
    notes,
    vectors,
    energies,
    means,
    squares,
    grad_scale,
    GT: tl.constexpr,
    DT: tl.constexpr,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ROUNDING: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program for a share of a tensor's pieces: (tensor, first piece, end)."""
    share = tl.program_id(0).to(tl.int64)
    number = tl.load(shares + 3 * share).to(tl.int64)
    tensor, note = tensors + number * f.TENSOR, notes + number * f.NOTES
    group = numbers + tl.load(tensor + f.GROUP) * f.NUMBERS
    is_here = tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0
    if is_here & (tl.load(note + f.TAKEN) != 0) & (tl.load(group + f.RELATIVE) != 0):
        first_piece, count = tl.load(tensor + f.FIRST_PIECE), tl.load(tensor + f.COUNT).to(tl.float64)
        found = total(
            squares + first_piece * f.SQUARES + f.BEFORE, tl.load(tensor + f.PIECES).to(tl.int32), f.SQUARES, 512
        )
        relied_on = tl.load(note + f.X2)
        if tl.abs(found - relied_on) > 1e-6 * relied_on:
            rms_x = tl.sqrt(found * (1.0 / f.X_UNIT / f.X_UNIT) / count)
            alpha = tl.load(note + f.RHO) * at_least(tl.load(group + f.EPS2), rms_x)
            missing = alpha * tl.load(group + f.SIGN) - tl.load(note + f.ALPHA)
            u2 = tl.load(note + f.U2)
            u2 += total(energies + tl.load(tensor + f.FIRST_BLOCK), tl.load(tensor + f.BLOCKS).to(tl.int32), 1, 512)
            rms_u, divisor = clipped(u2, tl.load(group + f.CLIP), count, ST)
            scale = divide(missing.to(ST), divisor)
            tables = (tensors, matrices, pieces, given, numbers, notes, vectors, means, squares, grad_scale)
            for piece in range(tl.load(shares + 3 * share + 1), tl.load(shares + 3 * share + 2)):
                piece_of(
                    tables,
                    tl.full((), 0, tl.int64) + piece,
                    scale,
                    tl.full((), 1.0, ST),
                    tl.full((), 1, tl.int32) == 1,
                    GT,
                    DT,
                    ST,
                    ALIGNED,
                    MOMENTUM,
                    ROUNDING,
                    True,
                    STAGES,
                )
            if tl.load(shares + 3 * share + 1) == first_piece:
                tl.store(note + f.NOTED_ALPHA, alpha)
                tl.store(note + f.NOTED_RMS_X, rms_x)
