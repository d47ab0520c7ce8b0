"""Sums in eager PyTorch whose bits do not depend on the number of threads, and whose range is that of double.

Torch cuts a long sum between its threads, so that its last digits depend on how many there are. Each sum here is made
of many of fixed length, which one thread takes whole, and these are added in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype, sum_dtype

ROW = 1024  # elements that one thread adds up alone
SERIAL = 2**15  # torch adds up this many, or fewer, with one thread
PARTS = 64  # of an axis: more than there are threads, so that torch deals out whole parts

_MAKE_FX = torch._C._TorchDispatchModeKey.PROXY


def on_host(t: Tensor) -> bool:
    """Whether the host can read a tensor without waiting for a device.

    A subclass may have nothing to read; and what is read while make_fx traces would be a constant in its graph.
    """
    return t.is_cpu and type(t) in (Tensor, torch.nn.Parameter) and torch._C._get_dispatch_mode(_MAKE_FX) is None


def vector(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Numbers of many parameters, Python's or on the device: in a few operations, where all are of one kind."""
    dtype = sum_dtype(device)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return torch.tensor(values, dtype=dtype, device=device)
    if len(tensors) < len(values) or len({(t.dtype, t.device) for t in tensors}) > 1:
        tensors = [torch.as_tensor(value, dtype=dtype, device=device) for value in values]
    return torch.stack([t.reshape(()) for t in tensors]).to(device, dtype)


def sum_along(q: Tensor, axis: int) -> Tensor:
    """Σ over one axis, as float64 where the device has it."""
    if not q.is_cpu or q.numel() <= SERIAL:
        return q.sum(axis).to(sum_dtype(q.device)) if q.is_cpu else q.sum(axis, dtype=sum_dtype(q.device))
    length = -(-q.shape[axis] // PARTS)
    whole = q.shape[axis] // length * length
    parts = q.narrow(axis, 0, whole).unflatten(axis, (-1, length)).sum(axis + 1).to(torch.float64)
    while parts.shape[axis] > 1:  # in pairs: elementwise additions come out the same however they are cut
        half, odd = divmod(parts.shape[axis], 2)
        pairs = parts.narrow(axis, 0, half) + parts.narrow(axis, half, half)
        parts = torch.cat([pairs, parts.narrow(axis, 2 * half, 1)], axis) if odd else pairs
    total: Tensor = parts.squeeze(axis)
    return total if whole == q.shape[axis] else total + sum_along(q.narrow(axis, whole, q.shape[axis] - whole), axis)


def shrink_of(shape: tuple[int, ...]) -> float:
    """A power of two that keeps sums over any axis in the range of what is summed, exactly."""
    return 2.0 ** -max(shape, default=1).bit_length()


def sum_of_squares(flat: Tensor) -> Scalar:
    """Σ of the squares of a vector: a number, or a 0-d tensor where reading it would make the host wait.

    Squares leave float32 above 1.8e19 and below 1e-19, and their sums sooner: then they are taken in double.
    """
    if not on_host(flat):
        norm: Tensor = vector_norm(flat, dtype=sum_dtype(flat.device))
        return norm.square()
    total = _sum_of_rows(flat)
    if flat.dtype != torch.float64 and not (math.isfinite(total) and total > flat.numel() * 1e-30):
        total = _sum_of_rows(flat.double())
    return total


def total(parts: list[Scalar]) -> Scalar:
    """The sum of the sums of a tensor's blocks, in their order."""
    first, *others = parts
    if isinstance(first, Tensor):
        return torch.stack([first, *others]).sum() if others else first  # type: ignore[list-item]
    return sum(others, first)


def in_memory_order(t: Tensor) -> Tensor:
    """The elements of a tensor as a vector in the order of memory: a view, or a copy of a tensor with gaps."""
    return t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)).reshape(-1)


def _sum_of_rows(flat: Tensor) -> float:
    whole = flat.numel() // ROW * ROW
    rows, rest, dtype = flat[:whole].view(-1, ROW), flat[whole:], statistics_dtype(flat.dtype)
    norms = [vector_norm(rows, dim=1, dtype=dtype), vector_norm(rest, dtype=dtype).view(1)]
    return float(torch.cat(norms).double().square().sum())
