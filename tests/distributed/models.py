"""Models under FSDP2, HSDP, tensor parallel and DDP, against the same training on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from adafactor import Adafactor
from tests.distributed.placements import errors, everywhere, fingerprint, stepped, whole
from tests.distributed.split import split

STEPS, BATCH, LENGTH, WORDS, WIDTH = 6, 8, 4, 10, 12
Build = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A norm, a widening layer and a narrowing one: what tensor parallel cuts in its three ways."""

    def __init__(self, width: int, inner: int):
        """Layers of these sizes."""
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Small, with sizes that two or four ranks cut unevenly or leave nobody a part of, and even ones where asked."""

    def __init__(self, even: bool = False, width: int = WIDTH, inner: int | None = None):
        """Even sizes suit tensor parallel, whose activations are cut too."""
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, width), Block(width, inner or (8 if even else 7))
        self.conv, self.head = nn.Conv1d(width, 3, 2), nn.Linear(width, 2 if even else 1)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids to a loss per sentence."""
        x = self.embed(ids)
        x = x + self.block(x)
        y: Tensor = self.head(x).square().mean((1, 2)) + self.conv(x.transpose(1, 2)).mean((1, 2))
        return y


def batches() -> Iterator[Tensor]:
    """The same ids on every rank."""
    for seed in range(STEPS):
        yield torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, keywords: dict[str, Any], parts: int = 1, clip: bool = False, micro: int = 1) -> Any:
    """The optimizer, parameters and gradients of each step; with `parts`, each rank takes its share of every batch."""
    optimizer = Adafactor(model.named_parameters(), **keywords)
    path, grads = [], []
    for ids in batches():
        optimizer.zero_grad()
        mine = ids.chunk(parts)[dist.get_rank() % parts]
        for number, piece in enumerate(mine.chunk(micro), start=1):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == micro)
            (model(piece).mean() / micro).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        path.append([whole(p) for p in model.parameters()])
        grads.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
    return optimizer, path, grads


def compare(
    build: Build,
    dtype: torch.dtype = torch.float64,
    keywords: dict[str, Any] | None = None,
    even: bool = False,
    replay: bool = False,
    parts: int = 1,
    **how: Any,
) -> float:
    """The largest error of any parameter, as a share of its distance travelled; all ranks hold the same bits.

    With `replay` the reference is given the gradients of the sharded run, which a policy has rounded.
    """
    torch.manual_seed(0)
    plain = Net(even).to(dtype)
    starts = [p.detach().clone() for p in plain.parameters()]
    model = build(copy.deepcopy(plain))
    optimizer, path, grads = train(model, keywords or {}, parts, **how)
    if replay:
        _, reference = stepped(list(plain.parameters()), grads, keywords or {})
    else:
        _, reference, _ = train(plain, keywords or {}, clip=how.get("clip", False))
    kept = [v for state in optimizer.state.values() for v in state.values()]
    bits = everywhere(fingerprint([*(p.detach() for p in model.parameters()), *kept]))
    assert len(set(bits)) == 1, "replicas differ"
    assert len(set(everywhere(str(optimizer.report())))) == 1, "reports differ"
    return max(errors(path[-1], starts, reference))


def fsdp(mesh: DeviceMesh, **how: Any) -> Build:
    """`fully_shard` over every layer, then over the rest."""

    def build(model: nn.Module) -> nn.Module:
        fully_shard(model.get_submodule("block"), mesh=mesh, **how)
        fully_shard(model, mesh=mesh, **how)
        return model

    return build


def by_columns(p: nn.Parameter) -> Shard:
    """Matrices are cut along their second axis, the rest along their first."""
    return Shard(1 if p.dim() > 1 else 0)


