"""Cutting a tensor into blocks, so that what a walk needs besides it stays bounded, and the memory it computes in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype, sum_dtype

Block = tuple[slice, ...] | None  # None: the tensor is one block

BLOCK_CPU = 2**20  # elements: a float32 block is 4 MB and stays in a shared cache; smaller ones measured slower
BLOCK_DEVICE = 2**21  # elements: large enough to fill a GPU; four float32 blocks are 34 MB


def block_size(t: Tensor) -> int:
    """How many elements one block may have."""
    return BLOCK_CPU if t.is_cpu else BLOCK_DEVICE


def blocks(t: Tensor) -> Iterator[Block]:
    """Cut a tensor into blocks that follow its memory: the axes of the longest strides are cut first."""
    size, inner = block_size(t), t.numel()
    if inner <= size:
        return iter([None])
    chunk = list(t.shape)
    for axis in sorted(range(t.dim()), key=t.stride, reverse=True):
        if inner <= size:
            break
        inner //= t.shape[axis]
        chunk[axis] = max(1, size // inner)
    cuts = [
        [slice(start, min(start + width, size)) for start in range(0, size, width)]
        for size, width in zip(t.shape, chunk, strict=True)
    ]
    return itertools.product(*cuts)


def shrink_of(shape: tuple[int, ...]) -> float:
    """A power of two that keeps sums over any axis in the range of what is summed, exactly."""
    return 2.0 ** -max(shape, default=1).bit_length()


def part(t: Tensor, block: Block) -> Tensor:
    """The part of a tensor that is in the block."""
    return t if block is None else t[block]


def part_of_scale(scale: Scalar, block: Block) -> Scalar:
    """The part of a broadcast vector that meets the block: an axis of length 1 stays whole."""
    if block is None or not isinstance(scale, Tensor) or scale.dim() == 0:
        return scale
    return scale[tuple(s if n > 1 else slice(None) for s, n in zip(block, scale.shape, strict=True))]


def without(block: Block, axis: int) -> Block:
    """The block with one of its axes gone."""
    return None if block is None else block[:axis] + block[axis + 1 :]


def add(total: Tensor | None, values: Tensor, block: Block, shape: tuple[int, ...]) -> Tensor:
    """Add a block's sums to those of the blocks before it."""
    if block is None:
        return values
    if total is None:
        total = torch.zeros(shape, dtype=sum_dtype(values.device), device=values.device)
    total[block] += values
    return total


class Scratch:
    """Two reusable blocks of memory: one to compute in, one for what must be converted first."""

    def __init__(self, x: Tensor):
        """Reserve them in the precision of the statistics, no larger than the parameter."""
        self.dtype = statistics_dtype(x.dtype)
        self._memory = x.new_empty(min(block_size(x), x.numel()), dtype=self.dtype)
        self._view = self._memory  # as it was last arranged

    def like(self, t: Tensor) -> Tensor:
        """The computing block in the shape and stride order of `t`."""
        if self._view.shape != t.shape or self._view.stride() != t.stride():
            self._view = _arrange(self._memory, t)
        return self._view

    def flat(self, t: Tensor) -> Tensor:
        """The computing block, of which `t` is the view, as a vector in the order of memory."""
        return self._memory[: t.numel()]

    def load(self, t: Tensor) -> Tensor:
        """`t` in the statistics' precision: itself, or a copy in the other block."""
        return t if t.dtype == self.dtype else _arrange(self._other, t).copy_(t)

    @cached_property
    def _other(self) -> Tensor:
        return torch.empty_like(self._memory)


def _arrange(memory: Tensor, t: Tensor) -> Tensor:
    """The first elements of a flat piece of memory as a dense tensor in the shape and stride order of `t`."""
    if t.is_contiguous():
        return memory[: t.numel()].view(t.shape)
    strides, width = [0] * t.dim(), 1
    for axis in sorted(range(t.dim()), key=t.stride):
        strides[axis], width = width, width * t.shape[axis]
    return memory.as_strided(t.shape, strides)
