"""A momentum on its way from the state and back: kept as it is computed, in bfloat16, or as blocks of int8.

`core/momentum.py` has the formats, and their arithmetic is the same here. A program that rounds has whole blocks. They
are mostly runs of BLOCK elements of a row: the threads of a warp find the largest number of a block among themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from adafactor.core import momentum
from adafactor.kernels.triton.elements import narrow, stochastic

BLOCK, MOST, TINY = tl.constexpr(momentum.BLOCK), tl.constexpr(momentum.MOST), tl.constexpr(momentum.TINY)


class Elements(NamedTuple):
    """What a program has at a time: lines of elements, and the blocks of these lines; to read, each may be one."""

    offsets: Any  # from the matrix' first element
    mask: Any
    scale_offsets: Any  # from its first scale, (…, blocks of a line)
    scale_mask: Any
    words: Any = None  # random ones


@triton.jit
def multiply_blocks(a, factors):
    """Multiply (…, blocks of a line) into the elements of the blocks, (…, elements of a line)."""
    blocks = tl.reshape(a, factors.shape + (a.numel // factors.numel,))
    return tl.reshape(blocks * tl.expand_dims(factors, -1), a.shape)


@triton.jit
def recall(x, e, KIND: tl.constexpr):
    """Load the momentum, in the precision of the statistics."""
    average = tl.load(x.momentum_ptr + e.offsets, mask=e.mask, other=0.0)
    if KIND.IN_BLOCKS:
        scale = tl.load(x.scale_ptr + e.scale_offsets, mask=e.scale_mask, other=0.0)
        average = multiply_blocks(average.to(KIND.STAT), scale.to(KIND.STAT))
    return average.to(KIND.STAT)


@triton.jit
def keep(x, e, average, KIND: tl.constexpr):
    """Store the momentum, rounded up where the upper half of the random words says so, or to nearest."""
    if KIND.IN_BLOCKS:
        value = average.to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers, since a NaN is the largest of them
        blocks = tl.reshape(bits, e.scale_offsets.shape + (KIND.BLOCK_LANES,))
        largest = tl.max(blocks, 2).to(tl.float32, bitcast=True)
        largest = tl.where(largest < TINY, 0.0, largest)
        tl.store(x.scale_ptr + e.scale_offsets, tl.div_rn(largest, 1.0 * MOST), mask=e.scale_mask)
        inverse = tl.where(largest > 0, tl.div_rn(1.0 * MOST, largest), 0.0)
        chance = 0.5
        if KIND.momentum_random:  # 16 bits behind the point of a number from 1 to 2
            chance = ((e.words >> 16 << 7) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        rounded = tl.floor(multiply_blocks(value, inverse) + chance).to(tl.int32)
        average = tl.minimum(tl.maximum(rounded, -MOST), MOST).to(tl.int8)
    elif KIND.MOMENTUM != KIND.STAT:
        value = average.to(tl.float32)
        average = stochastic(value, e.words >> 16, tl.bfloat16) if KIND.momentum_random else narrow(value, tl.bfloat16)
    tl.store(x.momentum_ptr + e.offsets, average, mask=e.mask)
