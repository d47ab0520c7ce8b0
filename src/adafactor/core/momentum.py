"""How the momentum is kept: in the statistics' precision, in bfloat16, or in int8 with a float32 scale for each block.

Its name in the state says what it averages: `momentum_of_update`, `momentum_of_direction` or `momentum_of_gradient`,
and then `_int8` where it is kept so, beside its scales in `momentum_scale`.

A step computes the momentum in the statistics' precision, moves X by that, and then rounds it into the state: to one
neighbour or the other at random, so that a change too small for the format is right in the mean.

A *block* is a few indices along the last factored axis, a power of two of them, with all that follows: at most BLOCK
elements, unless what follows is more by itself. So blocks do not depend on how a tensor lies in memory, and a shard
along an earlier axis never divides one.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adafactor.core import rounding
from adafactor.core.factoring import Factored, Factoring, Shape, find_factoring, is_stack, statistics_dtype
from adafactor.core.settings import Settings

BLOCK = 128
# Below, int8 would save nothing that counts: biases, norms and adapters are a thousandth of a model, and a few numbers
# with one scale are rounded more coarsely than many.
SMALLEST = 4096
MOST = 127  # the largest int8 that is used: the negative ones reach as far
TINY = 2.0**-100  # a block with no larger number is kept as zeros: 127/x would leave float32
OF = ("update", "direction", "gradient")  # what it may average


class Blocks(NamedTuple):
    """How a tensor is divided into blocks."""

    axis: int  # the last factored axis
    length: int  # indices of it in a block


def blocks_of(factoring: Factoring, settings: Settings) -> Blocks | None:
    """The blocks of an int8 momentum; None where it is kept as floating-point numbers."""
    shape = factoring.shape
    one = shape[1:] if settings.per_slice and is_stack(shape) else shape  # slices have blocks as if they were alone
    if settings.momentum_dtype != "int8" or len(one) < 2 or prod(one) < SMALLEST:
        return None
    if not isinstance(factoring, Factored):
        factoring = find_factoring(shape, "row", settings.axes, 0, settings.per_slice)
    assert isinstance(factoring, Factored)
    axis = max(factoring.row_axis, factoring.col_axis)
    behind = prod(shape[axis + 1 :])
    if shape[axis] * behind < BLOCK:
        return None
    return Blocks(axis, 1 << max(0, (BLOCK // behind).bit_length() - 1))


def key(of: str, is_int8: bool = False) -> str:
    """The name in the state of a momentum that averages this."""
    return f"momentum_of_{of}_int8" if is_int8 else f"momentum_of_{of}"


BUFFERS = tuple(key(of, is_int8) for of in OF for is_int8 in (False, True))


def key_in(state: Mapping[str, Any]) -> str | None:
    """The name of the momentum that a state has; None without one."""
    return next((key for key in BUFFERS if key in state), None)


def buffer(state: Mapping[str, Tensor]) -> Tensor | None:
    """The momentum as the state keeps it, in any format; None without one. Scales of int8 are `momentum_scale`."""
    key = key_in(state)
    return None if key is None else state[key]


def float_dtype(p: Tensor, settings: Settings) -> torch.dtype:
    """The dtype of a momentum that is not int8."""
    return torch.bfloat16 if settings.momentum_dtype == "bfloat16" else statistics_dtype(p.dtype)


def is_rounded(state: Mapping[str, Tensor], settings: Settings, dtype: torch.dtype) -> bool:
    """Whether the momentum is rounded on its way into the state, from the dtype that it is computed in."""
    return bool(settings.beta1) and (kept := buffer(state)) is not None and kept.dtype != dtype


def scale_shape(shape: Shape, blocks: Blocks) -> Shape:
    """The shape of the scales of a tensor, or of a part of one."""
    return *shape[: blocks.axis], -(-shape[blocks.axis] // blocks.length)


def encode(value: Tensor, blocks: Blocks, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round numbers to int8, up where the random words (their upper half) say so; None: to nearest.

    Returns:
        The integers and the scales: a number is their product.
    """
    axis, value = blocks.axis, value.float()
    largest = value.abs().flatten(axis + 1).amax(-1) if value.dim() > axis + 1 else value.abs()
    missing = -largest.shape[axis] % blocks.length
    largest = torch.nn.functional.pad(largest, (0, missing)).unflatten(axis, (-1, blocks.length)).amax(-1)
    largest = torch.where(largest < TINY, 0.0, largest)
    inverse = torch.where(largest > 0, MOST / largest, 0.0)
    chance = 0.5 if random is None else (random >> 16).float() * 2.0**-16
    rounded = (value * spread(inverse, blocks, value) + chance).floor_().clamp_(-MOST, MOST)
    return rounded.to(torch.int8), largest / MOST


def decode(integers: Tensor, scale: Tensor, blocks: Blocks, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that integers and scales stand for."""
    return integers.to(dtype) * spread(scale.to(dtype), blocks, integers)


def spread(scale: Tensor, blocks: Blocks, like: Tensor) -> Tensor:
    """The scale of each element's block, in a shape that broadcasts over the elements."""
    along = scale.repeat_interleave(blocks.length, blocks.axis).narrow(blocks.axis, 0, like.shape[blocks.axis])
    return along.reshape(*along.shape, *(1,) * (like.dim() - along.dim()))


def to_bfloat16(value: Tensor, random: Tensor | None) -> Tensor:
    """Round numbers to bfloat16, up where the random words (their upper half) say so; None: to nearest."""
    value = value.float()
    return value.bfloat16() if random is None else rounding.stochastic(value, torch.bfloat16, random >> 16)


def load(state: Mapping[str, Tensor], blocks: Blocks | None, at: Any, dtype: torch.dtype) -> Tensor:
    """A part of the momentum as numbers to compute with: those of the state themselves, if they are kept so.

    `at` is slices that begin and end between blocks, or `...` for all of it.
    """
    kept = buffer(state)
    assert kept is not None
    return kept[at].to(dtype) if blocks is None else decode(kept[at], _scales(state, blocks, at), blocks, dtype)


def store(
    state: Mapping[str, Tensor],
    blocks: Blocks | None,
    at: Any,
    value: Tensor,
    random: Tensor | None,
    skipped: Tensor | None,
) -> None:
    """Round a part of the momentum into the state; where a step is left out, all stays."""
    kept = buffer(state)
    assert kept is not None
    if blocks is None:
        pairs = [(kept[at], to_bfloat16(value, random))]
    else:
        integers, scale = encode(value, blocks, random)
        pairs = [(kept[at], integers), (_scales(state, blocks, at), scale)]
    for old, new in pairs:
        old.copy_(new if skipped is None else torch.where(skipped, old, new))


def _scales(state: Mapping[str, Tensor], blocks: Blocks, at: Any) -> Tensor:
    scale = state["momentum_scale"]
    if at is ...:
        return scale
    along = at[blocks.axis]
    return scale[(*at[: blocks.axis], slice(along.start // blocks.length, -(-along.stop // blocks.length)))]
