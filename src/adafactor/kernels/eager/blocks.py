"""Dividing a tensor into blocks, so that what a pass needs besides it stays bounded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from adafactor.core.factoring import sum_dtype

Block = tuple[slice, ...] | None  # None: the tensor is one block

BLOCK_CPU = 2**20  # elements: a float32 block is 4 MB and stays in a shared cache; smaller ones measured slower
BLOCK_DEVICE = 2**25  # elements: a pass takes at most 12 bytes for each, 400 MB, and needs few launches
ROUNDED = 4  # other roundings than to nearest take up to 32 bytes for each, so their blocks are so much smaller


def block_size(t: Tensor, rounding: str = "nearest") -> int:
    """How many elements one block may have."""
    return BLOCK_CPU if t.is_cpu else BLOCK_DEVICE if rounding == "nearest" else BLOCK_DEVICE // ROUNDED


def blocks(t: Tensor, rounding: str = "nearest") -> Iterator[Block]:
    """Divide a tensor into blocks that follow its memory: the axes of the longest strides are divided first."""
    size, inner = block_size(t, rounding), t.numel()
    if inner <= size:
        return iter([None])
    chunk = list(t.shape)
    for axis in sorted(range(t.dim()), key=t.stride, reverse=True):
        if inner <= size:
            break
        inner //= t.shape[axis]
        chunk[axis] = max(1, size // inner)
    slices = [
        [slice(start, min(start + width, length)) for start in range(0, length, width)]
        for length, width in zip(t.shape, chunk, strict=True)
    ]
    return itertools.product(*slices)


def part(t: Tensor, block: Block) -> Tensor:
    """The part of a tensor that meets a block; along an axis of length 1 it broadcasts."""
    if block is None or t.dim() == 0:
        return t
    return t[tuple(s if n > 1 else slice(None) for s, n in zip(block, t.shape, strict=True))]


def add(total: Tensor | None, values: Tensor, block: Block, axis: int, shape: tuple[int, ...]) -> Tensor:
    """Add a block's sums over an axis to those of the blocks before it."""
    if block is None:
        return values
    if total is None:
        if values.shape == shape:
            return values
        total = torch.zeros(shape, dtype=sum_dtype(values.device), device=values.device)
    total[block[:axis] + block[axis + 1 :]].add_(values)
    return total
