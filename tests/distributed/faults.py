"""Bad and missing gradients, and ranks that disagree: every rank decides alike, and before anything has changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from adafactor import Adafactor
from tests.distributed.placements import errors, everywhere, fingerprint, whole
from tests.distributed.split import split
from tests.inside import keep_scalars_on_the_device

PLACES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((6, 5), [Shard(0)]),
    "columns": ((6, 5), [Shard(1)]),
    "vector": ((5,), [Shard(0)]),
    "copies": ((3, 4), [Replicate()]),
}


def is_last() -> bool:
    """Whether this is the rank where something is otherwise."""
    return dist.get_rank() == dist.get_world_size() - 1


def model(mesh: DeviceMesh) -> dict[str, Tensor]:
    """One parameter of each kind, and a plain one; a first dimension of two cuts the first axis of all."""
    first: list[Placement] = [Shard(0)] * (mesh.ndim - 1)
    found = {
        name: distribute_tensor(torch.ones(shape), mesh, [*first, *places]) for name, (shape, places) in PLACES.items()
    }
    return {name: p.requires_grad_() for name, p in {**found, "plain": torch.ones(3, 4)}.items()}


def give(params: dict[str, Tensor], value: float = 1.0) -> None:
    """A gradient of ones, or of another number, for each that is trained."""
    for p in params.values():
        p.grad = torch.full_like(p, value).detach() if p.requires_grad else None


def bits(params: dict[str, Tensor], optimizer: Adafactor) -> list[str]:
    """Fingerprints of each parameter and its state."""
    return [fingerprint([p.detach(), *optimizer.state[p].values()]) for p in params.values()]


def parts(params: dict[str, Tensor], optimizer: Adafactor) -> list[str]:
    """The same of this rank's part alone, where other ranks may not have the same tensors."""
    held = ([p.detach(), *optimizer.state.get(p, {}).values()] for p in params.values())
    return [fingerprint([t.to_local() if isinstance(t, DTensor) else t for t in tensors]) for tensors in held]


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
    if is_last():
        params[name].grad = None
    message = raised(optimizer.step)
    unchanged = before == bits(params, optimizer)
    gradients()
    optimizer.step()  # the mistake corrected, it goes on
    return {"message": message, "unchanged": unchanged, "bits": bits(params, optimizer)}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"beta1": 0.9, "weight_decay": 0.1},
    "momentum of the gradient": {"beta1": 0.9, "momentum_of": "gradient"},
    "unfactored": {"factored": False, "beta1": 0.9, "momentum_of": "gradient"},
    "bfloat16 momentum of the gradient": {"beta1": 0.9, "momentum_of": "gradient", "momentum_dtype": "bfloat16"},
}


def lost_between_reductions(mesh: DeviceMesh, backend: str, kind: str) -> dict[str, Any]:
    """The second reduction of the third step fails on every rank; then the step is taken again, and one more."""
    runs = [model(mesh) for _ in range(2)]
    optimizers = [Adafactor(params.items(), backend=backend, **KINDS[kind]) for params in runs]
    for step in range(4):
        for params, optimizer in zip(runs, optimizers, strict=True):
            give(params, step + 1.0)
            if step == 2 and optimizer is optimizers[0]:
                before = parts(params, optimizer)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(dist, "all_reduce", _fails_at_the_second(dist.all_reduce))
                    message = raised(optimizer.step)
                after = parts(params, optimizer)
            optimizer.step()
    changed = [name for name, a, b in zip(runs[0], before, after, strict=True) if a != b]
    ends = [parts(params, optimizer) for params, optimizer in zip(runs, optimizers, strict=True)]
    return {"message": message, "changed": changed, "continues": ends[0] == ends[1]}


