"""Everything a training script does to an optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adafactor import Adafactor, schedules

pytestmark = pytest.mark.usefixtures("backend")


def model(seed: int = 0) -> nn.Sequential:
    """A small network with matrices and vectors."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def batch(step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def loss_of(net: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
    return (net(batch(step)) - 1).square().mean()


def train(net: Callable[[Tensor], Tensor], optimizer: Optimizer, steps: range | int) -> list[float]:
    losses = []
    for i in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        loss = loss_of(net, i)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_a_parameter_frozen_from_the_start_costs_nothing_until_it_is_trained() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = Adafactor(net.named_parameters(), beta1=0.9)
    assert [record.state_bytes for record in optimizer.report()][:2] == [0, 0]
    train(net, optimizer, 2)
    other = Adafactor(net.named_parameters(), beta1=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert (
        net.get_parameter("0.weight") not in other.state
        and int(other.state[net.get_parameter("3.weight")]["step"]) == 2
    )
    net[0].requires_grad_(True)
    train(net, other, 1)
    assert int(other.state[net.get_parameter("0.weight")]["step"]) == 1


def test_the_warm_up_is_the_papers_and_can_be_saved() -> None:
    optimizer = Adafactor(model().parameters(), lr=1.0, lr_decay=None)
    scheduler = schedules.warmup(optimizer, slope=1e-2)
    seen = []
    for _ in range(40):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([min(1e-2 * t, t**-0.5) for t in range(1, 41)])
    again = schedules.warmup(Adafactor(model().parameters(), lr=1.0), slope=0.5)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_last_lr() == scheduler.get_last_lr()
    again.optimizer.step()
    again.step()
    assert again.get_last_lr()[0] == pytest.approx(42**-0.5)
    with pytest.raises(ValueError, match="slope=-1"):
        schedules.warmup(optimizer, slope=-1)


def test_a_model_moved_after_the_optimizer_was_made_takes_its_state_along() -> None:
    net = model().to("meta")
    optimizer = Adafactor(net.parameters(), beta1=0.9)
    for p in net.parameters():
        optimizer.state[p] = {key: torch.zeros_like(v, device="cpu") for key, v in optimizer.state[p].items()}
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert {v.device.type for p in net.parameters() for v in optimizer.state[p].values()} == {"meta"}


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch says so of Python 3.13.0
def test_the_model_and_the_step_may_be_compiled() -> None:
    net = model()
    compiled = torch.compile(net, backend="eager")
    plain = model()
    optimizers = Adafactor(net.parameters()), Adafactor(plain.parameters())
    whole_step = torch.compile(optimizers[0].step, backend="eager")
    for i in range(3):
        net.zero_grad()
        loss_of(compiled, i).backward()
        whole_step()
    train(plain, optimizers[1], 3)
    assert torch.equal(weights(net), weights(plain))
