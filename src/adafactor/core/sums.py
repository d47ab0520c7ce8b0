"""Sums of squares of large tensors, chunk by chunk, so that extra memory stays bounded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype, sum_dtype, summed
from adafactor.core.momentum import Blocks

PLAIN = (Tensor, torch.nn.Parameter)  # types with memory of their own; a subclass may have none
At = Any  # what a tensor is indexed with: slices, or `...` for all of it

CHUNK_CPU = 2**20  # elements: a float32 chunk is 4 MB and stays in a shared cache
CHUNK_DEVICE = 3 * 2**24  # elements: a pass takes at most 12 bytes for each, 600 MB, and needs few launches
DRAWING = 6  # random words take up to 32 bytes for each, so chunks that draw them are so much smaller
ROW = 1024  # elements that are summed in their own precision; in double beyond


def on_host(t: Tensor) -> bool:
    """Whether the host can read a tensor without waiting for a device."""
    return t.is_cpu and type(t) in PLAIN


def vector(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Numbers of many parameters, Python's or on the device: in a few operations, where all are of one kind."""
    dtype = sum_dtype(device)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return torch.tensor(values, dtype=dtype, device=device)
    if len(tensors) < len(values) or len({(t.dtype, t.device) for t in tensors}) > 1:
        tensors = [torch.as_tensor(value, dtype=dtype, device=device) for value in values]
    return torch.stack([t.reshape(()) for t in tensors]).to(device, dtype)


def divide(t: Tensor, size: int, whole: Blocks | None = None) -> Iterator[At]:
    """Divide a tensor into chunks that follow its memory: the axes of the longest strides are divided first.

    The blocks of an int8 momentum stay `whole`.
    """
    chunk, inner = list(t.shape), t.numel()
    if inner <= size:
        return iter([...])
    for axis in sorted(range(t.dim() if whole is None else whole.axis + 1), key=t.stride, reverse=True):
        if inner <= size:
            break
        inner //= t.shape[axis]
        least = whole.length if whole is not None and axis == whole.axis else 1
        chunk[axis] = max(least, size // inner // least * least)
    starts = (range(0, length, width) for length, width in zip(t.shape, chunk, strict=True))
    return (
        tuple(slice(i, min(i + width, length)) for i, width, length in zip(place, chunk, t.shape, strict=True))
        for place in itertools.product(*starts)
    )


def square_sums(g: Tensor, axes: Sequence[int], dtype: torch.dtype) -> dict[int, Tensor]:
    """ΣG² over each of some axes, which stay with length 1, in double; infinite where a G² leaves this dtype."""
    wide = sum_dtype(g.device)
    if not g.is_cpu:  # no temporary; on a CPU, torch's norm over columns takes twenty times as long as a sum
        g = g if g.dtype.itemsize <= dtype.itemsize else g.to(dtype)  # which torch's norm refuses to do
        return {axis: vector_norm(g, dim=axis, keepdim=True, dtype=dtype).to(wide).square_() for axis in axes}
    totals: dict[int, Tensor] = {}
    for at in divide(g, CHUNK_CPU):
        q = g[at].to(dtype).square()
        for axis in axes:
            values = q.sum(axis, keepdim=True).to(wide)
            if not math.isfinite(values.sum()):  # a sum may be where all that it adds up is not
                values = q.sum(axis, keepdim=True, dtype=wide)
            if at is ...:
                totals[axis] = values
                continue
            if axis not in totals:
                totals[axis] = values.new_zeros(summed(tuple(g.shape), axis))
            totals[axis][(*at[:axis], slice(None), *at[axis + 1 :])] += values
    return totals


def norm(chunks: Iterable[Tensor]) -> Scalar:
    """√ΣT² of a tensor that comes in chunks: a number, or a 0-d tensor where reading it would make the host wait."""
    norms: list[Any] = list(map(_norm_of_chunk, chunks))  # which holds no chunk while the next is made
    if len(norms) == 1:
        whole: Scalar = norms[0]
        return whole
    return vector_norm(torch.stack(norms)) if isinstance(norms[0], Tensor) else math.hypot(*norms)


def _norm_of_chunk(t: Tensor) -> Scalar:
    if not on_host(t):
        whole: Tensor = vector_norm(t, dtype=statistics_dtype(t.dtype))
        return whole
    flat = t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)).reshape(-1)  # in the order of memory
    total = _sum_of_rows(flat)
    if flat.dtype != torch.float64 and not (math.isfinite(total) and total > flat.numel() * 1e-30):
        total = _sum_of_rows(flat.double())  # squares leave float32 above 1.8e19 and below 1e-19, their sums sooner
    return math.sqrt(total)


def _sum_of_rows(flat: Tensor) -> float:
    dtype, whole = statistics_dtype(flat.dtype), flat.numel() // ROW * ROW
    norms = vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    if whole < flat.numel():
        norms = torch.cat([norms, vector_norm(flat[whole:], dtype=dtype).view(1)])
    return float(norms.double().square_().sum())


def largest_square(t: Tensor, dtype: torch.dtype) -> Tensor:
    """max(T²) in this dtype: finite where all are, and without a temporary."""
    if not t.numel():  # of a shard
        return t.new_zeros((), dtype=dtype)
    wider = dtype if t.dtype.itemsize <= dtype.itemsize else None  # torch's norm refuses to narrow
    largest: Tensor = vector_norm(t, math.inf, dtype=wider)
    return largest.to(dtype).square()
