"""The momentum of a stretch: read to compute with, and rounded to be stored, as `core/momentum.py` has it, to the bit.

In int8 it is read and rounded block by block. Every other momentum is used where it lies, and `elements.stored` rounds
it; but one of the gradient, in bfloat16, is what U is made of before it is rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from adafactor.core.momentum import MOST, TINY
from adafactor.kernels.cpu.native import jobs, lines
from adafactor.kernels.cpu.native.compiling import OPTIONS, as_written
from adafactor.kernels.cpu.native.elements import stored
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view, widen
from adafactor.kernels.cpu.native.jobs import Job, Stretch
from adafactor.kernels.cpu.native.lines import Draws

UNIT = 2.0**-16  # of the upper half of a random word, as a chance from 0 to 1


@as_written
def beside_gradient(job: Job, part: Stretch, values: Array, phase: int) -> tuple[Array, Array]:
    """Return the momentum of a stretch, if there is one, and G: what U is made of."""
    return load(job, part, part.m, values), part.g


@as_written
def of_gradient(job: Job, part: Stretch, values: Array, phase: int) -> tuple[Array, Array]:
    """Return the momentum of a stretch twice: U is made of it. In the last pass G is averaged into it first."""
    m = load_wide(job, part, part.m, values)
    if phase == jobs.APPLY:
        lines.blend(m, part.g, narrow(job.w1, m[0]))
    return m, m


def load(job: Job, part: Stretch, m: Array, values: Array) -> Array:
    """Return the momentum of a stretch to compute with: `m`, as it is stored, or in place of int8 `values`, filled."""
    return values  # in compiled code, what follows takes its place


@overload(load, strict=False, jit_options=OPTIONS)
def _load(job: Any, part: Any, m: Any, values: Any) -> Any:
    if m.dtype != types.int8:
        return lambda job, part, m, values: m

    def decode(job: Job, part: Stretch, m: Array, values: Array) -> Array:
        _decode(job, part, values)
        return values

    return decode


def load_wide(job: Job, part: Stretch, m: Array, values: Array) -> Array:
    """Do the same where numbers to compute with are wanted: in place of bfloat16, too, it is `values`."""
    return values  # likewise


@overload(load_wide, strict=False, jit_options=OPTIONS)
def _load_wide(job: Any, part: Any, m: Any, values: Any) -> Any:
    if m.dtype != types.uint16:
        return _load(job, part, m, values)

    def widened(job: Job, part: Stretch, m: Array, values: Array) -> Array:
        lines.load(values, m)
        return values

    return widened


def store(job: Job, part: Stretch, m: Array, values: Array, draws: Draws) -> None:
    """Round a momentum from `values` to `m`, unless it was used where it lies."""


@overload(store, strict=False, jit_options=OPTIONS)
def _store(job: Any, part: Any, m: Any, values: Any, draws: Any) -> Any:
    if m.dtype == values.dtype:
        return lambda job, part, m, values, draws: None
    if m.dtype == types.int8:
        return lambda job, part, m, values, draws: _encode(job, part, values, draws)
    return lambda job, part, m, values, draws: _round(m, values, draws)


@as_written
def _round(m: Array, values: Array, draws: Draws) -> None:
    """Round numbers to bfloat16."""
    low = draws.low
    for j in range(len(m)):
        m[j] = stored(values[j], lines.word_of(low, draws), draws.at_random, m[j])
        low = np.uint32(low + draws.step)


@as_written
def _decode(job: Job, part: Stretch, values: Array) -> None:
    """Fill a block of numbers, or a part of one."""
    integers, scale = part.m, widen(view(job.m_scales, part.first_scale, 1, np.float32)[0], values[0])
    for j in range(len(values)):
        values[j] = widen(integers[j], scale) * scale


@as_written
def _encode(job: Job, part: Stretch, values: Array, draws: Draws) -> None:
    """Round a block of numbers."""
    integers, scale, low = part.m, view(job.m_scales, part.first_scale, 1, np.float32), draws.low
    largest = _largest(values)
    scale[0] = largest / np.float32(MOST)
    inverse = np.float32(MOST) / largest if largest > 0 else np.float32(0.0)
    if draws.at_random:
        for j in range(len(values)):
            chance = np.float32(np.uint32(lines.word_of(low, draws) >> np.uint32(16))) * np.float32(UNIT)
            integers[j] = _as_int8(np.float32(values[j]) * inverse + chance)
            low = np.uint32(low + draws.step)
    else:
        for j in range(len(values)):
            integers[j] = _as_int8(np.float32(values[j]) * inverse + np.float32(0.5))


@as_written
def _largest(values: Array) -> Any:
    """Return the largest of the absolute values; 0 if none is worth keeping.

    Floating-point numbers without their sign are ordered as their bits are, and a NaN is above all others.
    """
    most = np.uint32(0)
    for j in range(len(values)):
        most = max(most, np.uint32(np.float32(values[j]).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    largest = np.uint32(most).view(np.float32)
    return np.float32(0.0) if largest < np.float32(TINY) else largest


@as_written
def _as_int8(value: Any) -> Any:
    """Return the integer at or below a number, within what is used of int8."""
    below = min(max(np.floor(value), np.float32(-MOST)), np.float32(MOST))
    return np.int8(np.int32(below))
