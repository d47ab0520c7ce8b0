"""Large tensors divided into blocks, so that extra memory stays bounded; small ones end to end, to save launches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adafactor.core import momentum, sums
from adafactor.core.equations import Scalar
from adafactor.core.factoring import summed

Block = tuple[slice, ...] | None  # None: the tensor is one block

BLOCK_CPU = 2**20  # elements: a float32 block is 4 MB and stays in a shared cache; smaller ones measured slower
BLOCK_DEVICE = 3 * 2**24  # elements: a pass takes at most 12 bytes for each, 600 MB, and needs few launches
ROUNDED = 6  # other roundings than to nearest take up to 32 bytes for each, so their blocks are so much smaller


def blocks(t: Tensor, rounding: str = "nearest", whole: momentum.Blocks | None = None) -> Iterator[Block]:
    """Divide a tensor into blocks that follow its memory: the axes of the longest strides are divided first.

    The blocks of an int8 momentum stay `whole`.
    """
    size = BLOCK_CPU if t.is_cpu else BLOCK_DEVICE if rounding == "nearest" else BLOCK_DEVICE // ROUNDED
    chunk, inner = list(t.shape), t.numel()
    if inner <= size:
        return iter([None])
    for axis in sorted(range(t.dim() if whole is None else whole.axis + 1), key=t.stride, reverse=True):
        if inner <= size:
            break
        inner //= t.shape[axis]
        least = whole.length if whole is not None and axis == whole.axis else 1
        chunk[axis] = max(least, size // inner // least * least)
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


def sums_of_squares(g: Tensor, axes: Mapping[str, int], dtype: torch.dtype, shrink: float) -> dict[str, Tensor]:
    """ΣG²·shrink over each of some axes, in double; G² itself is formed block by block, in `dtype`."""
    totals: dict[str, Tensor] = {}
    for block in blocks(g):
        q = part(g, block)
        q = q * q if q.dtype == dtype else q.to(dtype).square_()
        if shrink != 1:
            q.mul_(shrink)
        for key, axis in axes.items():
            values = sums.sum_along(q, axis).unsqueeze(axis)
            if block is None:
                totals[key] = values
                continue
            if key not in totals:
                totals[key] = values.new_zeros(summed(g.shape, axis))
            totals[key][(*block[:axis], slice(None), *block[axis + 1 :])].add_(values)
    return totals


class Pack:
    """Small tensors in one vector, so that an operation on all is one launch on a device. One alone stays as it is."""

    def __init__(self, tensors: Sequence[Tensor]):
        """Remember where each of them lies; the index lasts."""
        self._shapes, self._sizes = [t.shape for t in tensors], [t.numel() for t in tensors]
        self._entry: Tensor | None = None  # which of them each element belongs to
        if len(tensors) > 1:
            sizes = torch.tensor(self._sizes, device=tensors[0].device)
            numbers = torch.arange(len(sizes), device=sizes.device)
            self._entry = numbers.repeat_interleave(sizes, output_size=sum(self._sizes))  # the host need not wait

    def join(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Put tensors end to end."""
        return (tensors[0] if self._entry is None else torch.cat([t.reshape(-1) for t in tensors])).to(dtype)

    def split(self, joined: Tensor) -> list[Tensor]:
        """Take them apart again, as views."""
        if self._entry is None:
            return [joined]
        return [t.view(shape) for t, shape in zip(joined.split(self._sizes), self._shapes, strict=True)]

    def sums(self, joined: Tensor) -> Tensor:
        """The sum of each tensor's elements, none of which is negative."""
        return joined.sum() if self._entry is None else torch.stack(torch._foreach_norm(self.split(joined), 1))

    def spread(self, value: Scalar) -> Any:
        """A scalar of each tensor, for each of its elements."""
        if not isinstance(value, Tensor):
            return value
        return value.reshape(()) if self._entry is None else value[self._entry]
