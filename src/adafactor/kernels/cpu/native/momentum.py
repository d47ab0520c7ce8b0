"""A momentum that is stored in int8: read to compute with, and rounded to be stored, block by block.

As `core/momentum.py` has it, to the bit. Every other momentum is used where it lies: `elements.stored` rounds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from adafactor.core.momentum import MOST, TINY
from adafactor.kernels.cpu.native import lines
from adafactor.kernels.cpu.native.compiling import OPTIONS, as_written
from adafactor.kernels.cpu.native.intrinsics import Array, view, widen
from adafactor.kernels.cpu.native.jobs import Flat, Job, Stretch
from adafactor.kernels.cpu.native.lines import Draws

UNIT = 2.0**-16  # of the upper half of a random word, as a chance from 0 to 1
Part = Stretch | Flat


def load(job: Job, part: Part, m: Array, values: Array) -> Array:
    """Return the momentum of a stretch to compute with: `m`, as it is stored, or in place of int8 `values`, filled."""
    return values  # in compiled code, what follows takes its place


@overload(load, strict=False, jit_options=OPTIONS)
def _load(job: Any, part: Any, m: Any, values: Any) -> Any:
    if m.dtype != types.int8:
        return lambda job, part, m, values: m

    def decode(job: Job, part: Part, m: Array, values: Array) -> Array:
        _decode(job, part, values)
        return values

    return decode


def store(job: Job, part: Part, m: Array, values: Array, draws: Draws) -> None:
    """Round an int8 momentum from `values` to `m`."""


@overload(store, strict=False, jit_options=OPTIONS)
def _store(job: Any, part: Any, m: Any, values: Any, draws: Any) -> Any:
    if m.dtype != types.int8:
        return lambda job, part, m, values, draws: None
    return lambda job, part, m, values, draws: _encode(job, part, values, draws)


@as_written
def _decode(job: Job, part: Part, values: Array) -> None:
    """Fill a block of numbers, or a shorter one at the end of a line."""
    integers, scale = part.m, widen(view(job.m_scales, part.first_scale, 1, np.float32)[0], values[0])
    for j in range(len(values)):
        values[j] = widen(integers[j], scale) * scale


@as_written
def _encode(job: Job, part: Part, values: Array, draws: Draws) -> None:
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
