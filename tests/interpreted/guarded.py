"""Trainings whose tensors have guard bytes round them, so that a kernel that writes beside them is found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adafactor import Adafactor

GUARD = 256  # bytes on either side
PATTERN = 0xA5


class Guards:
    """Memory with guard bytes; `check` finds out whether they are as they were."""

    def __init__(self) -> None:
        """Nothing is guarded yet."""
        self.buffers: list[Tensor] = []

    def put(self, t: Tensor) -> Tensor:
        """A copy of a tensor, in the same order of memory, with guard bytes round it."""
        order = sorted(range(t.dim()), key=lambda axis: t.stride()[axis], reverse=True)
        flat = t.permute(order).contiguous()
        buffer = torch.full((2 * GUARD + flat.nbytes,), PATTERN, dtype=torch.uint8)
        self.buffers.append(buffer)
        inside = buffer[GUARD : GUARD + flat.nbytes].view(t.dtype).view(flat.shape)
        inside.copy_(flat)
        return inside.permute([order.index(axis) for axis in range(t.dim())])

    def check(self) -> None:
        """Fail if something was written outside of a tensor."""
        for buffer in self.buffers:
            assert (buffer[:GUARD] == PATTERN).all() and (buffer[-GUARD:] == PATTERN).all()


def train(
    starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]], backend: str = "triton", **keywords: Any
) -> tuple[list[Tensor], Adafactor]:
    """The parameters after some steps, and their optimizer; guarded where it is Triton's."""
    guards = Guards()

    def put(t: Tensor) -> Tensor:
        return guards.put(t) if backend == "triton" else t.clone()

    params = [put(start).requires_grad_() for start in starts]
    optimizer = Adafactor(params, backend=backend, **keywords)
    for p in params:
        p.grad_dtype = None  # any
        optimizer.state[p] = {key: put(value) for key, value in optimizer.state[p].items()}
    for grads in gradients:
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else put(g)
        optimizer.step()
        guards.check()
    return [p.detach() for p in params], optimizer


def random_steps(
    starts: Sequence[Tensor], steps: int, dtype: torch.dtype | None = None, seed: int = 1
) -> list[list[Tensor | None]]:
    """Gradients of uneven scale, in the order of memory of their parameters."""
    random = torch.Generator().manual_seed(seed)
    found: list[list[Tensor | None]] = []
    for _ in range(steps):
        found.append([])
        for start in starts:
            g = torch.randn(start.shape, generator=random) * (torch.rand(start.shape, generator=random) + 0.1)
            found[-1].append(torch.empty_like(start, dtype=dtype or start.dtype).copy_(g))
    return found


def starts(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters of the size that layers are initialised with."""
    random = torch.Generator().manual_seed(0)
    return [(0.05 * torch.randn(shape, generator=random)).to(dtype) for shape in shapes]


def distance(a: Sequence[Tensor], b: Sequence[Tensor], begin: Sequence[Tensor]) -> float:
    """The largest difference, as a share of how far the parameter has gone."""
    shares = [
        float((x.double() - y.double()).abs().max() / (y.double() - start.double()).abs().max().clamp(min=1e-12))
        for x, y, start in zip(a, b, begin, strict=True)
    ]
    return max(shares)
