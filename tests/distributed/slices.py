"""Stacks that step slice by slice: cut along the axis of the slices, each rank steps its own and sends nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from adafactor import Adafactor, step_in_backward
from tests.compare import gradients, start
from tests.distributed.counted import Collectives
from tests.distributed.placements import everywhere, whole
from tests.distributed.split import split

SHAPES = [(5, 4, 6), (1, 3, 3), (4, 7), (6, 2, 3, 2)]  # uneven, fewer than ranks, of vectors, of convolutions
KEYWORDS: dict[str, dict[str, Any]] = {
    "Algorithm 6": {},
    "row P": {"beta1": 0.9, "weight_decay": 0.1},
    "stochastic": {"rounding": "stochastic"},
    "raise": {"on_nonfinite": "raise"},
}
STEPS = 4


def both(shapes: list[tuple[int, ...]], dtype: torch.dtype, **keywords: Any) -> tuple[Adafactor, Adafactor]:
    """The same stacks cut along their first axis, and whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [torch.tensor(start(shape, i)).to(dtype) for i, shape in enumerate(shapes)]
    cut = [split(x, mesh, [Shard(0)]).requires_grad_() for x in tensors]
    whole_ones = [x.requires_grad_() for x in tensors]
    return Adafactor(cut, per_slice=True, **keywords), Adafactor(whole_ones, per_slice=True, **keywords)


def params_of(optimizer: Adafactor) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give(optimizer: Adafactor, grads: list[Tensor]) -> None:
    for p, g in zip(params_of(optimizer), grads, strict=True):
        p.grad = g.clone() if not hasattr(p, "placements") else split(g, p.device_mesh, p.placements)


def same(cut: Adafactor, plain: Adafactor) -> list[str]:
    """Where the bits of parameters or states differ."""
    found = []
    for i, (p, q) in enumerate(zip(params_of(cut), params_of(plain), strict=True)):
        found += [] if torch.equal(whole(p), whole(q)) else [f"parameter {i}"]
        for key, value in plain.state[q].items():
            found += [] if torch.equal(whole(cut.state[p][key]), value) else [f"{key} of {i}"]
    return found


def stepped(keywords: dict[str, Any]) -> dict[str, Any]:
    """Some steps, with a gradient of zeros and one of NaN in a slice; what was sent in the last step."""
    dtype = torch.bfloat16 if "rounding" in keywords else torch.float32
    cut, plain = both(SHAPES, dtype, **keywords)
    for t in range(STEPS):
        grads = [torch.tensor(gradients(shape, STEPS, i)[t]).to(dtype) for i, shape in enumerate(SHAPES)]
        grads[0][3] = 0.0
        if t == 1 and "on_nonfinite" not in keywords:
            grads[0][1], grads[2][3] = float("nan"), float("nan")
        give(cut, grads)
        give(plain, grads)
        with (
            Collectives() if t == STEPS - 1 else nullcontext() as sent
        ):  # under which both are stepped by eager PyTorch
            cut.step()
            plain.step()
    names = sorted(name for names in everywhere([record.name for record in cut.report()]) for name in names)
    return {
        "differs": same(cut, plain),
        "sent": None if sent is None else sent.seen,
        "names": names == sorted(record.name for record in plain.report()),
        "skipped": sum(everywhere(sum(record.skipped for record in cut.report()))),
    }


def among_others() -> dict[str, Any]:
    """A stack beside a matrix whose sums are reduced; gradients that are still partial sums; a vector in the group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = dist.get_world_size()
    values = {
        "stack": torch.tensor(start((5, 4, 3))),
        "matrix": torch.tensor(start((6, 5))),
        "vector": torch.tensor(start((9,))),
    }
    cut: dict[str, Any] = {name: split(x, mesh, [Shard(0)]).requires_grad_() for name, x in values.items()}
    plain = {name: x.clone().requires_grad_() for name, x in values.items()}
    rules = {"matrix": {"per_slice": False}}
    ours, theirs = (Adafactor(list(m.items()), per_slice=True, rules=rules) for m in (cut, plain))
    for t in range(STEPS):
        for i, name in enumerate(values):
            g = torch.tensor(gradients(tuple(values[name].shape), STEPS, i)[t])
            plain[name].grad = g
            cut[name].grad = split(g, mesh, [Replicate()]) if name == "stack" and t % 2 else split(g, mesh, [Shard(0)])
        if t == 2:
            part = torch.tensor(gradients((5, 4, 3), STEPS, 0)[t]) / size
            cut["stack"].grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        ours.step()
        theirs.step()
    errors = {name: float((whole(cut[name]) - plain[name]).abs().max()) for name in values}
    return {"errors": errors, "steps": [record.steps for record in ours.report()]}


def refused() -> str:
    """What is said of a stack that is cut across its slices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = split(torch.ones(4, 6, 8), mesh, [Shard(1)]).requires_grad_()
    try:
        Adafactor([("experts", p)], per_slice=True)
    except ValueError as error:
        return str(error)
    return ""


class Experts(nn.Module):
    """Two layers of experts in one tensor each."""

    def __init__(self) -> None:
        """As many as divide unevenly."""
        super().__init__()
        self.first = nn.Parameter(torch.tensor(start((5, 4, 6), 1), dtype=torch.float32))
        self.second = nn.Parameter(torch.tensor(start((5, 6, 3), 2), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Every expert sees its own part of the batch."""
        return torch.bmm(torch.bmm(x, self.first).sin(), self.second)


def trained(model: nn.Module, optimizer: Adafactor, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(t))
        model(x).square().sum().backward()
        optimizer.step()


def continued() -> dict[str, Any]:
    """FSDP2: a state that was put together, loaded on one process and on all ranks, goes on as the run does."""
    model = Experts()
    plain = copy.deepcopy(model)
    fully_shard(model)
    keywords: dict[str, Any] = {"per_slice": True, "beta1": 0.9}
    optimizer, alone = (Adafactor(m.named_parameters(), **keywords) for m in (model, plain))
    trained(model, optimizer, range(2))
    state: Any = copy.deepcopy(
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    )
    shapes = {key: list(value.shape) for key, value in state["state"].get("first", {}).items()}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        q.data.copy_(whole(p))
    if dist.get_rank() == 0:
        set_optimizer_state_dict(plain, alone, state)
        trained(plain, alone, range(2, 4))
    sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    resumed = Adafactor(model.named_parameters(), **keywords)
    set_optimizer_state_dict(model, resumed, sharded)
    with step_in_backward(model, resumed):
        trained(model, resumed, range(2, 4))
    ends = [whole(p) for p in model.parameters()]
    error = max(float((a - b).abs().max()) for a, b in zip(ends, map(whole, plain.parameters()), strict=True))
    return {"error": error if dist.get_rank() == 0 else 0.0, "shapes": shapes}


def checks() -> Iterator[tuple[str, Any]]:
    """What every rank found."""
    for name, keywords in KEYWORDS.items():
        yield name, everywhere(stepped(keywords))
    yield "among others", everywhere(among_others())
    yield "across", everywhere(refused())
    yield "FSDP2", everywhere(continued())
