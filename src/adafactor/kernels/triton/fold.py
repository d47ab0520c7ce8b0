"""Between the walks: C and its share of ΣU² for every block of columns; the scalars of every tensor.

Nothing is changed but scratch and notes: new C lies beside new R until the last walk takes both into the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import address, at_least, mix, now, total, weights_of_group


@triton.jit
def columns(tables, sums_of, block, ST: tl.constexpr, ALIGNED: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the units' sums of a block of columns, in double: C, and ΣU² of these columns."""
    tensors, matrices, blocks, given, numbers, rates = tables
    vectors, scratch, sums, energies, means, grad_scale = sums_of
    place = tl.load(blocks + 2 * block).to(tl.int64)
    matrix = matrices + place * f.MATRIX
    number = tl.load(matrix + f.OF)
    tensor = tensors + number * f.TENSOR
    if tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0:
        first = tl.load(blocks + 2 * block + 1)
        cols = first + tl.arange(0, BLOCK)
        group = numbers + tl.load(tensor + f.GROUP) * f.NUMBERS
        m, start = tl.load(tensor + f.M), tl.load(matrix + f.PARTIAL)
        if ALIGNED:
            m, start = tl.multiple_of(m, 16), tl.multiple_of(start, 16)
        part, inside, units = scratch + start, cols < m, tl.load(matrix + f.OWN_UNITS).to(tl.int32)
        squares, heats = tl.zeros((UNITS, BLOCK), tl.float64), tl.zeros((UNITS, BLOCK), tl.float64)
        for u in range(0, units, UNITS):
            unit = u + tl.arange(0, UNITS)
            at = 2 * unit.to(tl.int64)[:, None] * m + cols[None, :]
            mask = (unit < units)[:, None] & inside[None, :]
            squares += tl.load(part + at, mask=mask, other=0.0)
            heats += tl.load(part + m + at, mask=mask, other=0.0)
        rows = tl.load(tensor + f.WHOLE_N).to(tl.float64) * tl.load(tensor + f.SHRINK).to(tl.float64, bitcast=True)
        scale = tl.load(grad_scale).to(tl.float64)
        mean = tl.sum(squares, 0) / (rows * scale * scale) + tl.load(group + f.EPS1)
        t, w2, beta2, w1 = now(tensor, number, group, rates)
        state = address(tensor, f.COL, ST, False) + tl.load(matrix + f.COL_OFFSET)
        col_stride = tl.load(tensor + f.COL_STRIDE)
        old = tl.load(state + cols.to(tl.int64) * col_stride, mask=inside, other=1.0)
        new = (old.to(tl.float64) * beta2 + mean * w2).to(ST)
        tl.store(vectors + tl.load(matrix + f.NEW_COL) + cols, new, mask=inside)
        mean_row = tl.full((), 1.0, tl.float64)
        if tl.load(tensor + f.ROW) != 0:
            mean_row = total(sums + tl.load(matrix + f.OWN_UNIT) * f.SUMS + f.ROW_SUM, units, f.SUMS, 512) / rows
            if tl.load(tensor + f.SWAPPED) != 0:  # new C has the mean of new R, but for what was there before
                n, row = tl.load(tensor + f.N), address(tensor, f.ROW, ST, False) + tl.load(matrix + f.ROW_OFFSET)
                old_row = total(row, n.to(tl.int32), tl.load(tensor + f.ROW_STRIDE), 512) / n.to(tl.float64)
                mean_row += beta2 * (total(state, m.to(tl.int32), col_stride, 512) / m.to(tl.float64) - old_row)
        tl.store(means + place, mean_row, mask=first == 0)
        heat = tl.sum(tl.where(inside, tl.sum(heats, 0) / new.to(tl.float64), 0.0), 0)
        tl.store(energies + block, heat * mean_row)


