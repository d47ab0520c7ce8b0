"""What the kernels do with an address, a number or an element."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

from adafactor.kernels.triton import sizes

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))  # its conversion to bfloat16 truncates
TERMS = tl.constexpr(sizes.TERMS)


@triton.jit
def address(table_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a pointer; it is a multiple of 16 bytes if ALIGNED says so, which the compiler cannot know."""
    pointer = tl.load(table_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)  # on the pointer: a hint on the integer is lost in the conversion
    return pointer


@triton.jit
def number_at(table_ptr, KIND: tl.constexpr):
    """Load an offset, a stride or a length; it is a multiple of 16 elements if the kind is aligned."""
    number = tl.load(table_ptr)
    if KIND.aligned:
        number = tl.multiple_of(number, 16)
    return number


@triton.jit
def divide(a, b):
    """Divide with correct rounding, in float32 too."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def root(a):
    """Take the square root with correct rounding."""
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    else:
        return tl.sqrt_rn(a)


@triton.jit
def inverse_root(a):
    """Compute 1/√a to a unit or two in the last place, for a normal a > 0, without a branch or a subroutine.

    A guess from the bits, then Newton's steps. They are fused multiply-adds, which round once, so that the bits are the
    same on every card.
    """
    WIDE: tl.constexpr = a.dtype == tl.float64
    BITS: tl.constexpr = tl.int64 if WIDE else tl.int32
    GUESS: tl.constexpr = 0x5FE6EB50C7B537A9 if WIDE else 0x5F375A86
    b, half = (GUESS - (a.to(BITS, bitcast=True) >> 1)).to(a.dtype, bitcast=True), a * 0.5
    for _ in tl.static_range(5 if WIDE else 4):
        b = b * tl.fma(-(half * b), b, 1.5)
    return tl.where(a == float("inf"), 0.0, b)


@triton.jit
def at_least(bound, value):
    """Return the larger of the two; a NaN stays one."""
    return tl.where(value < bound, bound, value)


@triton.jit
def decayed(old, weight, decay):
    """β̂·old with all digits, given 1 − β̂ and β̂: in float32, β̂ near 1 and 1 − β̂ would no longer add up to 1."""
    slow = weight < 0.5
    part = old * tl.where(slow, weight, decay)
    return tl.where(slow, old - part, part)


@triton.jit
def blend(old, new, weight):
    """Average the momentum: old + (new − old)·(1 − β̂₁)."""
    return old + (new - old) * weight


@triton.jit
def total(numbers_ptr, count, stride):
    """Sum `count` numbers, `stride` apart, in double and in an order that depends on their count alone."""
    acc = tl.zeros((TERMS,), tl.float64)
    for i in range(0, count, TERMS):
        offsets = i + tl.arange(0, TERMS)
        acc += tl.load(numbers_ptr + offsets.to(tl.int64) * stride, mask=offsets < count, other=0.0).to(tl.float64)
    return tl.sum(acc, 0)


@triton.jit
def differs(x2, known):
    """Whether two ΣX² are not of the same X; a NaN or an infinity is no sum."""
    return tl.where(tl.abs(x2 - known) <= 1e-6 * known, 0, 1) + tl.where(known < float("inf"), 0, 1) > 0


# ---- rounding


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """Round to nearest, ties to even: two bfloat16 at a time where the card can, and in integers in the interpreter."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.bfloat16 and value.dtype == tl.float32 and cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [value], tl.bfloat16, True, 2)
    else:
        return value.to(DTYPE)


@triton.jit
def mix(h, salt):
    """Mix bits into the same words as `adafactor.core.rounding.mix`."""
    h ^= h >> 16
    h *= tl.full((), 0x7FEB352D, tl.uint32)
    h ^= salt
    h ^= h >> 15
    h *= tl.full((), 0x846CA68B, tl.uint32)
    h ^= h >> 16
    return h


@triton.jit
def random_words(start, offset, key1, key2):
    """Make 32 random bits for elements number start + offset of the whole parameter; `offset` has 32 bits.

    Nothing has 64 bits for each element: where the lower halves overflow, the upper one is the next.
    """
    low, high = start.to(tl.uint32), (start >> 32).to(tl.uint32)
    fold = high * tl.full((), 0x9E3779B1, tl.uint32) ^ key1
    next_fold = (high + 1) * tl.full((), 0x9E3779B1, tl.uint32) ^ key1
    number = low + offset
    return mix(number ^ tl.where(number < low, next_fold, fold), key2)


@triton.jit
def stochastic(value, words, DTYPE: tl.constexpr):
    """Round to one of the two neighbours, up where the random bits say so; see `adafactor.core.rounding.stochastic`."""
    CUT: tl.constexpr = 0xFFFF if DTYPE == tl.bfloat16 else 0x1FFF
    LARGEST: tl.constexpr = 3.3895313892515355e38 if DTYPE == tl.bfloat16 else 65504.0
    bits = value.to(tl.uint32, bitcast=True)
    rounded = ((bits + (words & CUT)) & (0xFFFFFFFF - CUT)).to(tl.float32, bitcast=True)
    if DTYPE == tl.float16:  # below its smallest normal number the neighbours are evenly spaced
        units = tl.abs(value) * 16777216.0
        below = tl.minimum(units, 2048.0).to(tl.int32).to(tl.float32)  # they are below 1024 where it matters
        up = (words >> 8).to(tl.float32) * 5.9604644775390625e-08 < units - below
        small = ((below + tl.where(up, 1.0, 0.0)) * 5.9604644775390625e-08).to(tl.uint32, bitcast=True)
        signed = (small | (bits & 0x80000000)).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(value) < 6.103515625e-05, signed, rounded)
    return narrow(tl.where(tl.abs(value) <= LARGEST, rounded, value), DTYPE)


@triton.jit
def remainder(lost, x, DTYPE: tl.constexpr):
    """Return what rounding took away from X; nothing where it is too much for that X (`core.rounding.remainder`)."""
    HALF_UNIT: tl.constexpr = 2.0**-8 if DTYPE == tl.bfloat16 else 2.0**-11
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(lost) <= power * HALF_UNIT, lost, 0.0)
