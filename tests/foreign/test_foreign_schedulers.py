"""Torch's schedulers drive ours as they drive SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from adafactor import Adafactor

Maker = Callable[[Any], Any]

STEPS = 14
RATES = (0.02, 0.005)  # of the two groups
# One that multiplies, one that writes its own, one that looks at a figure, and one that is made of others.
MAKERS: dict[str, Maker] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.05, 0.02], total_steps=STEPS + 1, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
}
# torch's own schedulers step one another in a way that torch itself calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")


def params() -> list[torch.Tensor]:
    return [torch.full((4, 3), 0.5, requires_grad=True), torch.full((5,), 0.5, requires_grad=True)]


def grouped(cls: Any, tensor: bool = False) -> Any:
    rates = [torch.tensor(rate, dtype=torch.float64) if tensor else rate for rate in RATES]
    return cls([{"params": [p], "lr": lr} for p, lr in zip(params(), rates, strict=True)], lr=0.1)


def step(optimizer: Optimizer, scheduler: Any = None, t: int = 0) -> None:
    """One of each; the figure for a plateau falls, stays and falls."""
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i))
    optimizer.step()
    if scheduler is not None:
        scheduler.step(*([1.0 / min(t + 1, 4)] if isinstance(scheduler, ReduceLROnPlateau) else []))


def rates(optimizer: Optimizer, scheduler: Any, steps: range) -> Iterator[list[float]]:
    for t in steps:
        step(optimizer, scheduler, t)
        yield [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", MAKERS)
def test_rates_are_those_that_sgd_gets_and_a_tensor_is_driven_like_a_number(name: str) -> None:
    """Torch's schedulers write into such a tensor."""
    ours, tensors, theirs = grouped(Adafactor), grouped(Adafactor, tensor=True), grouped(torch.optim.SGD)
    found, written, expected = (list(rates(each, MAKERS[name](each), range(STEPS))) for each in (ours, tensors, theirs))
    assert found == expected and len({tuple(pair) for pair in found}) > 1
    torch.testing.assert_close(torch.tensor(written), torch.tensor(found))
    for a, b in zip(tensors.param_groups, ours.param_groups, strict=True):
        replaced = name == "ReduceLROnPlateau" and torch.__version__ < "2.7"  # by a number, in torch 2.6
        assert isinstance(a["lr"], torch.Tensor) != replaced
        torch.testing.assert_close(a["params"][0], b["params"][0])