@triton.jit
def settle(tensor, note, group, slots, rates, turn, finite, found_inf, x2, u2):
    """Note everything that the last walk needs to know of a tensor, and the rates of the next step."""
    t, w2, beta2, w1 = rates
    next_w2, next_beta2, next_w1 = weights_of_group(group, t + 1.0)
    slot = slots + (t.to(tl.int64) + 1 & 1) * f.HALF
    tl.store(slot + f.RATE_T, t + 1.0)
    tl.store(slot + f.RATE_W2, next_w2)
    tl.store(slot + f.RATE_BETA2, next_beta2)
    tl.store(slot + f.RATE_W1, next_w1)
    lr = tl.load(group + f.LR)
    rho = tl.where((tl.load(group + f.DECAYS) != 0) & (lr * lr * t > 1.0), 1.0 / tl.sqrt(t), lr)
    rms_x = tl.sqrt(x2 * (1.0 / f.X_UNIT / f.X_UNIT) / tl.load(tensor + f.COUNT).to(tl.float64))
    alpha = tl.where(tl.load(group + f.RELATIVE) != 0, at_least(tl.load(group + f.EPS2), rms_x), 1.0) * rho
    t_word, zero = t.to(tl.int64).to(tl.uint32), tl.full((), 0, tl.uint32)
    tl.debug_barrier()  # every thread has read what is written now
    tl.store(note + f.TAKEN, tl.where(found_inf, -1.0, tl.where(finite, 1.0, 0.0)))
    tl.store(note + f.ALPHA, alpha * tl.load(group + f.SIGN))
    tl.store(note + f.DECAY, 1.0 - rho * tl.load(group + f.WEIGHT_DECAY))
    tl.store(note + f.W1, w1)
    tl.store(note + f.W2, w2)
    tl.store(note + f.BETA2_NOW, beta2)
    tl.store(note + f.X2, x2)
    tl.store(note + f.U2, u2)
    tl.store(note + f.KEY1, mix(t_word ^ tl.load(tensor + f.ROOT1).to(tl.uint32), zero).to(tl.float64))
    tl.store(note + f.KEY2, mix(t_word ^ tl.load(tensor + f.ROOT2).to(tl.uint32), zero).to(tl.float64))
    tl.store(note + f.TURN, turn)
    tl.store(note + f.TURNED, 0.0)
    tl.store(note + f.STALE, 0.0)


@triton.jit
def newer(note):
    """Which of the two columns of sums of X² is newer, between two steps."""
    turn, turned = tl.load(note + f.TURN), tl.load(note + f.TURNED)
    return tl.where(turned != 0, 1.0 - turn, turn)


@triton.jit
def scalars(tensors, given, numbers, rates, notes, squares, sums, found_inf, number):
    """One tensor: is the step taken, and with which α."""
    tensor, note = tensors + number * f.TENSOR, notes + number * f.NOTES
    if tl.load(given + number * f.GIVEN + f.G_ADDRESS) != 0:
        group = numbers + tl.load(tensor + f.GROUP) * f.NUMBERS
        now_ = now(tensor, number, group, rates)
        turn = newer(note)
        own, units = sums + tl.load(tensor + f.FIRST_UNIT) * f.SUMS, tl.load(tensor + f.UNITS).to(tl.int32)
        finite = (total(own + f.PROBE, units, f.SUMS, 512) == 0) | (tl.load(group + f.IGNORE) != 0)
        carried = squares + tl.load(tensor + f.FIRST_PIECE) * f.SQUARES + turn.to(tl.int64)
        x2 = total(carried, tl.load(tensor + f.PIECES).to(tl.int32), f.SQUARES, 512)
        u2 = total(own + f.ENERGY, units, f.SUMS, 512)
        found = tl.load(found_inf) != 0
        settle(tensor, note, group, rates + number * f.RATES, now_, turn, finite, found, x2, u2)


@triton.jit(
    do_not_specialize=["first_block", "block_count", "first_tensor"],
    do_not_specialize_on_alignment=["grad_scale", "found_inf"],
)
def fold(
    tensors,
    matrices,
    blocks,
    given,
    numbers,
    rates,
    notes,
    vectors,
    scratch,
    sums,
    energies,
    means,
    squares,
    grad_scale,
    found_inf,
    first_block,
    block_count,
    first_tensor,
    ST: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for a block of columns, then one for a tensor."""
    program = tl.program_id(0).to(tl.int64)
    if program < block_count:
        tables = (tensors, matrices, blocks, given, numbers, rates)
        columns(
            tables,
            (vectors, scratch, sums, energies, means, grad_scale),
            program + first_block,
            ST,
            ALIGNED,
            UNITS,
            BLOCK,
        )
    else:
        number = program - block_count + first_tensor
        scalars(tensors, given, numbers, rates, notes, squares, sums, found_inf, number)
