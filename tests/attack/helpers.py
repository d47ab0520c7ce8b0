"""A parameter that walks beside the oracle, and what a test must not find changed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from tests import oracle
from tests.compare import arguments
from tests.exact import assert_same

LR = 1e-2
ROOT = Path(__file__).parents[2]
Way = tuple[Tensor, Tensor]  # from X to X, in float64
PLAIN = oracle.Row(estimator="outer", d=1.0, relative=True, multiplier=LR)  # the defaults, but for 1/√t
MOMENTUM = {
    "no momentum": PLAIN,
    "momentum of the update": oracle.Row("outer", beta1=0.9, momentum="update", d=1.0, relative=True, multiplier=LR),
    "momentum of the gradient": oracle.Row(
        "outer", beta1=0.9, momentum="gradient", d=1.0, relative=True, multiplier=LR
    ),
}
PRECISION = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the longest change in a step


def keywords(row: oracle.Row) -> dict[str, Any]:
    """The keywords of `Adafactor` that are this row."""
    given = arguments(row)
    given.pop("momentum", None)
    given.pop("momentum_of", None)
    if row.beta1:
        given["momentum_of"] = row.momentum
    return given


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for every dtype up to rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Walk:
    """A parameter with its optimizer and, beside it, the oracle in float64."""

    def __init__(self, x: Tensor, row: oracle.Row, backend: str, **more: Any) -> None:
        """From X₀; `more` are keywords that the oracle does not know."""
        self.p = nn.Parameter(x.clone())
        backend = "auto" if backend == "cpu" and x.dtype == torch.float64 else backend  # which has no loops for it
        self.optimizer = Adafactor([self.p], **keywords(row), backend=backend, **more)
        self.row, self.memory, self.t = row, oracle.Memory(), 0

    def step(self, g: Tensor) -> Way:
        """One step of both, from where the parameter is now; returns from where to where the oracle went."""
        self.t += 1
        old = self.p.detach().double().numpy().copy()
        with np.errstate(all="ignore"):
            new = oracle.step(self.row, old, g.double().numpy(), self.t, 1.0, self.memory)
        self.p.grad = g.clone()
        self.optimizer.step()
        return torch.from_numpy(old), torch.as_tensor(new)

    def check(self, g: Tensor) -> None:
        """One step, which must be the oracle's."""
        assert_step(self.step(g), self.p)


def assert_step(way: Way, p: Tensor) -> None:
    """From the first to the second of `way`: right to a share of the step's length, and to the last place of X."""
    old, new = way
    got = p.detach().double()
    assert bool(new.isfinite().all()), "the test is wrong: the oracle itself is not finite"
    assert bool(got.isfinite().all()), "not finite"
    length = (new - old).abs().max()
    allowed = PRECISION[p.dtype] * length + torch.finfo(p.dtype).eps * torch.maximum(old.abs(), new.abs())
    excess = ((got - new).abs() / allowed.clamp(min=1e-300)).max().item()
    assert excess <= 1, f"off by {(got - new).abs().max() / length:.3g} of the longest change, {excess:.3g} × allowed"


def snapshot(optimizer: Adafactor) -> dict[str, Any]:
    """All that a step or a load can change, out of reach of later ones."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy({"weights": [p.detach() for p in params], **optimizer.state_dict()})


def assert_unchanged(optimizer: Adafactor, before: dict[str, Any]) -> None:
    """Since that snapshot."""
    assert_same(snapshot(optimizer), before)


def steps_of(optimizer: Adafactor) -> list[int]:
    """How many steps each parameter has taken, by its own count."""
    return [int(optimizer.state[p]["step"]) for group in optimizer.param_groups for p in group["params"]]


def refused(action: Callable[[], Any], *kinds: type[Exception]) -> str | None:
    """The message, if the action is refused by an error of these kinds; None if it is done."""
    try:
        action()
    except kinds as error:
        return str(error)
    return None


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with this checkout's code."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
