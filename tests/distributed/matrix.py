"""Other ways to train on several ranks: pipelines, experts, ZeRO of torch, every option of torch's state dicts."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from adafactor import Adafactor, step_in_backward
from tests.distributed.checkpoints import KEYWORDS, make, train
from tests.distributed.counted import Collectives
from tests.distributed.placements import errors, everywhere, fingerprint, whole
from tests.distributed.split import split

OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "on the first rank": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "without frozen ones": {"ignore_frozen_params": True},
}


def restored(momentum: str = "float32", **options: Any) -> bool:
    """Whether state that went through torch's functions, with these options, continues on the same bits."""
    model, optimizer = make("FSDP2", torch.float32, momentum=momentum)
    train(model, optimizer, range(3))
    broadcast = options.pop("broadcast_from_rank0", False)
    given = StateDictOptions(**options)
    weights, state = (
        get_model_state_dict(model, options=given),
        get_optimizer_state_dict(model, optimizer, options=given),
    )
    weights, state = copy.deepcopy(weights), copy.deepcopy(state)
    if broadcast and dist.get_rank() > 0:
        weights, state = {}, {}
    other, resumed = make("FSDP2", torch.float32, seed=1, momentum=momentum)
    given = StateDictOptions(**options, broadcast_from_rank0=broadcast)
    set_model_state_dict(other, weights, options=given)
    set_optimizer_state_dict(other, resumed, state, options=given)
    paths = [train(m, o, range(3, 5))[-1] for m, o in ((model, optimizer), (other, resumed))]
    return all(map(torch.equal, *paths))


def state_of(model: nn.Module, optimizer: Adafactor) -> dict[str, Any]:
    """Model and optimizer, as torch's checkpoints take them."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def saved_meanwhile(momentum: str = "float32") -> bool:
    """Whether a checkpoint that `async_save` writes while training goes on is that of the moment it was asked for."""
    folder = everywhere(tempfile.mkdtemp())[0]
    model, optimizer = make("FSDP2", torch.float32, momentum=momentum)
    train(model, optimizer, range(2))
    apart = dist.new_group(backend="gloo")  # its collectives come from another thread, and not into ours
    future: Any = async_save(state_of(model, optimizer), checkpoint_id=folder, process_group=apart)
    path = train(model, optimizer, range(2, 4))[-1]
    future.result()
    other, resumed = make("FSDP2", torch.float32, seed=1, momentum=momentum)
    loaded: dict[str, Any] = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, resumed),
    }
    load(loaded, checkpoint_id=folder)
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, resumed, loaded["optimizer"])
    return all(map(torch.equal, path, train(other, resumed, range(2, 4))[-1]))


def redundant() -> dict[str, Any]:
    """DDP with ZeroRedundancyOptimizer, which has each parameter stepped by one rank, against one process."""
    plain, reference = make("plain", torch.float64)
    starts = [p.detach().clone() for p in plain.parameters()]
    model = DistributedDataParallel(copy.deepcopy(plain))
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), Adafactor, **KEYWORDS)  # type: ignore[arg-type]
    path = train(model, optimizer, range(4))
    expected = train(plain, reference, range(4))
    optimizer.consolidate_state_dict(0)
    count = len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0
    return {"error": max(errors(path[-1], starts, expected)), "count": count, "bits": fingerprint(path[-1])}


def experts() -> dict[str, Any]:
    """Stacked experts, cut along the axis of experts: what is sent, and how far from plain tensors they end."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    x = torch.randn(2 * size, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, p = x.clone().requires_grad_(), split(x, mesh, [Shard(0)]).requires_grad_()
    keywords: dict[str, Any] = {"axes": (1, 2)}
    optimizers = Adafactor([plain], **keywords), Adafactor([p], **keywords)
    path, sent = [], list[tuple[str, int]]()
    for step in range(4):
        plain.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(step + 1), dtype=torch.float64)
        p.grad = split(plain.grad, mesh, [Shard(0)])
        optimizers[0].step()
        with Collectives() as seen:
            optimizers[1].step()
        sent = seen.seen
        path.append([whole(plain)])
    return {"sent": sent, "error": max(errors([whole(p)], [x], path))}


def in_a_pipeline(shard: bool) -> dict[str, Any]:
    """A stage on every rank, with an optimizer of its own, and what stepping inside backward says there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = []
    for number in range(size):
        torch.manual_seed(number)
        layers.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double())
    plain = nn.Sequential(*copy.deepcopy(layers))
    module = layers[rank]
    if shard:
        fully_shard(module, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("stage", "data"))["data"])
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer, reference = Adafactor(module.named_parameters()), Adafactor(plain.named_parameters())
    starts, path, said = [p.detach().clone() for p in plain[rank].parameters()], [], ""
    handle = step_in_backward(module, optimizer) if shard else None
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        try:
            schedule.step(*([x] if rank == 0 else []), target=x if rank == size - 1 else None)
        except RuntimeError as error:
            said = str(error)
            break
        optimizer.step()
        optimizer.zero_grad()
        (plain(x) - x).square().mean().backward()
        reference.step()
        reference.zero_grad()
        path.append([whole(p) for p in plain[rank].parameters()])
    if handle is not None:
        handle.remove()
        return {"said": said}
    return {"error": max(errors([whole(p) for p in module.parameters()], starts, path))}


def checks() -> Iterator[tuple[str, Any]]:
    """What every rank found."""
    for name, options in OPTIONS.items():
        yield f"state dict | {name}", everywhere(restored(**options))
    yield "async_save", everywhere(saved_meanwhile())
    yield "ZeroRedundancyOptimizer", everywhere(redundant())
    yield "experts", everywhere(experts())
    yield "pipeline", everywhere(in_a_pipeline(shard=False))
    yield "pipeline with FSDP2", everywhere(in_a_pipeline(shard=True))
