"""Single numbers: how they are stored, how they are converted, and the ways in which a loop may be compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import getitem
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic, overload, register_jitable
from numba.np.arrayobj import make_array, populate_array

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise RuntimeError("the compiled step needs Numba's compiler, which NUMBA_DISABLE_JIT=1 turns off")

Function = TypeVar("Function", bound=Callable[..., Any])


# No entry points from Python or C, no memory to manage, no patterns to look for: each takes time to compile.
INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, "no_rewrites": True}
OPTIONS: Any = {"nogil": True, "error_model": "numpy", **INNER}


def _compiling(fastmath: set[str]) -> Callable[[Function], Function]:
    """Make a decorator for functions that only other compiled functions call.

    They need no entry points of their own, which would take a third of their compile time.
    """
    decorator: Callable[[Function], Function] = njit(fastmath=fastmath or False, **OPTIONS)
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


def _viewing(context: Any, address: Any, size: Any, dtype: Any) -> Any:
    view = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, item = make_array(view)(context, builder), context.get_abi_sizeof(context.get_data_type(view.dtype))
        data = builder.inttoptr(arguments[0], context.get_data_type(view.dtype).as_pointer())
        size = context.cast(builder, arguments[1], signature.args[1], types.intp)
        stride = context.get_constant(types.intp, item)
        populate_array(array, data=data, shape=[size], strides=[stride], itemsize=stride, meminfo=None)
        return array._getvalue()

    return view(types.int64, size, dtype), generate


def _measuring(context: Any, dtype: Any) -> Any:
    size = dtype.dtype.bitwidth // 8
    return types.int64(dtype), lambda context, *_: context.get_constant(types.int64, size)


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


array_at: Any = intrinsic(_viewing)  # array_at(address, size, dtype): the memory at an address as an array
size_of: Any = intrinsic(_measuring)  # size_of(dtype): the bytes of a number of this type
add_at: Any = intrinsic(_adding)  # add_at(address, n): adds n to an integer that threads share; returns what was there
call_at: Any = intrinsic(_calling)  # call_at(function, job, phase, unit, scratch): calls the machine code at an address
yield_thread: Any = (
    types.ExternalFunction("sched_yield", types.intc()) if os.name == "posix" else register_jitable(lambda: 0)
)


def _picking(context: Any, values: Any, j: Any) -> Any:
    if not isinstance(values, types.Array):
        return values(values, j), lambda context, builder, signature, arguments: arguments[0]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_function(getitem, signature)(builder, arguments)

    return values.dtype(values, j), generate


def _rooting(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.sqrt", [arguments[0].type])
        return builder.call(function, arguments)

    return value(value), generate


def _type_of(like: Any) -> Any:
    return like.dtype if isinstance(like, types.NumberClass) else like


def _widening(context: Any, value: Any, like: Any) -> Any:
    to = _type_of(like)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, kind = arguments[0], value
        if value == types.uint16:  # bfloat16: the upper half of a float32
            bits = builder.shl(builder.zext(number, ir.IntType(32)), ir.IntType(32)(16))
            number, kind = builder.bitcast(bits, ir.FloatType()), types.float32
        elif value == types.int16:
            number, kind = context.compile_internal(builder, _half, types.float32(value), [number]), types.float32
        return context.cast(builder, number, kind, to)

    return to(value, like), generate


def _narrowing(context: Any, value: Any, like: Any) -> Any:
    to = _type_of(like)
    rounding = {types.uint16: _narrow_bfloat16, types.int16: _narrow_half}.get(to)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if rounding is None:
            return context.cast(builder, arguments[0], value, to)
        return context.compile_internal(builder, rounding, to(value), arguments[:1])

    return to(value, like), generate


root: Any = intrinsic(_rooting)  # root(value): its square root, an instruction (NumPy's is a call to C's library)
pick: Any = intrinsic(_picking)  # pick(values, j): element j of an array; a number is its own element, whatever j
widen: Any = intrinsic(_widening)  # widen(value, like): a stored number as one to compute with, of the type `like`
narrow: Any = intrinsic(_narrowing)  # narrow(value, like): a computed number as one to store, rounded to nearest even


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


def _narrow_bfloat16(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    upper = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(upper) if value == value else np.uint16(0x7FC0)


def _narrow_half(value: Any) -> Any:
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


@overload(stochastic, strict=False, jit_options=OPTIONS)
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
def random_word(element: Any, key1: Any, key2: Any) -> Any:
    """Compute the random word of one element, as `rounding.random_words` does."""
    h = np.uint32(np.uint32(element) ^ np.uint32(np.uint32(element >> 32) * np.uint32(0x9E3779B1)))
    h = np.uint32(h ^ key1)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ key2)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))
