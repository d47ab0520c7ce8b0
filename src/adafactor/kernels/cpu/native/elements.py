"""Single numbers: the types in which they are stored, and the roundings that are not to nearest."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from adafactor.kernels.cpu.native.compiling import OPTIONS
from adafactor.kernels.cpu.native.intrinsics import narrow


class Kind(NamedTuple):
    """What a part is compiled for: Numba compiles a loop anew for every combination that it is called with.

    The types in which X, G and the statistics are stored are float32, float64, uint16 (bfloat16) or int16 (float16);
    that of the momentum is the statistics', uint16 or int8.
    """

    x: Any
    g: Any
    stat: Any
    m: Any
    sum: Any  # in which squares are summed: the statistics' type, or double where that has no room for them
    row_scale: Any  # `lines.scale_of_line`, or `lines.scales_of_slices` where lines consist of slices
    operands: Any  # `momentum.beside_gradient`, or `momentum.of_gradient` where that takes the place of G
    descend: Any  # `lines.descend` or `lines.descend_unfactored`
    step: Any  # `apply.step_in_place`, or `apply.step_rounded` where X is computed elsewhere


def stochastic(value: Any, word: Any, like: Any) -> Any:
    """Round one number as `rounding.stochastic` does, given its random word."""


@overload(stochastic, strict=False, jit_options=OPTIONS)
def _stochastic(value: Any, word: Any, like: Any) -> Any:
    if like == types.uint16:
        return _stochastic_bfloat16
    if like == types.int16:
        return _stochastic_half
    return lambda value, word, like: value  # float32 and float64 are stored as computed: nothing to round


def _stochastic_bfloat16(value: Any, word: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # beyond the largest number there is only infinity, and half a unit rounds to nearest
    more = np.uint32(0x8000) if size > np.uint32(0x7F7F0000) else np.uint32(word & np.uint32(0xFFFF))
    up = np.uint16(np.uint32(bits + more) >> np.uint32(16))
    return np.uint16(0x7FC0) if size > np.uint32(0x7F800000) else up


def _stochastic_half(value: Any, word: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if size > np.uint32(0x477FE000):  # beyond 65504
        return narrow(value, like)
    half = np.uint32(size - np.uint32(112 << 23) + np.uint32(word & np.uint32(0x1FFF))) >> np.uint32(13)
    if size < np.uint32(0x38800000):
        units = np.float32(size.view(np.float32) * np.float32(2.0**24))
        below = np.floor(units)
        up = np.float32(np.uint32(word >> np.uint32(8))) * np.float32(2.0**-24) < units - below
        half = np.uint32(below) + np.uint32(up)
    return np.int16(np.uint16(half | sign))


def stored(value: Any, word: Any, at_random: Any, like: Any) -> Any:
    """Round one number of a momentum, at random by the upper half of its word, or to nearest."""


@overload(stored, strict=False, jit_options=OPTIONS)
def _stored(value: Any, word: Any, at_random: Any, like: Any) -> Any:
    if like != types.uint16:
        return lambda value, word, at_random, like: value  # as computed

    def rounded(value: Any, word: Any, at_random: Any, like: Any) -> Any:
        return stochastic(value, np.uint32(word >> np.uint32(16)), like) if at_random else narrow(value, like)

    return rounded


def is_remainder(kept: Any, value: Any, like: Any) -> Any:
    """Say whether rounding can have taken this away from a number, as `rounding.remainder` does."""


@overload(is_remainder, strict=False, jit_options=OPTIONS)
def _is_remainder(kept: Any, value: Any, like: Any) -> Any:
    half_unit = np.float32(2.0**-8 if like == types.uint16 else 2.0**-11)

    def compare(kept: Any, value: Any, like: Any) -> Any:
        power = np.uint32(np.float32(value).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
        return abs(kept) <= power * half_unit

    return compare


@register_jitable(**OPTIONS)
def mix(h: Any, salt: Any) -> Any:
    """Make a random word of another, as `rounding.mix` does."""
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ salt)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))
