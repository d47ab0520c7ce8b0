"""Small models, the ways to shard them, and the loop that trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from adafactor import Adafactor
from tests.distributed.rig import whole

WORDS, WIDTH = 10, 12
Build = Callable[[nn.Module], nn.Module]


class Layers(nn.Module):
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
    """Sizes that ranks cut unevenly or leave nobody a part of; even ones where asked, for tensor parallel."""

    def __init__(self, even: bool = False, width: int = WIDTH, inner: int | None = None):
        """An embedding, a block, a convolution and a head."""
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, width), Layers(width, inner or (8 if even else 7))
        self.conv, self.head = nn.Conv1d(width, 3, 2), nn.Linear(width, 2 if even else 1)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids to a loss per sentence."""
        x = self.embed(ids)
        x = x + self.block(x)
        y: Tensor = self.head(x).square().mean((1, 2)) + self.conv(x.transpose(1, 2)).mean((1, 2))
        return y


def even() -> Net:
    """For tensor parallel."""
    return Net(even=True)


def wide() -> Net:
    """Large enough for an int8 momentum."""
    return Net(even=True, width=256, inner=512)


class Block(nn.Module):
    """A residual block with a parameter that nobody uses and one that is frozen, recomputed in backward if asked."""

    def __init__(self) -> None:
        """Sizes that ranks cut unevenly."""
        super().__init__()
        self.layers, self.unused = Layers(WIDTH, 7), nn.Parameter(torch.ones(3, 5))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.reentrant: bool | None = None  # how it is recomputed

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        y = self.layers(x) if self.reentrant is None else checkpoint(self.layers, x, use_reentrant=self.reentrant)
        assert isinstance(y, Tensor)
        return x + y * self.frozen


class Deep(nn.Module):
    """Three blocks between an embedding and a head that shares its weight."""

    def __init__(self) -> None:
        """One tied parameter, in the root; a scalar, which only one rank has a part of."""
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to a loss per sentence."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.gain * nn.functional.linear(x, self.embed.weight)
        return logits.logsumexp(-1).sub(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)).mean(1)


def made(net: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """With the same weights at any time and in any thread."""
    model, random = net().to(dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("weight") and p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=random) / p.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                p.copy_(0.1 * torch.randn(p.shape, generator=random))
    return model


def batch(step: int, seed: int = 0) -> Tensor:
    """Ids of one step."""
    return torch.randint(WORDS, (8, 4), generator=torch.Generator().manual_seed(100 * step + seed))


def fsdp(mesh: DeviceMesh, **how: Any) -> Build:
    """`fully_shard` over every block, then over the rest."""

    def build(model: nn.Module) -> nn.Module:
        for name, module in list(model.named_modules()):
            if name == "block" or name.rpartition(".")[0] == "blocks":
                fully_shard(module, mesh=mesh, **how)
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
        outer = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }

    def build(model: nn.Module) -> nn.Module:
        parallelize_module(model, mesh, outer)
        parallelize_module(model.get_submodule("block"), mesh, plan)
        if sequence:
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


def both(mesh: DeviceMesh, sequence: bool = False) -> Build:
    """FSDP2 over what is tensor parallel."""
    return lambda model: fsdp(mesh["data"])(tensor_parallel(mesh["model"], sequence)(model))


def micro_batches(model: nn.Module, step: int, parts: int, micro: int, sync: bool = False) -> Iterator[Tensor]:
    """This rank's losses of a step; FSDP2 reduces the gradients of the last one, or with `sync` of each."""
    mine = batch(step).chunk(parts)[dist.get_rank() % parts] if parts > 1 else batch(step)
    for number, piece in enumerate(mine.chunk(micro), start=1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(sync or number == micro)
        yield model(piece).mean() / micro


def train(
    model: nn.Module, optimizer: Adafactor, steps: range, parts: int = 1, micro: int = 1, max_norm: float | None = None
) -> list[Tensor]:
    """Some steps, each rank with its share of every batch; the whole weights at their end."""
    for step in steps:
        for loss in micro_batches(model, step, parts, micro):
            loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p) for p in model.parameters()]


def assert_near(ours: list[Tensor], theirs: list[Tensor], starts: list[Tensor], limit: float) -> None:
    """No weight is further off than this share of the way that it went."""
    for a, b, start in zip(ours, theirs, starts, strict=True):
        travelled = float((b - start).abs().max())
        assert float((a - b).abs().max()) <= limit * travelled, f"of a parameter of shape {tuple(a.shape)}"


def copied(model: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """A copy of a model, and its weights."""
    return copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