def _fails_at_the_second(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([all_reduce])

    def reduce(*args: Any, **keywords: Any) -> Any:
        for one in calls:
            return one(*args, **keywords)
        raise RuntimeError("lost between the reductions")

    return reduce


NAMES = [*PLACES, "plain"]
START: dict[str, tuple[list[str], dict[str, Any]]] = {  # what the last rank makes its optimizer with
    "order": (NAMES[::-1], {}),
    "one less": (["rows", "columns", "copies", "plain"], {}),
    "the last one less": (["rows", "columns", "vector", "plain"], {}),
    "factored": (NAMES, {"factored": False}),
    "beta1": (NAMES, {"beta1": 0.9}),
    "lr": (NAMES, {"lr": 0.02}),
}


def other_start(mesh: DeviceMesh, case: str) -> dict[str, Any]:
    """The last rank makes its optimizer otherwise; then it does as the others do."""
    params = model(mesh)
    names, keywords = START[case] if is_last() else (NAMES, {})
    optimizer = Adafactor([(name, params[name]) for name in names], **keywords)
    give(params)
    before = parts(params, optimizer)
    message = raised(optimizer.step)
    unchanged = before == parts(params, optimizer)
    optimizer = Adafactor(params.items())
    optimizer.step()
    return {"message": message, "unchanged": unchanged, "bits": bits(params, optimizer)}


def freeze(params: dict[str, Tensor], optimizer: Adafactor) -> None:
    """Leave one out."""
    params["rows"].requires_grad_(False).grad = None


def add(params: dict[str, Tensor], optimizer: Adafactor) -> None:
    """Put another one in."""
    mesh = params["rows"].device_mesh  # type: ignore[attr-defined]
    params["new"] = split(torch.ones(8, 3), mesh, [Shard(0)] * mesh.ndim).requires_grad_()  # asks no other rank
    params["new"].grad = torch.ones_like(params["new"]).detach()
    optimizer.add_param_group({"params": [("new", params["new"])]})


def edit(params: dict[str, Tensor], optimizer: Adafactor) -> None:
    """Turn a screw."""
    optimizer.param_groups[0]["clip"] = 2.0


def load(params: dict[str, Tensor], optimizer: Adafactor) -> None:
    """Load a state of later steps."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] += 5
    optimizer.load_state_dict(saved)


def reload(params: dict[str, Tensor], optimizer: Adafactor) -> None:
    """Load what is there."""
    optimizer.load_state_dict(optimizer.state_dict())


def keep(params: dict[str, Tensor], optimizer: Adafactor) -> None:
    """Change nothing that matters to others: where a statistic lies in memory."""
    optimizer.state[params["rows"]]["row"] = optimizer.state[params["rows"]]["row"].clone()


CHANGES = [freeze, add, edit, load, reload, keep]


def changed_on_the_last_rank(mesh: DeviceMesh, change: Callable[..., None], device: bool) -> dict[str, Any]:
    """After two steps the last rank does something alone; then the others do it too."""
    params = model(mesh)
    with pytest.MonkeyPatch.context() as patch:
        if device:
            keep_scalars_on_the_device(patch)
        optimizer = Adafactor(params.items(), backend="eager" if device else "auto")
        for _ in range(2):
            give(params)
            optimizer.step()
        give(params)
        if is_last():
            change(params, optimizer)
        before = parts(params, optimizer)
        message = raised(optimizer.step)
        unchanged = before == parts(params, optimizer)
        give(params)
        if not is_last():
            change(params, optimizer)
        optimizer.step()
        give(params)
        optimizer.step()
        steps = {name: float(optimizer.state[p]["step"]) for name, p in params.items()}
    return {"message": message, "unchanged": unchanged, "steps": steps, "bits": bits(params, optimizer)}


def in_stages() -> dict[str, float]:
    """Two stages with parameters and settings of their own, on two ranks each, and one parameter that all four hold."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = mesh.get_local_rank("stage")
    shapes = [(8, 6), (4, 4)] if stage == 0 else [(8, 6), (3, 5), (7,)]
    seeds = [torch.Generator().manual_seed(i) for i in range(len(shapes))]  # the first parameter is the same for all
    starts = [
        torch.randn(shape, generator=seed, dtype=torch.float64) for shape, seed in zip(shapes, seeds, strict=True)
    ]
    meshes = [init_device_mesh("cpu", (4,)), *[mesh["data"]] * (len(shapes) - 1)]
    keywords: dict[str, Any] = {"beta1": 0.9} if stage else {}
    params = [distribute_tensor(x, m, [Shard(0)]).requires_grad_() for x, m in zip(starts, meshes, strict=True)]
    groups = [{"params": params[:1], "beta1": 0.0}, {"params": params[1:], **keywords}]
    plain = [x.clone().requires_grad_() for x in starts]
    optimizers = Adafactor(groups), Adafactor([{**groups[0], "params": plain[:1]}, {**groups[1], "params": plain[1:]}])
    path = []
    for _ in range(3):
        for p, q, m, seed in zip(params, plain, meshes, seeds, strict=True):
            q.grad = torch.randn(q.shape, generator=seed, dtype=torch.float64)
            p.grad = distribute_tensor(q.grad, m, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
        path.append([whole(q) for q in plain])
    return {"error": max(errors([whole(p) for p in params], starts, path))}


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
        for kind in KINDS:
            yield f"lost {kind} {backend}", everywhere(lost_between_reductions(mesh, backend, kind))
    if dist.get_world_size() == 4:
        yield "stages", everywhere(in_stages())
    yield "unused", everywhere(unused())
    params = model(mesh)
    params["plain"].grad = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])
    yield "other kind", everywhere(raised(Adafactor(params.items()).step))
