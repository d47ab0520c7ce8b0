"""Single numbers: how they are stored, how they are converted, and the ways in which a loop may be compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload, register_jitable

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise RuntimeError("the compiled step needs Numba's compiler, which NUMBA_DISABLE_JIT=1 turns off")

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiling(fastmath: set[str]) -> Callable[[Function], Function]:
    """Make a decorator for functions that only other compiled functions call.

    They need no entry points of their own, which would take a third of their compile time.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "fastmath": fastmath or False}
    decorator: Callable[[Function], Function] = njit(nogil=True, error_model="numpy", **options)
    return decorator


# Multiply-adds may be fused and sums reordered, but never products: G·r·c stays in range only from left to right.
# NaN, infinities and denormals keep their meaning.
exactly = _compiling({"contract", "nsz"})
summing = _compiling({"reassoc", "contract", "nsz"})
as_written = _compiling(set())  # each operation is rounded on its own


class Kind(NamedTuple):
    """The types in which X, G and the statistics are stored: float32, float64, uint16 (bfloat16) or int16 (float16).

    Numba compiles a loop anew for every kind that it is called with.
    """

    x: Any
    g: Any
    stat: Any


class Source(NamedTuple):
    """Where the numerator of U lies, which is G or the momentum in its place: an address, and strides along B, P, S."""

    address: int
    b: int
    p: int
    s: int


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Turn an integer into an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def _adding(context: Any, address: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _calling(context: Any, function: Any, job: Any, phase: Any, unit: Any, scratch: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [word] * 4).as_pointer())
        builder.call(pointer, arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


add_at: Any = intrinsic(_adding)  # add_at(address, n): adds n to an integer that threads share; returns what was there
call_at: Any = intrinsic(_calling)  # call_at(function, job, phase, unit, scratch): calls the machine code at an address
yield_thread: Any = (
    types.ExternalFunction("sched_yield", types.intc()) if os.name == "posix" else register_jitable(lambda: 0)
)


@register_jitable
def array_at(address: int, size: int, dtype: Any) -> Any:
    """View the memory at an address as an array."""
    return carray(_pointer(address), (size,), dtype)  # type: ignore[call-arg]


def size_of(dtype: Any) -> Any:
    """Return the bytes of a number of this type."""


@overload(size_of, strict=False)
def _size_of(dtype: Any) -> Any:
    size = dtype.dtype.bitwidth // 8
    return lambda dtype: size


def pick(values: Any, j: int) -> Any:
    """Take element j of an array; a number is its own element, whatever j."""


@overload(pick, strict=False)
def _pick(values: Any, j: int) -> Any:
    return (lambda values, j: values[j]) if isinstance(values, types.Array) else (lambda values, j: values)


def widen(value: Any, like: Any) -> Any:
    """Turn a stored number into one to compute with, of the type `like` (or the type of the number `like`)."""


def narrow(value: Any, like: Any) -> Any:
    """Turn a computed number into one to store, rounded to nearest even."""


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
    size = np.uint32(np.uint32(value) & np.uint32(0x7FFF))
    bits = np.uint32(np.uint32(size << np.uint32(13)) + np.uint32(112 << 23))  # float32's exponent bias
    if size >= np.uint32(0x7C00):  # infinity and NaN
        bits = np.uint32(bits | np.uint32(0x7F800000))
    # By way of an integer: as a float32 it would be subnormal, and become 0 where torch flushes those.
    small = np.float32(np.float32(np.int32(size)) * np.float32(2.0**-24))
    bits = small.view(np.uint32) if size < np.uint32(0x0400) else bits
    return np.uint32(bits | sign).view(np.float32)


@overload(narrow, strict=False)
def _narrow(value: Any, like: Any) -> Any:
    like = like.dtype if isinstance(like, types.NumberClass) else like
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
    """Round one number as `rounding.stochastic` does, given its random word."""


@overload(stochastic, strict=False)
def _stochastic(value: Any, word: Any, like: Any) -> Any:
    if like == types.uint16:
        return _stochastic_bfloat16
    if like == types.int16:
        return _stochastic_half
    return lambda value, word, like: value  # float32 and float64 are stored as computed: nothing to round


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
    """Compute the random word of one element, as `rounding.random_words` does."""
    h = np.uint32(np.uint32(element) ^ np.uint32(np.uint32(element >> 32) * np.uint32(0x9E3779B1)))
    h = np.uint32(h ^ key1)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ key2)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))
