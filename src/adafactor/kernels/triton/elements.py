"""What the kernels do with an address, a number or an element."""

from __future__ import annotations

import triton
import triton.language as tl

from adafactor.kernels.triton import fields as f


@triton.jit
def address(table, at, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a pointer; it is a multiple of 16 bytes if ALIGNED says so, which the compiler cannot know."""
    pointer = tl.load(table + at).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)  # on the pointer: a hint on the integer is lost in the conversion
    return pointer


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
    """Compute 1/√a with correct rounding of both operations."""
    return divide(1.0, root(a))


@triton.jit
def reciprocal(a):
    """1/a to a unit in the last place, for a > 0.

    A guess from the bits of `a`, good to 5 %, then Newton's steps. A division with correct rounding calls a subroutine:
    the first walk has no registers left for it.
    """
    if a.dtype == tl.float64:
        b = (0x7FDE623822FC16E6 - a.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
        for _ in tl.static_range(5):
            b = b * (2.0 - a * b)
    else:
        b = (0x7EF311C3 - a.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        for _ in tl.static_range(4):
            b = b * (2.0 - a * b)
    return b


@triton.jit
def at_least(bound, value):
    """The larger of the two; a NaN stays one."""
    return tl.where(value < bound, bound, value)


@triton.jit
def kept(old, weight, decay):
    """β̂·old with all digits, given 1 − β̂ and β̂: in float32, β̂ near 1 and 1 − β̂ would no longer add up to 1."""
    slow = weight < 0.5
    part = old * tl.where(slow, weight, decay)
    return tl.where(slow, old - part, part)


@triton.jit
def average(old, new, weight, decay):
    """β̂·old + (1 − β̂)·new."""
    return kept(old, weight, decay) + new * weight


@triton.jit
def blend(old, new, weight):
    """The momentum: old + (new − old)·(1 − β̂₁)."""
    return old + (new - old) * weight


@triton.jit
def total(numbers, count, stride, BLOCK: tl.constexpr):
    """Sum `count` numbers, `stride` apart, in double and in an order that depends on their count alone."""
    acc = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        acc += tl.load(numbers + at.to(tl.int64) * stride, mask=at < count, other=0.0).to(tl.float64)
    return tl.sum(acc, 0)


# ---- rounding


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """Round to nearest, ties to even; in integers for bfloat16, so that it is the same everywhere."""
    if DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def mix(h, salt):
    """The same words as `adafactor.core.rounding.mix`."""
    h ^= h >> 16
    h *= tl.full((), 0x7FEB352D, tl.uint32)
    h ^= salt
    h ^= h >> 15
    h *= tl.full((), 0x846CA68B, tl.uint32)
    h ^= h >> 16
    return h


@triton.jit
def random_words(number, key1, key2):
    """32 random bits for each element, by its number in the whole parameter."""
    high = (number >> 32).to(tl.uint32) * tl.full((), 0x9E3779B1, tl.uint32)
    return mix(number.to(tl.uint32) ^ high ^ key1, key2)


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
    """What rounding took away from X; nothing where it is too much for that X (`core.rounding.remainder`)."""
    HALF_UNIT: tl.constexpr = 2.0**-8 if DTYPE == tl.bfloat16 else 2.0**-11
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(lost) <= power * HALF_UNIT, lost, 0.0)


# ---- rates


@triton.jit
def corrected_decay(t, beta):
    """β·(1 − βᵗ⁻¹)/(1 − βᵗ) (§7.1)."""
    log = tl.log(tl.where(beta > 0, beta, 0.5))
    decay = beta * (1.0 - tl.exp((t - 1.0) * log)) / (1.0 - tl.exp(t * log))
    return tl.where(beta > 0, decay, 0.0)


@triton.jit
def weights(beta1, of_gradient, beta2, rate, t):
    """1 − β̂₂ₜ, β̂₂ₜ and 1 − β̂₁ₜ, in double; neither of the first two is taken from the other where it is small."""
    increasing, constant = tl.exp(-rate * tl.log(t)), corrected_decay(t, tl.where(beta2 < 0, 0.5, beta2))
    w2 = tl.where(beta2 < 0, increasing, 1.0 - constant)
    decay = tl.where(beta2 < 0, 1.0 - increasing, constant)
    w1 = 1.0 - tl.where(of_gradient > 0, corrected_decay(t, beta1), beta1)
    return w2, decay, w1


@triton.jit
def weights_of_group(group, t):
    """The same for a group with these numbers."""
    return weights(
        tl.load(group + f.BETA1), tl.load(group + f.OF_GRADIENT), tl.load(group + f.BETA2), tl.load(group + f.RATE), t
    )


@triton.jit
def now(tensor, number, group, rates):
    """t, 1 − β̂₂ₜ, β̂₂ₜ and 1 − β̂₁ₜ of this step.

    The last step has left the rates of this one, as doubles are slow on many cards, unless t was changed meanwhile.
    """
    t = tl.load(tl.load(tensor + f.STEP).to(tl.pointer_type(tl.float32))).to(tl.float64) + 1.0
    slot = rates + number * f.RATES + (t.to(tl.int64) & 1) * f.HALF
    w2, beta2, w1 = tl.load(slot + f.RATE_W2), tl.load(slot + f.RATE_BETA2), tl.load(slot + f.RATE_W1)
    if tl.load(slot + f.RATE_T) != t:
        w2, beta2, w1 = weights_of_group(group, t)
    return t, w2, beta2, w1
