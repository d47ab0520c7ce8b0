"""What Numba's Python has no words for: memory at an address, atomics, calls through pointers, 16-bit numbers.

Each is a few instructions that are put where it is called. Numba asks the function below for the types and for
something that generates LLVM's code; the line with its name and type is what the loops see.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import getitem
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, register_jitable
from numba.np.arrayobj import make_array, populate_array

Array = npt.NDArray[Any]
WORD = ir.IntType(64)
inline: Any = intrinsic  # what it makes of a function takes other arguments, which no type says

# ---- memory and threads


def _view(context: Any, address: Any, start: Any, size: Any, dtype: Any) -> Any:
    view = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, start, size, _ = arguments
        array, item = make_array(view)(context, builder), context.get_data_type(view.dtype)
        stride = context.get_constant(types.intp, context.get_abi_sizeof(item))
        data = builder.inttoptr(builder.add(address, builder.mul(start, stride)), item.as_pointer())
        populate_array(array, data=data, shape=[size], strides=[stride], itemsize=stride, meminfo=None)
        return array._getvalue()

    return view(types.int64, types.int64, types.int64, dtype), generate


def _add_at(context: Any, address: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], WORD.as_pointer()), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _call_at(context: Any, function: Any, job: Any, phase: Any, chunk: Any, scratch: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [WORD] * 4)
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


# view(address, start, size, dtype) returns so many of the numbers at an address, from number `start` on, as an array.
view: Callable[[int, int, int, Any], Array] = inline(_view)
# add_at(address, n) adds n to an integer that threads share, and returns what was there.
add_at: Callable[[int, int], int] = inline(_add_at)
# call_at(function, job, phase, chunk, scratch) calls the machine code at an address.
call_at: Callable[[int, int, int, int, int], None] = inline(_call_at)
# yield_thread() lets another thread have the core.
_sched_yield: Any = types.ExternalFunction("sched_yield", types.intc())
yield_thread: Callable[[], int] = _sched_yield if os.name == "posix" else register_jitable(lambda: 0)

# ---- numbers


def _pick(context: Any, values: Any, j: Any) -> Any:
    if not isinstance(values, types.Array):
        return values(values, j), lambda context, builder, signature, arguments: arguments[0]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_function(getitem, signature)(builder, arguments)

    return values.dtype(values, j), generate


def _root(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [arguments[0].type]), arguments)

    return value(value), generate


def _type_of(like: Any) -> Any:
    return like.dtype if isinstance(like, types.NumberClass) else like


def _widen(context: Any, value: Any, like: Any) -> Any:
    to = _type_of(like)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, dtype = arguments[0], value
        if value == types.uint16:  # bfloat16: the upper half of a float32
            bits = builder.shl(builder.zext(number, ir.IntType(32)), ir.IntType(32)(16))
            number, dtype = builder.bitcast(bits, ir.FloatType()), types.float32
        elif value == types.int16:
            number = context.compile_internal(builder, _widen_half, types.float32(value), [number])
            dtype = types.float32
        return context.cast(builder, number, dtype, to)

    return to(value, like), generate


def _narrow(context: Any, value: Any, like: Any) -> Any:
    to = _type_of(like)
    rounding = {types.uint16: _narrow_bfloat16, types.int16: _narrow_half}.get(to)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if rounding is None:
            return context.cast(builder, arguments[0], value, to)
        return context.compile_internal(builder, rounding, to(value), arguments[:1])

    return to(value, like), generate


def _widen_half(value: Any) -> Any:
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


# pick(values, j) returns element j of an array; a number is its own element, whatever j.
pick: Callable[[Any, int], float] = inline(_pick)
# root(value) is the square root as an instruction; NumPy's is a call to C's library.
root: Callable[[float], float] = inline(_root)
# widen(value, like) turns a stored number into one to compute with, of the type `like`.
widen: Callable[[Any, Any], float] = inline(_widen)
# narrow(value, like) turns a computed number into one to store, rounded to nearest even.
narrow: Callable[[float, Any], float] = inline(_narrow)
