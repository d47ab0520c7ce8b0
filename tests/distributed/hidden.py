"""Writes to a shard between two steps, counted by torch or not: which RMS(X) the next steps have, and their length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from adafactor import Adafactor
from tests.distributed.placements import everywhere, whole
from tests.distributed.split import split

SHAPE, LIGHT, HEAVY = (40, 24), 7, 3  # two lines of the first rank's part


def through_data(p: DTensor) -> Tensor:
    """By way of `p.data`; torch counts such a write, because the parts of both DTensors are one tensor."""
    return p.data.to_local()  # type: ignore[attr-defined, no-any-return]


def through_data_of_part(p: DTensor) -> Tensor:
    """By way of `.data` of the part, which torch does not count."""
    return p.to_local().data


def through_numpy(p: DTensor) -> Tensor:
    """By way of other software's view of the memory, which torch does not count either."""
    return torch.from_numpy(p.to_local().detach().numpy())


def scale_light_line(part: Tensor) -> None:
    """A line that was not among the heaviest, on one rank."""
    if dist.get_rank() == 0:
        part[LIGHT] *= 20


def scale_heavy_lines(part: Tensor) -> None:
    """The heaviest line of one rank, and the one that is checked beside it."""
    if dist.get_rank() == 0:
        part[HEAVY - 1 : HEAVY + 2] *= 2


def scale_all(part: Tensor) -> None:
    """A new tensor."""
    part *= 3


def rms(p: DTensor) -> float:
    """Of the whole tensor."""
    return float(whole(p).square().mean().sqrt())


def step(p: DTensor, optimizer: Adafactor, number: int) -> Tensor:
    """Take one, and return by how much each element of the whole tensor has moved."""
    before = whole(p)
    g = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number), dtype=p.dtype)
    p.grad = split(g, p.device_mesh, p.placements)
    optimizer.step()
    return whole(p) - before


def written(way: Callable[[DTensor], Tensor], write: Callable[[Tensor], None], backend: str) -> dict[str, Any]:
    """RMS(X) as it was before a write, is after it, and was taken for the next step and the one after that."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    x[HEAVY] *= 5
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    moves, found = list[Tensor](), dict[str, Any]()
    for look in (way, through_data):  # the second is a twin whose write is counted
        p = split(x, mesh, [Shard(0)])
        p.requires_grad_()
        optimizer = Adafactor([p], backend=backend)
        for number in range(4):
            step(p, optimizer, number)
        before = rms(p)
        write(look(p))
        after = rms(p)
        moves.append(step(p, optimizer, 4))
        used, then = optimizer.report()[0].rms_parameter, rms(p)
        step(p, optimizer, 5)
        next_ = optimizer.report()[0].rms_parameter
        found = found or {"before": before, "after": after, "used": used, "then": then, "next": next_}
    lengths = (moves[0] / moves[1]).flatten()
    return {**found, "shortest": float(lengths.min()), "longest": float(lengths.max())}


WAYS = [through_data, through_data_of_part, through_numpy]
WRITES = [scale_light_line, scale_heavy_lines, scale_all]


def checks() -> Iterator[tuple[str, Any]]:
    """What every rank saw."""
    for backend in ("auto", "eager"):
        for way in WAYS:
            for write in WRITES:
                yield f"{backend} | {way.__name__} | {write.__name__}", everywhere(written(way, write, backend))
