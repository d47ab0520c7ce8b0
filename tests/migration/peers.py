"""The other packages as they are installed, and a run that moves from one of them into ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import adafactor

Shapes = list[tuple[int, ...]]

BEFORE, AFTER = 7, 25  # steps of the original alone, then of both
SHAPES: Shapes = [(24, 18), (18, 24), (7,), (), (5, 1), (1, 6), (3, 4, 6), (4, 3, 2, 2), (20, 20)]
ROUNDING = {torch.float32: 0.2, torch.float64: 0.0}  # 1e-5 of this is 17 units in the last place
SAME = {torch.float32: 1e-5, torch.float64: 1e-9}


def original(source: str) -> Callable[..., Any]:
    """The class of that name, or a skipped test."""
    if source == "transformers":
        return pytest.importorskip("transformers.optimization").Adafactor  # type: ignore[no-any-return]
    return {"torch": torch.optim.Adafactor, "adamw": torch.optim.AdamW}[source]


def parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradient(p: Tensor, t: int, number: int, rms: float = 1.0) -> Tensor:
    """A gradient whose rows differ in scale, as real ones do."""
    generator = torch.Generator().manual_seed(1000 * t + number)
    scale = 1 + torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape) / max(1, p.numel())
    return (rms * scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def steps(optimizer: Any, params: list[Tensor], span: range, rms: float = 1.0) -> None:
    """Steps on the gradients of these times."""
    for t in span:
        for number, p in enumerate(params):
            p.grad = gradient(p, t, number, rms)
        optimizer.step()


def apart(ours: list[Tensor], theirs: list[Tensor], start: list[Tensor]) -> float:
    """The largest deviation of a parameter, relative to the distance it travelled.

    Float32 parameters round off more than that in steps much smaller than they are; of theirs, the size counts then.
    """
    worst = 0.0
    with torch.no_grad():
        for p, q, x in zip(ours, theirs, start, strict=True):
            size = torch.maximum((q - x).abs().max(), ROUNDING[q.dtype] * q.abs().max())
            worst = max(worst, float((p - q).abs().max() / size))
    return worst


def moved_apart(
    source: str,
    shapes: Shapes,
    their_arguments: dict[str, Any],
    *,
    scheduler: Callable[[Optimizer, int], Any] | None = None,
    rms: float = 1.0,
    dtype: torch.dtype = torch.float64,
    lr_after: float | None = None,
) -> float:
    """Train with the original, move in, go on with both on the same gradients: how far apart do they end?

    `lr_after` is an lr that is set with the move.
    """
    params = parameters(shapes, dtype=dtype)
    theirs = original(source)(params, **their_arguments)
    steps(theirs, params, range(BEFORE), rms)
    mine = [p.detach().clone().requires_grad_() for p in params]
    start = [p.detach().clone() for p in params]
    ours = adafactor.like(source, mine, **their_arguments)
    ours.load_state_dict(adafactor.migrate(copy.deepcopy(theirs.state_dict()), source, params=mine))
    for group in [*theirs.param_groups, *ours.param_groups] if lr_after is not None else []:
        group["lr"] = lr_after
    steps(theirs, params, range(BEFORE, BEFORE + AFTER), rms)
    schedule = scheduler(ours, BEFORE) if scheduler else None
    for t in range(BEFORE, BEFORE + AFTER):
        steps(ours, mine, range(t, t + 1), rms)
        if schedule is not None:
            schedule.step()
    return apart(mine, params, start)


@contextmanager
def notes() -> Iterator[list[str]]:
    """Collect what migration tells."""
    told: list[str] = []
    with pytest.warns(adafactor.MigrationWarning) as caught:
        yield told
    told += [str(note.message) for note in caught if issubclass(note.category, adafactor.MigrationWarning)]
