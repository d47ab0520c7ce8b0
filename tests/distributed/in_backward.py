"""Step inside backward on several ranks: under FSDP2, tensor parallel and data parallel, against steps after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from adafactor import Adafactor, step_in_backward
from adafactor.backward.units import find_modules
from tests.distributed.models import Build, Net, fsdp, tensor_parallel
from tests.distributed.models import Block as Layers
from tests.distributed.placements import everywhere, fingerprint, whole

STEPS, WORDS, WIDTH = 4, 10, 12


class Block(nn.Module):
    """A residual block with a parameter that nobody uses and one that is frozen, recomputed in backward if asked."""

    def __init__(self) -> None:
        """Sizes that ranks cut unevenly."""
        super().__init__()
        self.layers, self.unused = Layers(WIDTH, 7), nn.Parameter(torch.ones(3, 5))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.again: bool | None = None  # `use_reentrant` of the checkpoint

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        y = self.layers(x) if self.again is None else checkpoint(self.layers, x, use_reentrant=self.again)
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


def batch(step: int, seed: int) -> Tensor:
    """Ids of one step and one rank's data."""
    return torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(100 * step + seed))


def wrap(mesh: Any, **how: Any) -> Build:
    """`fully_shard` over every block, then over the rest."""

    def build(model: nn.Module) -> nn.Module:
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, **how)
        fully_shard(model, mesh=mesh, **how)
        return model

    return build


def after(model: nn.Module, optimizer: Adafactor) -> None:
    """The ordinary step of the units that step inside backward, in any order: the same sums, in the same buckets."""
    units = [unit.params for unit in find_modules(model)]
    taken = {p for unit in units for p in unit}
    optimizer._step_apart(taken)
    with torch.no_grad():
        for unit in units:
            optimizer._step(unit)
    optimizer.zero_grad()


def train(
    build: Build,
    way: str,
    dtype: torch.dtype = torch.float32,
    keywords: dict[str, Any] | None = None,
    net: Callable[[], nn.Module] = Deep,
    data: int | None = None,
    micro: int = 1,
    sync: bool = False,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **how: Any,
) -> tuple[str, list[float]]:
    """A fingerprint of weights and state after some steps, and the losses.

    Args:
        build: shards the model.
        way: to step: "inside" backward, in "units" after it, or "together" after it.
        dtype: of the weights.
        keywords: of the optimizer.
        net: makes the model.
        data: whose data this rank takes; by default its own.
        micro: backward passes to a step.
        sync: whether FSDP2 reduces gradients in each of them.
        prepare: changes the model when it is sharded.
        how: given to `step_in_backward`.
    """
    torch.manual_seed(0)
    model = build(net().to(dtype))
    prepare(model)
    optimizer = Adafactor(model.named_parameters(), **(keywords or {}))
    if way == "inside":
        step_in_backward(model, optimizer, **how)
    losses = []
    for step in range(STEPS):
        for number in range(micro):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(sync or number == micro - 1)
            loss = model(batch(step * micro + number, dist.get_rank() if data is None else data)).mean() / micro
            loss.backward()
            losses.append(loss.item())
        if way == "units":
            after(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    kept = [v for state in optimizer.state.values() for v in state.values()]
    return fingerprint([*(p.detach() for p in model.parameters()), *kept]) + str(optimizer.report()), losses


def equal(build: Build, **how: Any) -> dict[str, Any]:
    """Whether steps inside backward end on the bits of steps after it, in the same units and all together."""
    inside = train(build, "inside", **how)
    how.pop("accumulate", None)
    units, together = train(build, "units", **how), train(build, "together", **how)
    return {"units": inside == units, "together": inside == together, "learns": inside[1][-1] < inside[1][0]}
