"""Bad and missing gradients: every rank decides alike, and before anything has changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from adafactor import Adafactor
from tests.distributed.placements import everywhere, fingerprint

PLACES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((6, 5), [Shard(0)]),
    "columns": ((6, 5), [Shard(1)]),
    "vector": ((5,), [Shard(0)]),
    "copies": ((3, 4), [Replicate()]),
}


def model(mesh: DeviceMesh) -> dict[str, Tensor]:
    """One parameter of each kind, and a plain one."""
    found = {name: distribute_tensor(torch.ones(shape), mesh, places) for name, (shape, places) in PLACES.items()}
    return {name: p.requires_grad_() for name, p in {**found, "plain": torch.ones(3, 4)}.items()}


def give(params: dict[str, Tensor]) -> None:
    """A gradient of ones for each."""
    for p in params.values():
        p.grad = torch.ones_like(p).detach()


def bits(params: dict[str, Tensor], optimizer: Adafactor) -> list[str]:
    """Fingerprints of each parameter and its state."""
    return [fingerprint([p.detach(), *optimizer.state[p].values()]) for p in params.values()]


def raised(act: Callable[[], object]) -> str:
    """The message of what it raises."""
    try:
        act()
    except (FloatingPointError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def nan_on_one_rank(mesh: DeviceMesh, mode: str, backend: str) -> dict[str, Any]:
    """One NaN in the second rank's part of two parameters, at the third step."""
    params = model(mesh)
    optimizer = Adafactor(params.items(), on_nonfinite=mode, backend=backend, beta1=0.9)
    for _ in range(2):
        give(params)
        optimizer.step()
    before = bits(params, optimizer)
    give(params)
    if dist.get_rank() == 1:
        for name in ("rows", "vector"):
            part = params[name].grad.to_local()  # type: ignore[union-attr]
            part.view(-1)[-1:] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        message = raised(optimizer.step)
    after = bits(params, optimizer)
    changed = [name for name, a, b in zip(params, before, after, strict=True) if a != b]
    skipped = {record.name: record.skipped for record in optimizer.report()}
    return {"message": message, "changed": changed, "skipped": skipped, "bits": after}


def missing_on_the_last_rank(mesh: DeviceMesh, name: str, when: int, partial: bool) -> dict[str, Any]:
    """One gradient that the last rank does not have."""
    params = model(mesh)
    optimizer = Adafactor(params.items())

    def gradients() -> None:
        give(params)
        if partial:
            whole = torch.ones(PLACES["copies"][0]) / mesh.size()
            params["copies"].grad = DTensor.from_local(whole, mesh, [Partial("sum")])

    for _ in range(when):
        gradients()
        optimizer.step()
    before = bits(params, optimizer)
    gradients()
    if dist.get_rank() == dist.get_world_size() - 1:
        params[name].grad = None
    message = raised(optimizer.step)
    unchanged = before == bits(params, optimizer)
    gradients()
    optimizer.step()  # the mistake corrected, it goes on
    return {"message": message, "unchanged": unchanged, "bits": bits(params, optimizer)}


def unused() -> dict[str, Any]:
    """A parameter that has no gradient anywhere stays as it was; so does everything when there is none at all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = model(mesh)
    optimizer = Adafactor(params.items())
    changed = []
    for without in (["rows"], list(params), []):
        before = bits(params, optimizer)
        give(params)
        for name in without:
            params[name].grad = None
        optimizer.step()
        after = bits(params, optimizer)
        changed.append([name for name, a, b in zip(params, before, after, strict=True) if a != b])
    return {"changed": changed}


def checks() -> Iterator[tuple[str, Any]]:
    """What every rank saw, rank by rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for backend in ("eager", "auto"):
        for mode in ("skip", "raise"):
            yield f"nan {mode} {backend}", everywhere(nan_on_one_rank(mesh, mode, backend))
    for name, when, partial in (("rows", 0, False), ("vector", 2, False), ("copies", 0, True), ("copies", 2, True)):
        result = everywhere(missing_on_the_last_rank(mesh, name, when, partial))
        yield f"missing {name} at {when}{' partial' if partial else ''}", result
    yield "unused", everywhere(unused())
    params = model(mesh)
    params["plain"].grad = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])
    yield "other kind", everywhere(raised(Adafactor(params.items()).step))
