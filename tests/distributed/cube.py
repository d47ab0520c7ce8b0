"""A mesh of three dimensions, copies × shards × tensor parallel: stepped after backward and inside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.in_backward import equal
from tests.distributed.models import Net, compare, fsdp, tensor_parallel
from tests.distributed.placements import everywhere


def checks() -> Iterator[tuple[str, Any]]:
    """How far from one process it ends, and whether inside backward it ends on the same bits."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "data", "model"))

    def build(model: nn.Module) -> nn.Module:
        return fsdp(mesh["copies", "data"])(tensor_parallel(mesh["model"])(model))

    yield "error", compare(build, even=True)
    place = 2 * mesh["copies"].get_local_rank() + mesh["data"].get_local_rank()
    yield "inside", everywhere(equal(build, net=lambda: Net(even=True), data=place))
