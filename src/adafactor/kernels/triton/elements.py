"""What the kernels do with an element: averages, rounding, random words. The arithmetic is that of `adafactor.core`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

from adafactor.core import momentum

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))  # its conversion to bfloat16 truncates
BLOCK, MOST, TINY = tl.constexpr(momentum.BLOCK), tl.constexpr(momentum.MOST), tl.constexpr(momentum.TINY)


@triton.jit
def load(ptr, mask):
    """Load numbers of any format as float32; zeros beside the mask."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def average(old, new, weight):
    """(1 − w)·old + w·new, of positive numbers: nothing is lost where one is far below the other."""
    return old - old * weight + new * weight


@triton.jit
def full_average(full_ptr, offsets, mask, g, eps, w2):
    """Algorithm 5, line 4: V̂."""
    return average(tl.load(full_ptr + offsets, mask=mask, other=1.0), g * g + eps, w2)


@triton.jit
def total(ptr, count, stride):
    """Sum so many doubles, in an order that depends on their count alone."""
    acc = tl.zeros((1024,), tl.float64)
    for i in range(0, count, 1024):
        at = i + tl.arange(0, 1024)
        acc += tl.load(ptr + at.to(tl.int64) * stride, mask=at < count, other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """Round to nearest, ties to even."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.bfloat16 and value.dtype == tl.float32 and cuda_capability_geq(8, 0):  # two at a time
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [value], tl.bfloat16, True, 2)
    else:
        return value.to(DTYPE)


@triton.jit
def mix(h, salt):
    """Mix bits as `adafactor.core.rounding.mix` does."""
    h ^= h >> 16
    h *= tl.full((), 0x7FEB352D, tl.uint32)
    h ^= salt
    h ^= h >> 15
    h *= tl.full((), 0x846CA68B, tl.uint32)
    h ^= h >> 16
    return h


@triton.jit
def random_words(start, offset, key1, key2):
    """Make 32 random bits for element number start (64 bits) + offset (32 bits) of the whole parameter."""
    low, high = start.to(tl.uint32), (start >> 32).to(tl.uint32)
    fold = high * tl.full((), 0x9E3779B1, tl.uint32) ^ key1
    next_fold = (high + 1) * tl.full((), 0x9E3779B1, tl.uint32) ^ key1
    number = low + offset
    return mix(number ^ tl.where(number < low, next_fold, fold), key2)


@triton.jit
def to_bfloat16(value, words):
    """Round to one of the two neighbours, up where the lower half of the random words says so."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = ((bits + (words & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return narrow(tl.where(tl.abs(value) <= 3.3895313892515355e38, rounded, value), tl.bfloat16)


@triton.jit
def remainder(lost, x, DTYPE: tl.constexpr):
    """Return what rounding took away from X; nothing where it is too much for that X."""
    HALF_UNIT: tl.constexpr = 2.0**-8 if DTYPE == tl.bfloat16 else 2.0**-11
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(lost) <= power * HALF_UNIT, lost, 0.0)


@triton.jit
def multiply_blocks(a, factors):
    """Multiply (rows, blocks) into (rows, elements), BLOCK elements each."""
    blocks = tl.reshape(a, (factors.shape[0], factors.shape[1], BLOCK)) * factors[:, :, None]
    return tl.reshape(blocks, a.shape)


@triton.jit
def to_int8(value, words):
    """Round blocks to integers, up where the upper half of the random words says so; return their scales, too."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers, since a NaN is the largest of them
    blocks = tl.reshape(bits, (value.shape[0], value.shape[1] // BLOCK, BLOCK))
    largest = tl.max(blocks, 2).to(tl.float32, bitcast=True)
    largest = tl.where(largest < TINY, 0.0, largest)
    inverse = tl.where(largest > 0, tl.div_rn(1.0 * MOST, largest), 0.0)
    chance = 0.5
    if words is not None:  # 16 bits behind the point of a number from 1 to 2
        chance = ((words >> 16 << 7) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    rounded = tl.floor(multiply_blocks(value, inverse) + chance).to(tl.int32)
    return tl.minimum(tl.maximum(rounded, -MOST), MOST).to(tl.int8), tl.div_rn(largest, 1.0 * MOST)
