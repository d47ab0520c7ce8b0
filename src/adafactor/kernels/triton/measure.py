"""Before the passes: the rates of the step, and ΣX² of every tensor whose step relies on it.

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
from adafactor.kernels.triton.elements import at_least, differs, total
from adafactor.kernels.triton.matrix import group_of, look_up
from adafactor.kernels.triton.tile import LINE, SQUARES, visit_any


@triton.jit
def sum_squares(memory, number, KIND: tl.constexpr):
    """Return ΣX² of a tile: to the bit as the last pass does, but where squares leave the range of their type."""
    tile_ptr = memory.tiles_ptr + 3 * number
    x = look_up(memory, tl.load(tile_ptr).to(tl.int64), KIND)
    x2, wide = visit_any(x, None, tl.load(tile_ptr + 1), tl.load(tile_ptr + 2), KIND, SQUARES)
    return tl.where(differs(x2, wide), wide, x2)


@triton.jit
def heaviest(memory, tensor_ptr):
    """Find the tile of a tensor that had the largest ΣX², or one that had a NaN."""
    first, count = tl.load(tensor_ptr + f.FIRST_TILE), tl.load(tensor_ptr + f.TILES).to(tl.int32)
    most, found = tl.full((), -1.0, tl.float64), first
    for i in range(0, count, LINE):
        numbers = first + i + tl.arange(0, LINE)
        sums = tl.load(memory.squares_ptr + numbers, mask=numbers < first + count, other=-1.0)
        sums = tl.where(sums == sums, sums, float("inf"))
        largest = tl.max(sums, 0)
        found = tl.where(largest > most, tl.min(tl.where(sums == largest, numbers, first + count), 0), found)
        most = at_least(largest, most)
    return found


@triton.jit(do_not_specialize=["tensor_count"])
def begin_step(memory, tensor_count, KIND: tl.constexpr):
    """Run a program for each tensor: its rates; then one for each tile to check."""
    program = tl.program_id(0).to(tl.int64)
    number, check = program, program - tensor_count
    if check >= 0:
        number = tl.load(memory.checks_ptr + 2 * check).to(tl.int64)
    tensor_ptr, given_ptr = memory.tensors_ptr + number * f.TENSOR, memory.given_ptr + number * f.GIVEN
    group_ptr = group_of(memory, tensor_ptr)
    if tl.load(given_ptr + f.G_ADDRESS) != 0:
        if check < 0:
            rates.write_rates(tensor_ptr, group_ptr, memory.notes_ptr + number * f.NOTES)
        elif (tl.load(group_ptr + rates.RELATIVE) != 0) & (tl.load(given_ptr + f.MUST_MEASURE) == 0):
            tile = tl.load(memory.checks_ptr + 2 * check + 1).to(tl.int64)
            if tile < 0:
                tile = heaviest(memory, tensor_ptr)
            is_changed = differs(sum_squares(memory, tile, KIND), tl.load(memory.squares_ptr + tile))
            tl.store(memory.changes_ptr + check, tl.where(is_changed, 1, 0))


@triton.jit
def measure(memory, KIND: tl.constexpr):
    """Run a program for some tiles of a tensor; nearly always there is nothing to do."""
    share_ptr = memory.shares_ptr + 3 * tl.program_id(0).to(tl.int64)
    number = tl.load(share_ptr).to(tl.int64)
    tensor_ptr, given_ptr = memory.tensors_ptr + number * f.TENSOR, memory.given_ptr + number * f.GIVEN
    checks = tl.load(tensor_ptr + f.CHECKS).to(tl.int32)
    is_changed = total(memory.changes_ptr + tl.load(tensor_ptr + f.FIRST_CHECK), checks, 1) > 0
    is_wanted = is_changed | (tl.load(given_ptr + f.MUST_MEASURE) != 0)
    is_relative = tl.load(group_of(memory, tensor_ptr) + rates.RELATIVE) != 0
    if is_wanted & is_relative & (tl.load(given_ptr + f.G_ADDRESS) != 0):
        for tile in range(tl.load(share_ptr + 1), tl.load(share_ptr + 2)):
            number = tl.full((), 0, tl.int64) + tile
            tl.store(memory.squares_ptr + number, sum_squares(memory, number, KIND))
