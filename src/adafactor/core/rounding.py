"""From float32 to bfloat16 or float16 without losing what is smaller than half a unit in the last place.

`"stochastic"` rounds to one of the two neighbours with the probability that makes the mean right. Its random numbers
are not drawn but computed, from (seed, parameter, step, element), where an element is counted in the whole parameter,
row by row. So they are the same for every backend, memory order, number of threads and way of sharding, and nothing
needs saving. `"kahan"` keeps what rounding took away in a second 16-bit number and gives it back before the next step.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
WORD = 2**32 - 1
CUT = {torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 that its dtype does not have
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # in the last place of a number from 1 to 2
SMALLEST_NORMAL_HALF = 2.0**-14
SMALLEST_HALF = 2.0**-24

Keys = tuple[Any, Any]  # two words each: Python's numbers, or 0-d tensors where the step count is on a device


def mix(h: Any, salt: Any = 0) -> Any:
    """A word whose bits all depend on all bits of `h`, one to one. Tensors are of int64 and are changed in place."""
    h ^= h >> 16
    h *= 0x7FEB352D
    h &= WORD
    h ^= salt
    h ^= h >> 15
    h *= 0x846CA68B
    h &= WORD
    h ^= h >> 16
    return h


def roots(seed: int, parameter: int) -> tuple[int, int]:
    """What makes the random numbers of one parameter differ from those of all others."""
    first = mix(mix(mix(seed & WORD) ^ (seed >> 32)) ^ parameter)
    return first, mix(first ^ 0x9E3779B9)


def keys(roots: tuple[int, int], step: Any) -> Keys:
    """What makes them differ from step to step."""
    t = step.long() if isinstance(step, Tensor) else int(step)
    return mix(t ^ roots[0]), mix(t ^ roots[1])


def random_words(element: Any, keys: Keys) -> Any:
    """32 random bits for each element, by its number in the whole parameter. Tensors are changed in place."""
    element ^= (element >> 32) * 0x9E3779B1
    element &= WORD
    element ^= keys[0]
    return mix(element, keys[1])


def elements(shape: tuple[int, ...], whole: tuple[int, ...], place: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers of the elements of a part of a tensor, in the part's shape."""
    number = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    for axis, (size, start) in enumerate(zip(shape, place, strict=True)):
        along = torch.arange(start, start + size, device=device) * prod(whole[axis + 1 :])
        number = number + along.view(-1, *(1,) * (len(shape) - axis - 1))
    return number.contiguous()


def stochastic(value: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Round float32 to one of its two neighbours in `dtype`, up where the random bits say so.

    NaN and infinities stay, and so does what `dtype` has; beyond its largest number there is no neighbour, and the
    value is rounded to nearest.
    """
    cut = 2 ** CUT[dtype] - 1
    bits = (value.view(torch.int32) + (random & cut).int()) & ~cut
    rounded = bits.view(torch.float32)
    if dtype == torch.float16:
        rounded = torch.where(value.abs() < SMALLEST_NORMAL_HALF, _subnormal(value, random), rounded)
    return torch.where(value.abs() <= torch.finfo(dtype).max, rounded, value).to(dtype)


def _subnormal(value: Tensor, random: Tensor) -> Tensor:
    units = value.abs() / SMALLEST_HALF
    below = units.floor()
    up = (random >> 8).float() * 2.0**-24 < units - below
    return torch.copysign((below + up) * SMALLEST_HALF, value)


def remainder(kept: Tensor, x: Tensor) -> Tensor:
    """What rounding took away from X, a float32 of now; nothing where it is too much for that X.

    It is at most half a unit in the last place of what it was taken from. Where it is more, X was written over since.
    """
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, X's own
    return torch.where(kept.abs() <= power * HALF_UNIT[kept.dtype], kept, 0)


def lost(value: Tensor, rounded: Tensor) -> Tensor:
    """What rounding took away, exact in float32; nothing where the result is not finite."""
    return torch.where(rounded.isfinite(), value - rounded, 0.0)


def load(x: Tensor, compensation: Tensor | None, dtype: torch.dtype) -> Tensor:
    """X as numbers to compute with, and with its compensation: X itself, if it has their precision."""
    value = x.to(dtype)
    return value if compensation is None else value.add_(remainder(compensation, value))


def store(x: Tensor, value: Tensor, compensation: Tensor | None, random: Tensor | None, skipped: Tensor | None) -> None:
    """Round the numbers into X: with a compensation, by random words, or to nearest.

    Where a step is left out they are X, but for a compensation that was added, so X and it stay as they were.
    """
    if compensation is None:
        if value is not x:
            x.copy_(value if random is None else stochastic(value, x.dtype, random))
        return
    rounded = value.to(x.dtype)
    for old, new in ((x, rounded), (compensation, lost(value, rounded))):
        old.copy_(new if skipped is None else torch.where(skipped, old, new))