def tensor_parallel(mesh: DeviceMesh, sequence: bool = False) -> Build:
    """The block cut by columns and by rows; with `sequence`, its norm works on a part of each sentence."""
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    outer: dict[str, ParallelStyle] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    if sequence:
        plan = {
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        outer["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))

    def build(model: nn.Module) -> nn.Module:
        parallelize_module(model, mesh, outer)
        parallelize_module(model.get_submodule("block"), mesh, plan)
        if sequence:
            heads: dict[str, ParallelStyle] = {
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
            }
            parallelize_module(model, mesh, heads)
            model.conv = Gathered(model.get_submodule("conv"), mesh)
        return model

    return build


class Gathered(nn.Module):
    """A plain layer after sequence-parallel ones: it takes the whole sentence."""

    def __init__(self, layer: nn.Module, mesh: DeviceMesh):
        """Wrap a layer that takes (B, width, T)."""
        super().__init__()
        self.layer, self.mesh = layer, mesh

    def forward(self, x: Tensor) -> Tensor:
        """Gather the sentence, which is cut along its last axis."""
        y: Tensor = self.layer(DTensor.from_local(x, self.mesh, [Shard(2)]).full_tensor())
        return y


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """All parameters as copies on the mesh, fed with copies of the input."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            copies = split(p.detach(), mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(copies))
    inner = model.forward
    model.forward = lambda ids: inner(DTensor.from_local(ids, mesh, [Replicate()])).to_local()
    return model


def checks() -> Iterator[tuple[str, Any]]:
    """The name of each way to train, and its error."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    f32 = torch.float32
    momentum = {"beta1": 0.9, "weight_decay": 0.01}
    yield "float64 | FSDP2", compare(fsdp(line), parts=size)
    yield "float32 | FSDP2", compare(fsdp(line), f32, parts=size)
    yield "float64 | FSDP2, momentum", compare(fsdp(line), keywords=momentum, parts=size)
    yield "float64 | FSDP2, by columns", compare(fsdp(line, shard_placement_fn=by_columns), even=True, parts=size)
    yield "float64 | FSDP2, accumulation", compare(fsdp(line), parts=size, micro=2)
    yield "float64 | FSDP2, clip_grad_norm_", compare(fsdp(line), parts=size, clip=True)
    offload = CPUOffloadPolicy(pin_memory=False)
    yield "float64 | FSDP2, CPU offload", compare(fsdp(line, offload_policy=offload), parts=size)
    yield "float64 | FSDP2, eager", compare(fsdp(line), keywords={"backend": "eager"}, parts=size)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=f32)
    low = fsdp(line, mp_policy=mixed)
    yield "float32 | FSDP2, mixed precision", compare(low, f32, replay=True, parts=size)
    yield "bfloat16 | FSDP2, mixed precision", compare(low, torch.bfloat16, {"lr": 0.1}, replay=True, parts=size)
    yield "float64 | DDP", compare(lambda model: DistributedDataParallel(model), parts=size)
    yield "float64 | replicated DTensors", compare(lambda model: replicated(model, line))
    if size == 2:
        yield "float64 | TP", compare(tensor_parallel(line), even=True)
        yield "float32 | TP", compare(tensor_parallel(line), f32, even=True)
        yield "float64 | TP, sequence parallel", compare(tensor_parallel(line, sequence=True), even=True)
    if size == 4:
        yield from in_two_dimensions()


def in_two_dimensions() -> Iterator[tuple[str, Any]]:
    """What needs a mesh of 2 × 2."""
    f32 = torch.float32
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    yield "float64 | HSDP 2×2", compare(fsdp(mesh), parts=4)
    yield "float32 | HSDP 2×2", compare(fsdp(mesh), f32, parts=4)
    for sequence in (False, True):

        def both(model: nn.Module, sequence: bool = sequence) -> nn.Module:
            return fsdp(mesh["data"])(tensor_parallel(mesh["model"], sequence)(model))

        name = "FSDP2 × TP 2×2" + (", sequence parallel" if sequence else "")
        yield f"float64 | {name}", compare(both, even=True)
        yield f"float32 | {name}", compare(both, f32, even=True)
