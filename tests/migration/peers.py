"""The other packages as they are installed, and a run that moves from one of them into ours."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
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
CONVOLUTIONS: Shapes = [
    (24, 18),
    (20, 18, 3, 3),
    (3, 20, 18),
    (8, 30),
    (9,),
    (20, 20, 20),
    (17, 17),
    (16, 16),
    (2, 20, 1),
]


def timm(name: str) -> Any:
    """A module of timm.optim without timm itself, which needs torchvision."""
    spec = find_spec("timm") if "timm" not in sys.modules else sys.modules["timm"].__spec__
    if spec is None or spec.origin is None:
        pytest.skip("timm is not installed")
    folder = Path(spec.origin).parent / "optim"
    package = types.ModuleType("bare_timm_optim")
    package.__path__ = [str(folder)]
    sys.modules.setdefault("bare_timm_optim", package)
    return importlib.import_module(f"bare_timm_optim.{name}")


def original(source: str) -> Callable[..., Any]:
    """The class of that name, or a skipped test."""
    if source == "torch":
        return torch.optim.Adafactor
    if source == "adamw":
        return torch.optim.AdamW
    if source == "transformers":
        return pytest.importorskip("transformers.optimization").Adafactor  # type: ignore[no-any-return]
    if source == "pytorch_optimizer":
        return pytest.importorskip("pytorch_optimizer").AdaFactor  # type: ignore[no-any-return]
    if source == "timm":
        return timm("adafactor").Adafactor  # type: ignore[no-any-return]
    assert source == "timm_bv"
    return timm("adafactor_bv").AdafactorBigVision  # type: ignore[no-any-return]


def parameters(shapes: Shapes, rms: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    return [(rms * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def gradient(p: Tensor, t: int, number: int, rms: float = 1.0) -> Tensor:
    """A gradient whose rows differ in scale, as real ones do."""
    generator = torch.Generator().manual_seed(1000 * t + number)
    scale = 1 + torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape) / max(1, p.numel())
    return (rms * scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def falling(p: Tensor, t: int, number: int, rms: float = 1.0) -> Tensor:
    """A gradient that falls by 5 % a step, so that RMS(U) is below 1, its rows spread over two powers of ten."""
    rows = torch.logspace(0, -2, p.shape[0], dtype=p.dtype) if p.ndim > 1 else torch.ones(1, dtype=p.dtype)
    return 0.95**t * rows.view(-1, *[1] * (p.ndim - 1)) * gradient(p, t, number, rms)


def steps(
    optimizer: Any, params: list[Tensor], span: range, rms: float = 1.0, kind: Callable[..., Tensor] = gradient
) -> None:
    """Steps on the gradients of these times."""
    for t in span:
        for number, p in enumerate(params):
            p.grad = kind(p, t, number, rms)
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
    unsaved: dict[str, Any] | None = None,
    scheduler: Callable[[Optimizer, int], Any] | None = None,
    after: int = AFTER,
    rms: float = 1.0,
    kind: Callable[..., Tensor] = gradient,
    parameter_rms: float = 1.0,
    dtype: torch.dtype = torch.float64,
    make: Callable[..., Any] | None = None,
    lr_after: float | None = None,
) -> float:
    """Train with the original, move in, go on with both on the same gradients: how far apart do they end?

    `make` makes an original that is not the one of the source's name; `lr_after` is an lr that is set with the move.
    """
    params = parameters(shapes, parameter_rms, dtype)
    theirs = (make or original(source))(params, **their_arguments)
    steps(theirs, params, range(BEFORE), rms, kind)
    mine = [p.detach().clone().requires_grad_() for p in params]
    start = [p.detach().clone() for p in params]
    ours = adafactor.like(source, mine, **their_arguments)
    saved = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(adafactor.migrate(saved, source, params=mine, arguments=unsaved))
    for group in [*theirs.param_groups, *ours.param_groups] if lr_after is not None else []:
        group["lr"] = lr_after
    steps(theirs, params, range(BEFORE, BEFORE + after), rms, kind)
    schedule = scheduler(ours, BEFORE) if scheduler else None
    for t in range(BEFORE, BEFORE + after):
        steps(ours, mine, range(t, t + 1), rms, kind)
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
