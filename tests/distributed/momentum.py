"""A sharded momentum in bfloat16 or int8: the numbers of one process, and the places where shards would cut blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from adafactor import Adafactor
from adafactor.core.momentum import BUFFERS
from tests.compare import gradients, start
from tests.distributed.models import Build, Net, by_columns, fsdp, tensor_parallel
from tests.distributed.models import train as train_model
from tests.distributed.placements import DTYPES, everywhere, fingerprint, meshes, placed, stepped, whole, word
from tests.distributed.split import split

FORMATS = ("bfloat16", "int8")
# Four ranks cut (7, 700) unevenly and leave one without a part of (3, 1536); a convolution and a stack of experts; a
# vector and a small matrix, which stay float32. Blocks are 128 indices long, those of the convolution 8.
SHAPES = [(7, 700), (3, 1536), (16, 512), (24, 32, 3, 3), (4, 16, 256), (5000,), (60, 50)]
STEPS = 4
Case = tuple[tuple[int, ...], tuple[Placement, ...]]


def wide(even: bool = True) -> nn.Module:
    """A model whose inner matrices are large enough for int8."""
    return Net(even, width=256, inner=512)


def keywords(format: str, **others: Any) -> dict[str, Any]:
    """Of an optimizer whose momentum is kept so."""
    return {"beta1": 0.9, "momentum_dtype": format, "lr": 0.05, **others}


def differences(ours: list[Tensor], theirs: list[Tensor], x_start: Tensor) -> dict[str, float]:
    """How X and the momentum of a sharded parameter differ from those of a plain one, each given as X first.

    `moved` is the largest difference of X beside how far X went, `far` the share of elements of X beyond 1e-5 of that,
    `units` the largest difference of the momentum in units of int8, or of bfloat16 at its largest element, `flipped`
    the share that differs by more than a hundredth of that, and `scale` the largest relative difference of scales. One
    element is no share: of a small tensor it would be a large one.
    """

    def share(where: Tensor) -> float:
        return max(0, int(where.sum()) - 1) / max(1, where.numel())

    (x, *kept), (y, *expected) = ours, theirs
    gap = (x.double() - y.double()).abs() / (y.double() - x_start.double()).abs().max()
    scale = torch.zeros(1)
    if len(kept) == 2:
        scale = (kept[1] - expected[1]).abs() / expected[1].clamp(min=1e-30)
        units = (kept[0].int() - expected[0].int()).abs().double()
    else:
        a, b = kept[0].double(), expected[0].double()
        units = (a - b).abs() / (b.abs().max() * 2.0**-7)
    return {
        "moved": float(gap.max()),
        "far": share(gap > 1e-5),
        "units": float(units.max()),
        "flipped": share(units > 1e-2),
        "scale": float(scale.max()),
    }


def held(optimizer: Adafactor, p: Tensor) -> list[Tensor]:
    """A parameter and its momentum, whole."""
    state = optimizer.state[p]
    kept = [key for key in (*BUFFERS, "momentum_scale") if key in state]
    return [whole(p), *(whole(state[key]) for key in kept)]


def largest(found: list[dict[str, float]]) -> dict[str, float]:
    """The worst of each figure."""
    return {key: max(each[key] for each in found) for key in found[0]}


def fits(shape: tuple[int, ...], mesh: DeviceMesh, places: tuple[Placement, ...]) -> str:
    """An empty string, or what an optimizer with an int8 momentum says about a parameter that is sharded so."""
    p = split(torch.ones(shape), mesh, places).requires_grad_()
    try:
        Adafactor([("layer.weight", p)], **keywords("int8"))
    except ValueError as error:
        return str(error)
    return ""


def check(
    mesh: DeviceMesh, dtype: torch.dtype, given: dict[str, Any], cases: list[Case]
) -> dict[str, dict[str, float]]:
    """All cases as the parameters of one optimizer, against plain tensors."""
    starts = [torch.tensor(start(shape), dtype=dtype) for shape, _ in cases]
    grads = [[torch.tensor(g, dtype=dtype) for g in gradients(shape, STEPS, seed=len(shape))] for shape, _ in cases]
    steps = [list(step) for step in zip(*grads, strict=True)]
    plain = [x.clone().requires_grad_() for x in starts]
    reference, _ = stepped(plain, steps, given)
    shards = [split(x.clone(), mesh, places).requires_grad_() for x, (_, places) in zip(starts, cases, strict=True)]
    cut: list[list[Tensor]] = [
        [split(g, mesh, places) for g, (_, places) in zip(step, cases, strict=True)] for step in steps
    ]
    optimizer, _ = stepped(shards, cut, given)
    bits = fingerprint([t for p in shards for t in (p, *optimizer.state[p].values())])
    assert len(set(everywhere(bits))) == 1, "replicas differ"
    found = zip(cases, shards, plain, starts, strict=True)
    return {
        f"{shape} {word(at)}": differences(held(optimizer, p), held(reference, q), x) for (shape, at), p, q, x in found
    }


def turned(mesh: DeviceMesh, shape: tuple[int, ...], places: tuple[Placement, ...], given: dict[str, Any]) -> Any:
    """A parameter whose shards are transposed in memory, so that blocks are not side by side, against a plain one."""

    def cut(t: Tensor) -> DTensor:
        local = split(t, mesh, places).to_local().mT.contiguous().mT
        stride = t.mT.contiguous().mT.stride()
        return DTensor.from_local(local, mesh, places, run_check=False, shape=t.shape, stride=stride)

    x = torch.tensor(start(shape))
    steps = [torch.tensor(g) for g in gradients(shape, STEPS, seed=len(shape))]
    p, q = cut(x).requires_grad_(), x.clone().requires_grad_()
    optimizer, _ = stepped([p], [[cut(g)] for g in steps], given)
    reference, _ = stepped([q], [[g] for g in steps], given)
    return differences(held(optimizer, p), held(reference, q), x)


def trained(build: Build, format: str, dtype: torch.dtype) -> dict[str, Any]:
    """A model under some sharding, every rank with the same data, against one process."""
    torch.manual_seed(0)
    plain = wide().to(dtype)
    starts = [p.detach().clone() for p in plain.parameters()]
    given = keywords(format)
    reference, _, _ = train_model(plain, given)
    torch.manual_seed(0)
    model = build(wide().to(dtype))
    optimizer, _, _ = train_model(model, given)
    triples = zip(model.parameters(), plain.parameters(), starts, strict=True)
    found = largest([differences(held(optimizer, p), held(reference, q), x) for p, q, x in triples])
    kept = [t for state in optimizer.state.values() for t in state.values()]
    return {**found, "bits": everywhere(fingerprint([*(p.detach() for p in model.parameters()), *kept]))}


def builds() -> dict[str, Build]:
    """Every way to shard a model on this many ranks."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    found = {"FSDP2": fsdp(line), "TP": tensor_parallel(line)}  # TP cuts one matrix by rows and one by columns
    if size == 2:
        return {**found, "FSDP2 by columns": fsdp(line, shard_placement_fn=by_columns)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    both = lambda model: fsdp(mesh["data"])(tensor_parallel(mesh["model"])(model))  # noqa: E731
    return {**found, "HSDP 2×2": fsdp(mesh), "FSDP2 × TP 2×2": both}


def switched() -> dict[str, Any]:
    """A format that the shards do not allow, set in mid-run: what is said, and whether the momentum is as it was."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = split(torch.ones(16, 384), mesh, (Shard(1),)).requires_grad_()
    optimizer = Adafactor([("layer.weight", p)], **keywords("bfloat16", backend="eager"))
    message = ""
    for format in ("bfloat16", "int8"):
        optimizer.param_groups[0]["momentum_dtype"] = format
        p.grad = split(torch.ones(16, 384), mesh, (Shard(1),))
        before = [t.clone() for t in (whole(p), *(whole(v) for v in optimizer.state[p].values()))]
        try:
            optimizer.step()
        except ValueError as error:
            message = str(error)
    after = [whole(p), *(whole(v) for v in optimizer.state[p].values())]
    return {"message": message, "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True))}


def checks() -> Iterator[tuple[str, Any]]:
    """Refusals, then every placement, then models."""
    refused: dict[str, list[str]] = {}
    good: dict[str, list[Case]] = {}
    for name, mesh in meshes().items():
        good[name] = []
        for shape in SHAPES:
            for places in placed(mesh, shape):
                said = everywhere(fits(shape, mesh, places))
                if any(said):
                    refused[f"{name} | {shape} {word(places)}"] = said
                else:
                    good[name].append((shape, places))
    yield "refused", refused
    yield "switched", everywhere(switched())
    ways = [("float64", "eager"), ("float64", "cpu"), ("float32", "cpu"), ("bfloat16", "cpu")]
    for (name, mesh), format, (dtype, backend) in product(meshes().items(), FORMATS, ways):
        if name == "1×4" and (dtype, backend) != ways[0]:
            continue
        averaged = {"eager": "update", "cpu": "gradient"}[backend] if dtype == "float64" else "direction"
        given = keywords(format, backend=backend, momentum_of=averaged, rounding="stochastic")
        yield f"placements | {dtype} | {name} {format} {backend}", check(mesh, DTYPES[dtype], given, good[name])
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    for format, of in product(FORMATS, ("update", "gradient")):
        given = keywords(format, backend="cpu", momentum_of=of)
        cases = [((24, 512), (Shard(0),)), ((24, 512), (Shard(1),)), ((4, 16, 256), (Shard(1),))]
        yield f"turned | float64 | {format} {of}", [turned(line, *case, given) for case in cases]
    for (name, build), format, dtype in product(builds().items(), FORMATS, ("float64", "float32")):
        yield f"models | {dtype} | {name} {format}", trained(build, format, DTYPES[dtype])
