"""Step inside backward with data parallel and no wrapper: ranks hold the same bits whatever each of them computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adafactor import Adafactor, step_in_backward
from adafactor.backward import units
from tests.distributed.placements import everywhere, fingerprint

STEPS, WIDTH = 4, 24


class Forked(nn.Module):
    """Branches that each rank may compute in its own order, or leave out."""

    def __init__(self) -> None:
        """Large and small parameters, a tied one, one in channels-last order, a frozen one, one that nobody uses."""
        super().__init__()
        self.first, self.branches = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.unused = nn.LayerNorm(WIDTH), nn.Linear(3, 5)
        self.convolution = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.branches[3].weight = self.first.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, x: Tensor, order: list[int], recompute: bool = False) -> Tensor:
        """(B, width) to a number, by the branches in this order."""
        y = self.convolution(self.norm(self.first(x)).view(-1, 2, 3, 4)).flatten(1)
        for branch in order:
            layer = self.branches[branch]
            z = checkpoint(layer, y, use_reentrant=True) if recompute else layer(y)
            assert isinstance(z, Tensor)
            y = y + z.tanh() * (branch + 1)
        loss: Tensor = y.square().mean()
        return loss


def batch(step: int) -> Tensor:
    """Each rank's own."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def same(rank: int) -> list[int]:
    """The branches in one order on all ranks."""
    return [0, 1, 2, 3]


def opposite(rank: int) -> list[int]:
    """Every other rank the other way round."""
    return [0, 1, 2, 3][:: 1 if rank % 2 else -1]


def missing(rank: int) -> list[int]:
    """The first rank leaves two branches out, and nobody computes the third."""
    return [0, 3] if rank == 0 else [3, 1, 0]


def train(
    orders: Callable[[int], list[int]],
    way: str,
    dtype: torch.dtype = torch.float32,
    keywords: dict[str, Any] | None = None,
    passes: int = 1,
    idle: bool = False,
) -> dict[str, Any]:
    """A fingerprint of weights and state, and the most gradient bytes at a time.

    Args:
        orders: the branches of a rank.
        way: "inside" backward, or "after" it with each gradient averaged alone.
        dtype: of the weights.
        keywords: of the optimizer.
        passes: backward passes to a step.
        idle: in the second step the last rank's loss depends on no parameter.
    """
    torch.manual_seed(0)
    model, rank, size = Forked().to(dtype), dist.get_rank(), dist.get_world_size()
    optimizer = Adafactor(model.named_parameters(), **(keywords or {}))
    peak = 0

    def note(p: Tensor) -> None:
        nonlocal peak
        held = [q.grad for q in model.parameters() if q.grad is not None and type(q.grad) is Tensor]
        peak = max(peak, sum(g.nbytes for g in held))

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(note)
    if way == "inside":
        step_in_backward(model, optimizer, accumulate=passes, process_group=dist.group.WORLD)
    for step in range(STEPS):
        peak *= step > 1  # in the first one nobody knows who has no gradient
        for number in range(passes):
            if not (idle and step == 1 and rank == size - 1):
                (model(batch(passes * step + number).to(dtype), orders(rank)) / passes).backward()
        if way == "after":
            average(model)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = list(model.parameters()), list(optimizer.state.values())
    steps = sorted({float(one["step"]) for one in state})
    kept = [v for one in state for v in one.values()]
    return {"bits": fingerprint([*(p.detach() for p in weights), *kept]), "peak": peak, "steps": steps}


def average(model: nn.Module) -> None:
    """What everybody writes: every gradient over all ranks, one by one, and zeros where one is missing."""
    for p in model.parameters():
        has = torch.tensor(float(p.grad is not None))
        dist.all_reduce(has)
        if has:
            whole = torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad.contiguous()
            whole.div_(dist.get_world_size())
            dist.all_reduce(whole)
            p.grad = torch.empty_like(p).copy_(whole).detach()  # as the parameter lies in memory


def refusal(change: Callable[[nn.Module, dict[str, Any]], object]) -> str:
    """What every rank says when the last one has changed something before it attaches."""
    torch.manual_seed(0)
    model, keywords = Forked(), dict[str, Any]()
    if dist.get_rank() == dist.get_world_size() - 1:
        change(model, keywords)
    optimizer = Adafactor(model.named_parameters(), **keywords)
    try:
        step_in_backward(model, optimizer, process_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


def nan_on_one_rank() -> dict[str, Any]:
    """What is skipped, on each rank."""
    torch.manual_seed(0)
    model = Forked()
    optimizer = Adafactor(model.named_parameters())
    step_in_backward(model, optimizer, process_group=dist.group.WORLD)
    x = batch(0)
    with pytest.warns(RuntimeWarning, match="skipped"):
        (model(x, [0, 1, 2, 3]) * (float("nan") if dist.get_rank() == 1 else 1)).backward()
    optimizer.step()
    return {"skipped": [record.skipped for record in optimizer.report()], "bits": fingerprint(list(model.parameters()))}


def recomputed() -> str:
    """What a reentrant checkpoint, whose own backward ends before the model's, is told."""
    torch.manual_seed(0)
    model = Forked()
    optimizer = Adafactor(model.named_parameters())
    step_in_backward(model, optimizer, process_group=dist.group.WORLD)
    try:
        model(batch(0), [0, 1, 2], recompute=True).backward()
    except RuntimeError as error:
        return str(error)
    return ""


CHANGES: dict[str, Callable[[nn.Module, dict[str, Any]], object]] = {
    "weights": lambda model, keywords: torch.nn.init.zeros_(model.get_parameter("first.bias")),
    "settings": lambda model, keywords: keywords.update(clip=2.0),
    "rate": lambda model, keywords: keywords.update(lr=0.02),
    "frozen": lambda model, keywords: model.get_parameter("norm.weight").requires_grad_(False),
}


def checks() -> Iterator[tuple[str, Any]]:
    """What every rank has, rank by rank."""
    low = {"rounding": "stochastic", "beta1": 0.9, "lr": 0.1}
    cases: dict[str, dict[str, Any]] = {
        "same order": {"orders": same},
        "opposite order": {"orders": opposite},
        "missing": {"orders": missing},
        "two passes": {"orders": missing, "passes": 2},
        "idle": {"orders": same, "idle": True},
        "bfloat16": {"orders": opposite, "dtype": torch.bfloat16, "keywords": low},
        "eager": {"orders": missing, "keywords": {"backend": "eager"}},
    }
    for pack in (units.PACK, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(units, "PACK", pack)
            for name, how in cases.items():
                ways = {way: train(way=way, **how) for way in ("inside", "after")}
                yield f"{name}, packs of {pack}", everywhere(ways)
    for name, change in CHANGES.items():
        yield f"refusal | {name}", everywhere(refusal(change))
    yield "nan", everywhere(nan_on_one_rank())
    yield "recomputed", everywhere(recomputed())
