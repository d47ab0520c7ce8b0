"""Collectives and bytes of a step as they are sent, and as `adafactor.planning.communication` computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adafactor import Adafactor
from adafactor.core.dtensor import cut_axis
from adafactor.core.factoring import find_factoring
from adafactor.planning.communication import traffic
from studies.temporaries import Largest
from tests.distributed.models import Net, fsdp, tensor_parallel
from tests.distributed.split import split


class Collectives(TorchDispatchMode):
    """Notes every collective while it is on."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """The operation's name and the bytes of the tensors it is given."""
        if "c10d" in func.namespace and "wait" not in func.__name__:
            self.seen.append((func.__name__, sum(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))))
        return func(*args, **(kwargs or {}))


class LargestPlain(Largest):
    """Notes the largest plain tensor that is made; a DTensor's own operations are views."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Look the other way where there is a DTensor."""
        if any(isinstance(t, DTensor) for t in tree_leaves((args, kwargs))):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def trained(model: nn.Module, **keywords: Any) -> Adafactor:
    """Gradients on every parameter, and one step behind, so that the first step's agreement is done."""
    optimizer = Adafactor(model.parameters(), **keywords)
    for seed in range(2):
        optimizer.zero_grad()
        ids = torch.randint(10, (4, 4), generator=torch.Generator().manual_seed(seed))
        model(ids).mean().backward()
        if seed == 0:
            optimizer.step()
    return optimizer


def counted(optimizer: Adafactor, mesh: tuple[int, ...]) -> dict[str, Any]:
    """One step's collectives, and what was expected of them."""
    parameters = []
    for p in optimizer.param_groups[0]["params"]:
        if isinstance(p, DTensor):
            axes = tuple(cut_axis(place) for place in p.placements)
            parameters.append((find_factoring(tuple(p.shape), "outer"), axes))
    expected = traffic(parameters, mesh)
    with Collectives() as seen:
        optimizer.step()
    return {
        "seen": seen.seen,
        "collectives": expected.collectives,
        "bytes": expected.bytes,
        "model": sum(p.numel() * p.element_size() for p in optimizer.param_groups[0]["params"]),
        "parameters": len(parameters),
    }


def memory() -> dict[str, int]:
    """The largest tensor that a step makes for a large matrix, and what its sums take."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    p = split(torch.ones(2000, 1500), mesh, [Shard(0)])
    p.requires_grad_()
    p.grad = torch.ones_like(p).detach()
    optimizer = Adafactor([p])
    optimizer.step()
    with LargestPlain() as largest:
        optimizer.step()
    return {"largest": largest.bytes, "shard": p.to_local().nbytes, "sums": 8 * (2000 + 1500)}


def checks() -> Iterator[tuple[str, Any]]:
    """What is sent on this many ranks."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    line = init_device_mesh("cpu", (size,))
    yield "FSDP2", counted(trained(fsdp(line)(Net())), (size,))
    yield "memory", memory()
    if size == 2:
        yield "TP", counted(trained(tensor_parallel(line)(Net(even=True))), (size,))
        yield "TP, sequence parallel", counted(trained(tensor_parallel(line, True)(Net(even=True))), (size,))
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        both = fsdp(mesh["data"])(tensor_parallel(mesh["model"])(Net(even=True)))
        yield "FSDP2 × TP 2×2", counted(trained(both), (2, 2))
        yield "HSDP 2×2", counted(trained(fsdp(mesh)(Net())), (2, 2))
