"""The last pass: X, and what is kept of G: R, C, V̂ and the momentum. Also ΣX², which the next step relies on.

Somebody may write to X between two steps, behind torch's back. So before anything is written, `begin_step` compares ΣX²
of the heaviest tile of a tensor and of a sample of the others (`sizes.checked`) with what the last step has left, and
`measure` reads all of those tensors that differ, and those of which nothing is known. What no sample sees the last pass
finds, which reads everything: it leaves a NaN there, and the next step measures. The last pass adds up squares in the
state's type, these two kernels in double, too: where squares leave the range of float32 the sums differ, and X is
measured every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates
from adafactor.kernels.triton.elements import at_least, divide, is_stepped, root, total
from adafactor.kernels.triton.rates import TABLES
from adafactor.kernels.triton.tiles import LINE, LINES, NARROW, NORMS, SQUARES, STEP, describe, rates_of, visit_any


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
