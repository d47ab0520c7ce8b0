"""A model with shapes of all kinds, and the loop that everybody writes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from adafactor import Adafactor, step_in_backward
from adafactor.core.dtensor import local
from tests.exact import assert_same, copy_of

STEPS = 4


class Net(nn.Module):
    """Shapes of all kinds; the embedding is tied to the output, one layer is used twice and one is never used."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        """A matrix, vectors, a stack of matrices, a kernel in channels-last order, a transposed one and a scalar."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.twice, self.norm, self.unused = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(3, 5)
        self.stack = nn.Parameter(torch.randn(2, width, 6))
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(width, 18).t())
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to (B, T, vocabulary)."""
        x = self.embedding(ids)
        x = x + self.twice(self.twice(x).tanh())
        y = torch.einsum("btd,sdk->bstk", x, self.stack)
        y = self.convolution(y).transpose(1, 2).flatten(2)  # (B, T, 18)
        return F.linear(self.norm(x + self.gain * (y @ self.turned)), self.embedding.weight)


def ids(seed: int, vocabulary: int = 11) -> Tensor:
    return torch.randint(vocabulary, (4, 7), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    tokens = ids(seed)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class Fails(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The identity."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Out of memory, say."""
        raise MemoryError("half-way")


class Gauge:
    """Follows every gradient's memory from the moment it is complete, whoever refers to it."""

    def __init__(self, model: nn.Module) -> None:
        """Before `step_in_backward`, so that a gradient is seen before it is used."""
        self.seen: dict[Any, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.look)

    def look(self, p: Tensor) -> None:
        """One more; under FSDP2 those of a module may share their memory."""
        assert p.grad is not None
        storage = local(p.grad).untyped_storage()
        self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.living())

    def living(self) -> int:
        """The bytes of gradients that exist now."""
        return sum(size for storage, size in self.seen.values() if not storage.expired())


class Run:
    """A model with its optimizer, and the loop that everybody writes."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, seed: int = 0, inside: bool = False, **keywords: Any
    ) -> None:
        """The same model for the same seed."""
        torch.manual_seed(seed)
        self.model, self.inside = Net().to(dtype), inside
        self.optimizer = Adafactor(self.model.named_parameters(), **keywords)

    def attached(self, **keywords: Any) -> Run:
        """The same, stepping inside backward."""
        self.handle = step_in_backward(self.model, self.optimizer, **keywords)
        return self

    def attach(self, **keywords: Any) -> None:
        """The same, if this is the run that steps inside backward."""
        if self.inside:
            self.attached(**keywords)

    def detach(self) -> None:
        """Undo it."""
        if self.inside:
            self.handle.remove()

    def end_step(self) -> None:
        """What follows the last backward of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: range = range(STEPS), batches: int = 1) -> Run:
        """So many steps of so many micro-batches."""
        for step in steps:
            for batch in range(batches):
                (loss_of(self.model, step * batches + batch) / batches).backward()
            self.end_step()
        return self

    def steps_of(self, *names: str) -> list[int]:
        """How many steps some parameters have taken."""
        return [int(self.optimizer.state[self.model.get_parameter(name)]["step"]) for name in names]

    def assert_equal(self, other: Run) -> None:
        """The same bits in weights and state, and the same figures in the report."""
        assert_same(copy_of(self.model), copy_of(other.model))
        assert_same(self.optimizer.state_dict(), other.optimizer.state_dict())
        ours, theirs = (pickle.dumps(run.optimizer.report()) for run in (self, other))
        assert ours == theirs


def plain() -> tuple[nn.Sequential, Adafactor]:
    """Two layers and their optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    return model, Adafactor(model.named_parameters())


def grads(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]
