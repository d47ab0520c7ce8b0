"""Every scheduler of torch drives ours as it drives SGD and Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from adafactor import Adafactor

Maker = Callable[[Any], Any]

STEPS = 14
RATES = (0.02, 0.005)  # of the two groups
MAKERS: dict[str, Maker] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=9, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=4, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.05, 0.02], total_steps=STEPS + 1, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=5),
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


def test_there_is_no_scheduler_that_is_not_tried() -> None:
    every = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, LRScheduler) and not name.startswith("_")
    }
    assert every - {"LRScheduler"} == set(MAKERS)


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


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_a_scheduler_and_an_optimizer_that_were_loaded_go_on(name: str) -> None:
    first, again = grouped(Adafactor), grouped(Adafactor)
    scheduler = MAKERS[name](first)
    list(rates(first, scheduler, range(6)))
    resumed = MAKERS[name](again)
    again.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for a, b in zip(first.param_groups, again.param_groups, strict=True):
        b["params"][0].data.copy_(a["params"][0])
    went_on = list(rates(again, resumed, range(6, STEPS)))
    assert went_on == list(rates(first, scheduler, range(6, STEPS)))
    for a, b in zip(first.param_groups, again.param_groups, strict=True):
        assert torch.equal(a["params"][0], b["params"][0])


def test_a_cycle_of_momentum_is_refused_by_torch_itself() -> None:
    """Ours has `beta1`, and no `momentum` or `betas` for a scheduler to write to: torch says so in its own words."""
    optimizer = Adafactor(params(), lr=0.01, beta1=0.9)
    with pytest.raises(ValueError, match="optimizer must support momentum or beta1"):
        lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, base_momentum=0.7, max_momentum=0.95)
    with pytest.raises(ValueError, match="optimizer must support momentum or beta1"):
        lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9)
