"""A momentum that is stored in int8: read to compute with, and rounded to be stored, block by block.

As `core/momentum.py` has it, to the bit. Every other momentum is used where it lies: `elements.stored` rounds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from adafactor.core.momentum import MOST, TINY
from adafactor.kernels.cpu.native import jobs, lines
from adafactor.kernels.cpu.native.compiling import OPTIONS, as_written
from adafactor.kernels.cpu.native.intrinsics import Array, view, widen
from adafactor.kernels.cpu.native.jobs import Flat, Job, Stretch

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


def store(job: Job, part: Part, m: Array, values: Array, words: Array) -> None:
    """Round an int8 momentum from `values` to `m`, at random by the upper half of the words.

    Where X is rounded at random, the words are here already.
    """


@overload(store, strict=False, jit_options=OPTIONS)
def _store(job: Any, part: Any, m: Any, values: Any, words: Any) -> Any:
    if m.dtype != types.int8:
        return lambda job, part, m, values, words: None

    def draw_and_encode(job: Job, part: Part, m: Array, values: Array, words: Array) -> None:
        if job.rounds_momentum_at_random and job.rounding != jobs.STOCHASTIC:
            lines.draw(words, part.element, part.step, np.uint32(job.key1), np.uint32(job.key2))
        _encode(job, part, values, words)

    return draw_and_encode


@as_written
def _decode(job: Job, part: Part, values: Array) -> None:
    size = job.block
    scales = view(job.m_scales, part.first_scale, -(-len(values) // size), np.float32)
    for i in range(len(scales)):
        integers, block = part.m[i * size : (i + 1) * size], values[i * size : (i + 1) * size]
        scale = widen(scales[i], values[0])
        for j in range(len(block)):
            block[j] = widen(integers[j], scale) * scale


@as_written
def _encode(job: Job, part: Part, values: Array, words: Array) -> None:
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
