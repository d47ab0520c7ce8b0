"""Every kind of placement × shape × dtype × keywords, against the same steps on one process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from adafactor import Adafactor
from tests.compare import gradients, start
from tests.distributed.split import split

SHAPES = [(7, 12), (5, 3), (12, 7), (1, 6), (5, 1), (1,), (2,), (9,), (), (4, 3, 2, 2), (5, 6, 7), (3, 8, 4)]
STEPS = 8
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
KEYWORDS: dict[str, dict[str, Any]] = {
    "Algorithm 6": {},
    "row P": {"beta1": 0.9},
    "row B": {
        "factored": False,
        "beta1": 0.9,
        "momentum_of": "gradient",
        "beta2": 0.99,
        "relative": False,
        "lr_decay": None,
        "lr": 1e-3,
        "clip": None,
    },
    "row mean": {"factored": "row", "beta2": 0.99, "weight_decay": 0.1},
    "column mean": {"factored": "column", "decay_rate": 0.5, "maximize": True},
    "gradient momentum": {"beta1": 0.9, "momentum_of": "gradient", "clip": 0.5, "weight_decay": 0.01},
    "by hand": {"axes": (-1, 0)},
}


def meshes() -> dict[str, DeviceMesh]:
    """All meshes that this many ranks can make."""
    size = dist.get_world_size()
    found = {f"{size}": init_device_mesh("cpu", (size,))}
    if size == 4:
        found["2×2"] = init_device_mesh("cpu", (2, 2))
        found["1×4"] = init_device_mesh("cpu", (1, 4))
    return found


def placed(mesh: DeviceMesh, shape: tuple[int, ...]) -> Iterator[tuple[Placement, ...]]:
    """Every way to place a tensor of this shape on a mesh."""
    each = [Replicate(), *(Shard(axis) for axis in range(len(shape)))]
    yield from product(each, repeat=mesh.ndim)
    if mesh.ndim == 2 and shape and all(size > 1 for size in mesh.shape):
        yield _StridedShard(0, split_factor=mesh.size(1)), Shard(0)  # FSDP over a colwise layer


def word(placements: tuple[Placement, ...]) -> str:
    """`R S0`, for short."""
    kinds = {Replicate: "R", Shard: "S", _StridedShard: "SS"}
    return " ".join(kinds[type(p)] + ("" if p.is_replicate() else str(p.dim)) for p in placements)  # type: ignore


def fingerprint(tensors: list[Tensor]) -> str:
    """Of the bits, put together from this rank's copies."""
    bits = hashlib.sha256()
    for t in tensors:
        whole = t.full_tensor() if isinstance(t, DTensor) else t
        bits.update(
            whole.contiguous().view(torch.uint8).numpy().tobytes() if whole.dim() else str(whole.item()).encode()
        )
    return bits.hexdigest()


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def stepped(
    params: list[Tensor], grads: list[list[Tensor]], keywords: dict[str, Any]
) -> tuple[Adafactor, list[list[Tensor]]]:
    """The optimizer at the end, and the parameters on the way: plain ones after each step, sharded ones at the end."""
    optimizer = Adafactor(params, **keywords)
    path = []
    for number, step in enumerate(grads, start=1):
        for p, g in zip(params, step, strict=True):
            p.grad = g
        optimizer.step()
        if number == len(grads) or not any(isinstance(p, DTensor) for p in params):
            path.append([whole(p) for p in params])
    return optimizer, path


def whole(p: Tensor) -> Tensor:
    """A copy of the whole tensor."""
    t = p.detach()
    return t.full_tensor().clone() if isinstance(t, DTensor) else t.clone()


def errors(ends: list[Tensor], starts: list[Tensor], reference: list[list[Tensor]]) -> list[float]:
    """For each parameter the largest deviation at the end, as a share of the distance travelled."""
    found = []
    for end, begin, theirs in zip(ends, starts, zip(*reference, strict=True), strict=True):
        steps = zip([begin, *theirs], theirs, strict=False)
        travelled = sum(float((b.double() - a.double()).abs().max()) for a, b in steps)
        found.append(float((end.double() - theirs[-1].double()).abs().max()) / travelled)
    return found


def check(mesh: DeviceMesh, dtype: torch.dtype, keywords: dict[str, Any], cases: list[Any]) -> dict[str, float]:
    """All (shape, placements) pairs as the parameters of one optimizer, against plain tensors."""
    by_hand = keywords.get("axes") is not None
    cases = [(shape, places) for shape, places in cases if not by_hand or len(shape) > 1]
    starts = [torch.tensor(start(shape), dtype=dtype) for shape, _ in cases]
    given = [[torch.tensor(g, dtype=dtype) for g in gradients(shape, STEPS, seed=len(shape))] for shape, _ in cases]
    steps = [list(step) for step in zip(*given, strict=True)]
    _, reference = stepped([x.clone().requires_grad_() for x in starts], steps, keywords)

    def shard(t: Tensor, places: tuple[Placement, ...]) -> Tensor:
        return split(t, mesh, places)

    places = [placement for _, placement in cases]
    params = [shard(x.clone(), p).requires_grad_() for x, p in zip(starts, places, strict=True)]
    grads = [[shard(g, p) for g, p in zip(step, places, strict=True)] for step in steps]
    optimizer, path = stepped(params, grads, keywords)
    bits = [fingerprint([p, *optimizer.state[p].values()]) for p in params]
    differ = [cases[i] for i, values in enumerate(zip(*everywhere(bits), strict=True)) if len(set(values)) > 1]
    assert not differ, f"replicas differ: {differ}"
    assert len(set(everywhere(str(optimizer.report())))) == 1, "reports differ"
    return {f"{shape} {word(p)}": e for (shape, p), e in zip(cases, errors(path[-1], starts, reference), strict=True)}


def checks() -> Iterator[tuple[str, Any]]:
    """A table of largest errors: `dtype | mesh | keywords` → `shape placements` → error."""
    fast = os.environ.get("FAST") == "1"
    for mesh_name, mesh in meshes().items():
        cases = [(shape, places) for shape in SHAPES for places in placed(mesh, shape)]
        for (dtype_name, dtype), (name, keywords) in product(DTYPES.items(), KEYWORDS.items()):
            if (fast and dtype_name == "bfloat16" and name != "row P") or (mesh_name == "1×4" and keywords):
                continue
            if dtype == torch.bfloat16:
                keywords = {**keywords, "lr": 0.2}  # smaller steps would be rounded away
            yield f"{dtype_name} | {mesh_name} | {name}", check(mesh, dtype, keywords, cases)
