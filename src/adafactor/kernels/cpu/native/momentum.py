"""A momentum that is stored in bfloat16 or int8: read to compute with, and rounded to be stored.

As `core/momentum.py` has it, to the bit. A momentum that is stored as it is computed is used where it lies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from adafactor.core.momentum import MOST, TINY
from adafactor.kernels.cpu.native import jobs, lines
from adafactor.kernels.cpu.native.compiling import OPTIONS, as_written
from adafactor.kernels.cpu.native.elements import stochastic
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view, widen
from adafactor.kernels.cpu.native.jobs import Flat, Job, Stretch

UNIT = 2.0**-16  # of the upper half of a random word, as a chance from 0 to 1
Part = Stretch | Flat


def load(job: Job, part: Part, m: Array, values: Array) -> Array:
    """Return the momentum of a stretch to compute with: `m`, as it is stored, if it is so, else `values`, filled."""
    return values  # in compiled code, what follows takes its place


@overload(load, strict=False, jit_options=OPTIONS)
def _load(job: Any, part: Any, m: Any, values: Any) -> Any:
    if m.dtype not in (types.uint16, types.int8):
        return lambda job, part, m, values: m
    read = _load_bfloat16 if m.dtype == types.uint16 else _load_int8

    def read_and_return(job: Job, part: Part, m: Array, values: Array) -> Array:
        read(job, part, values)
        return values

    return read_and_return


def store(job: Job, part: Part, m: Array, values: Array, words: Array) -> None:
    """Round the momentum of a stretch from `values` to `m`, if it is not stored as it is computed.

    At random it is by the upper half of the words; where X is rounded at random, those are here already.
    """


@overload(store, strict=False, jit_options=OPTIONS)
def _store(job: Any, part: Any, m: Any, values: Any, words: Any) -> Any:
    if m.dtype not in (types.uint16, types.int8):
        return lambda job, part, m, values, words: None
    write = _store_bfloat16 if m.dtype == types.uint16 else _store_int8

    def draw_and_write(job: Job, part: Part, m: Array, values: Array, words: Array) -> None:
        if job.rounds_momentum_at_random and job.rounding != jobs.STOCHASTIC:
            lines.draw(words, part.element, part.step, np.uint32(job.key1), np.uint32(job.key2))
        write(job, part, values, words)

    return draw_and_write


# ---- bfloat16


@as_written
def _load_bfloat16(job: Job, part: Part, values: Array) -> None:
    lines.load(values, part.m)


@as_written
def _store_bfloat16(job: Job, part: Part, values: Array, words: Array) -> None:
    m = part.m
    if job.rounds_momentum_at_random:
        for j in range(len(m)):
            m[j] = stochastic(values[j], np.uint32(words[j] >> np.uint32(16)), m[j])
    else:
        for j in range(len(m)):
            m[j] = narrow(values[j], m[j])


# ---- int8, block by block


@as_written
def _load_int8(job: Job, part: Part, values: Array) -> None:
    size = job.block
    scales = view(job.m_scales, part.first_scale, -(-len(values) // size), np.float32)
    for i in range(len(scales)):
        integers, block = part.m[i * size : (i + 1) * size], values[i * size : (i + 1) * size]
        scale = widen(scales[i], values[0])
        for j in range(len(block)):
            block[j] = widen(integers[j], scale) * scale


@as_written
def _store_int8(job: Job, part: Part, values: Array, words: Array) -> None:
    size = job.block
    scales = view(job.m_scales, part.first_scale, -(-len(values) // size), np.float32)
    for i in range(len(scales)):
        integers, block = part.m[i * size : (i + 1) * size], values[i * size : (i + 1) * size]
        largest = _largest(block)
        scales[i] = largest / np.float32(MOST)
        inverse = np.float32(MOST) / largest if largest > 0 else np.float32(0.0)
        if job.rounds_momentum_at_random:
            random = words[i * size : (i + 1) * size]
            for j in range(len(block)):
                chance = np.float32(np.uint32(random[j] >> np.uint32(16))) * np.float32(UNIT)
                integers[j] = _as_int8(np.float32(block[j]) * inverse + chance)
        else:
            for j in range(len(block)):
                integers[j] = _as_int8(np.float32(block[j]) * inverse + np.float32(0.5))


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
