"""How a number is stored and computed with, one at a time; and the ways to compile."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload, register_jitable

# Multiply-adds may be fused and sums reordered, but never products: G·r·c stays in range only from left to right.
# NaN, infinities and denormals keep their meaning.
exactly = njit(nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
summing = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
as_written = njit(nogil=True, error_model="numpy")  # each operation rounded on its own


DOUBLES, SINGLES = np.empty(0, np.float64), np.empty(0, np.float32)  # for `at`


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An integer as an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def _adding(context: Any, address: Any, number: Any) -> Any:
    """Add to the integer at an address, as one thing among threads; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


add_at: Any = intrinsic(_adding)
rest: Any = types.ExternalFunction("sched_yield", types.intc()) if os.name == "posix" else register_jitable(lambda: 0)


@register_jitable
def at(address: int, size: int, like: Any) -> Any:
    """`size` numbers at an address, of the type of the array `like`."""
    return carray(_pointer(address), (size,), like.dtype)  # type: ignore[call-arg]


def widen(value: Any, like: Any) -> Any:
    """A stored number as one to compute with, in the type of `like`; bfloat16 comes as uint16, float16 as int16."""


def narrow(value: Any, like: Any) -> Any:
    """A computed number as one to store, in the type of `like`, rounded to nearest even."""


@overload(widen, strict=False)
def _widen(value: Any, like: Any) -> Any:
    if value == types.uint16:  # bfloat16: the upper half of a float32
        return lambda value, like: narrow(np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32), like)
    if value == types.int16:
        return lambda value, like: narrow(_half(value), like)
    return lambda value, like: narrow(value, like)


@register_jitable
def _half(value: Any) -> Any:
    sign = np.uint32(np.uint32(value) & np.uint32(0x8000)) << np.uint32(16)
    rest = np.uint32(np.uint32(np.uint32(value) & np.uint32(0x7FFF)) << np.uint32(13))
    number = np.float32(rest.view(np.float32) * np.float32(2.0**112))  # from float16's exponent bias to float32's
    bits = number.view(np.uint32)
    if rest >= np.uint32(0x0F800000):  # infinity and NaN
        bits = np.uint32(rest | np.uint32(0x7F800000))
    return np.uint32(bits | sign).view(np.float32)


@overload(narrow, strict=False)
def _narrow(value: Any, like: Any) -> Any:
    if like == types.uint16:
        return _narrow_bfloat16
    if like == types.int16:
        return _narrow_half
    if like == types.float32:
        return lambda value, like: np.float32(value)
    return lambda value, like: np.float64(value)


def _narrow_bfloat16(value: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    upper = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(upper) if value == value else np.uint16(0x7FC0)


def _narrow_half(value: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
    # the exponent bias changes by 112; adding just below half of what is cut off rounds to even
    normal = np.uint32(size - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    rounded = np.float32(size.view(np.float32) + np.float32(0.5))  # to 2^−24, float16's smallest
    small = np.uint32(rounded.view(np.uint32) - np.uint32(0x3F000000))
    half = small if size < np.uint32(0x38800000) else normal
    if size >= np.uint32(0x477FF000):  # what rounds to 65536 and beyond
        half = np.uint32(0x7C00)
    if value != value:
        half = np.uint32(0x7E00)
    return np.int16(np.uint16(half | sign))


def stochastic(value: Any, word: Any, like: Any) -> Any:
    """`rounding.stochastic` of one number, given its random word."""


@overload(stochastic, strict=False)
def _stochastic(value: Any, word: Any, like: Any) -> Any:
    if like == types.uint16:
        return _stochastic_bfloat16
    if like == types.int16:
        return _stochastic_half
    return lambda value, word, like: value  # whole numbers have nothing to lose


def _stochastic_bfloat16(value: Any, word: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    up = np.uint16(np.uint32(bits + np.uint32(word & np.uint32(0xFFFF))) >> np.uint32(16))
    beyond = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F7F0000)
    return narrow(value, like) if beyond else up


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


@register_jitable
def random_word(element: Any, key1: Any, key2: Any) -> Any:
    """`rounding.random_words` of one element."""
    h = np.uint32(np.uint32(element) ^ np.uint32(np.uint32(element >> 32) * np.uint32(0x9E3779B1)))
    h = np.uint32(h ^ key1)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ key2)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))
