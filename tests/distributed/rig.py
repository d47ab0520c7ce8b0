"""Meshes, placements, and what tests ask of tensors that are cut between ranks."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from adafactor import Adafactor

QUIETLY = {"src_data_rank": None} if "src_data_rank" in inspect.signature(distribute_tensor).parameters else {}
Places = tuple[Placement, ...]


def line() -> DeviceMesh:
    """All ranks, in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> DeviceMesh:
    """Four ranks, in two dimensions."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def split(t: Tensor, mesh: DeviceMesh, places: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor that every rank has. Before torch 2.7 the first rank sends it."""
    return distribute_tensor(t.detach().contiguous(), mesh, places, **QUIETLY)


def whole(t: Tensor) -> Tensor:
    """A copy of the whole tensor."""
    t = t.detach()
    return t.full_tensor().clone() if isinstance(t, DTensor) else t.clone()


def part(t: Tensor) -> Tensor:
    """A copy of this rank's part."""
    t = t.detach()
    return t.to_local().clone() if isinstance(t, DTensor) else t.clone()


def placements(mesh: DeviceMesh, shape: tuple[int, ...]) -> Iterator[Places]:
    """Every way to place a tensor of this shape on a mesh."""
    yield from product([Replicate(), *(Shard(axis) for axis in range(len(shape)))], repeat=mesh.ndim)
    if mesh.ndim == 2 and shape:
        yield _StridedShard(0, split_factor=mesh.size(1)), Shard(0)  # FSDP2 over a colwise layer


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_same_everywhere(*values: Any) -> None:
    """Every rank has these values, to the bit; of tensors, each rank puts the whole together from its own copies."""
    own = [whole(value).numpy().tobytes() if isinstance(value, Tensor) else value for value in _as_bytes(values)]
    for number, (first, *others) in enumerate(zip(*everywhere(own), strict=True)):
        assert all(other == first for other in others), f"value {number} of {len(own)} differs between ranks"


def _as_bytes(values: Sequence[Any]) -> list[Any]:
    tensors = (whole(value).contiguous() if isinstance(value, Tensor) else value for value in values)
    return [t.view(-1).view(torch.uint8) if isinstance(t, Tensor) else t for t in tensors]


def held(optimizer: Adafactor) -> list[Tensor]:
    """All parameters, and all that the optimizer keeps of them."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [*params, *(value for p in params for value in optimizer.state.get(p, {}).values())]


def assert_unchanged(now: list[Tensor], before: list[Tensor]) -> None:
    """This rank's parts have the bits that they had."""
    assert all(torch.equal(part(a), b) for a, b in zip(now, before, strict=True))


class Collectives:
    """Counts what this rank sends by `all_reduce` while it is on, and fails one of them if it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch):
        """For all ranks that are threads; each switches on its own."""
        self._own, self._send = threading.local(), dist.all_reduce
        patch.setattr(dist, "all_reduce", self._all_reduce)

    def during(self, act: Callable[[], object], failing: int | None = None) -> list[int]:
        """The bytes of each `all_reduce` of this rank during `act`; the one of number `failing` raises."""
        self._own.sent, self._own.failing = [], failing
        try:
            act()
        finally:
            sent: list[int] = self._own.__dict__.pop("sent")
        return sent

    def _all_reduce(self, t: Tensor, *args: Any, **keywords: Any) -> Any:
        sent = getattr(self._own, "sent", None)
        if sent is not None:
            if len(sent) == self._own.failing:
                raise RuntimeError("lost on the way")
            sent.append(t.nbytes)
        return self._send(t, *args, **keywords)
