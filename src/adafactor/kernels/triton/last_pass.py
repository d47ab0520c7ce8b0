"""The last pass: X, and what is kept of G: R, C, V̂ and the momentum. Also ΣX², which the next step relies on."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates, sizes
from adafactor.kernels.triton.elements import at_least, differs, divide, root, total
from adafactor.kernels.triton.matrix import is_stepped, look_up
from adafactor.kernels.triton.tile import LINE, LINES, NORMS, STEP, visit_any


@triton.jit
def copy(factor, first, end):
    """Take new numbers of R or C into the state."""
    for i in range(first, end, LINE):
        offsets = i + tl.arange(0, LINE)
        value = tl.load(factor.new_ptr + offsets, mask=offsets < end, other=0.0)
        tl.store(factor.state_ptr + offsets.to(tl.int64) * factor.stride, value, mask=offsets < end)


@triton.jit
def copy_factors(x, first, first_col, KIND: tl.constexpr):
    """Take those numbers of R and C into the state that are of a tile on the edge of the matrix."""
    if (x.row.end > 0) & (first_col == 0):
        is_narrow = not KIND.IN_BLOCKS and x.m <= sizes.NARROW
        end = tl.minimum(first + tl.where(is_narrow, LINES * (LINE // x.m), LINES), x.n)
        copy(x.row, first, end.to(tl.int32))
    if (x.col.end > 0) & (first == 0):
        width = LINE // KIND.lanes * x.columns if KIND.lanes else LINE
        end = tl.minimum(first_col + width, x.m)
        copy(x.col, first_col, end.to(tl.int32))


@triton.jit
def clip_divisor(memory, x, KIND: tl.constexpr):
    """RMS(U) and max(1, RMS(U)/d); in single precision where that is what is kept: doubles are slow on many cards."""
    blocks = tl.load(x.tensor_ptr + f.BLOCKS).to(tl.int32)
    u2 = tl.load(x.note_ptr + f.U2) + total(memory.energies_ptr + tl.load(x.tensor_ptr + f.FIRST_BLOCK), blocks, 1)
    mean, clip = u2 * (1.0 / tl.load(x.tensor_ptr + f.COUNT).to(tl.float64)), tl.load(x.group_ptr + rates.CLIP)
    large = mean > 1e30  # beyond it, the root of the mean is taken in two parts
    rms = root((mean * tl.where(large, 2.0**-120, 1.0)).to(KIND.STAT)) * tl.where(large, 2.0**60, 1.0).to(KIND.STAT)
    divisor = tl.where(clip > 0, at_least(1.0, divide(rms, tl.where(clip > 0, clip, 1.0).to(KIND.STAT))), 1.0)
    return rms, divisor


@triton.jit
def report(x, rms_u, divisor):
    """Count a step, and leave what `report()` says of it."""
    step_ptr = tl.load(x.tensor_ptr + f.STEP).to(tl.pointer_type(tl.float32))
    t, steps, clipped = tl.load(step_ptr), tl.load(x.note_ptr + f.STEPS), tl.load(x.note_ptr + f.CLIPPED)
    tl.debug_barrier()  # every thread has read what is written now
    tl.store(step_ptr, t + 1.0)
    tl.store(x.note_ptr + f.STEPS, steps + 1.0)
    tl.store(x.note_ptr + f.CLIPPED, clipped + tl.where(divisor > 1.0, 1.0, 0.0))
    tl.store(x.note_ptr + f.RMS_U, rms_u.to(tl.float64))
    tl.store(x.note_ptr + f.REPORTED_ALPHA, tl.abs(tl.load(x.note_ptr + f.ALPHA)))
    tl.store(x.note_ptr + f.RMS_X, tl.sqrt(tl.load(x.note_ptr + f.X2) / tl.load(x.tensor_ptr + f.COUNT).to(tl.float64)))
    tl.store(x.note_ptr + f.REPORTED_BETA2, tl.load(x.note_ptr + f.BETA2))


@triton.jit(do_not_specialize=["only_ragged"])
def last_pass(memory, only_ragged, KIND: tl.constexpr, WRITES: tl.constexpr):
    """Run a program for each tile. Without WRITES it leaves a shard's ΣU² and ΣX² of the tile, and nothing else."""
    number = tl.program_id(0).to(tl.int64)
    tile_ptr, squares_ptr = memory.tiles_ptr + 3 * number, memory.squares_ptr + number
    place = tl.load(tile_ptr).to(tl.int64)
    if is_stepped(memory, place, only_ragged, KIND):
        x = look_up(memory, place, KIND)
        taken, is_first = tl.load(x.note_ptr + f.TAKEN), number == tl.load(x.tensor_ptr + f.FIRST_TILE)
        first, first_col = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        scale = tl.full((), 1.0, KIND.STAT)
        if WRITES:
            rms_u, divisor = clip_divisor(memory, x, KIND)
            scale = divide(scale if KIND.OF_DIRECTION else x.alpha, divisor)
        if not WRITES:
            u2, x2 = visit_any(x, scale, first, first_col, KIND, NORMS)
            tl.store(memory.energies_ptr + number, u2)
            tl.store(squares_ptr, x2)
        elif taken > 0:
            if is_first:
                report(x, rms_u, divisor)
            copy_factors(x, first, first_col, KIND)
            if KIND.lanes:
                for i in range(1, x.matrices):
                    copy_factors(look_up(memory, place + i, KIND), first, first_col, KIND)
            before, after = visit_any(x, scale, first, first_col, KIND, STEP)
            known = tl.load(squares_ptr)
            tl.debug_barrier()  # every thread has read what is written now
            tl.store(squares_ptr, tl.where(differs(before, known), float("nan"), after))  # NaN: to be measured
        elif is_first & (taken == 0):
            skipped = tl.load(x.note_ptr + f.SKIPPED)
            tl.debug_barrier()
            tl.store(x.note_ptr + f.SKIPPED, skipped + 1.0)
