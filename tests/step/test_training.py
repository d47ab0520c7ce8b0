"""Everything a training script does to an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adafactor import Adafactor, schedules

pytestmark = pytest.mark.usefixtures("backend")


class Net(nn.Module):
    """A small network with matrices and vectors."""

    def __init__(self) -> None:
        """Two layers with a norm between."""
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) to (batch, 3)."""
        out: Tensor = self.last(self.norm(self.first(x).tanh()))
        return out


def model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


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


def test_the_defaults_train() -> None:
    net = model()
    losses = train(net, Adafactor(net.parameters()), 300)
    assert losses[-1] < 0.2 * losses[0]


def test_groups_may_differ_in_every_keyword() -> None:
    """A model with two groups is two models with one group each."""
    one: dict[str, Any] = {"lr": 3e-3, "factored": "row", "clip": 0.5}
    two: dict[str, Any] = {"lr_decay": None, "beta1": 0.9, "momentum_of": "gradient", "beta2": 0.99}
    two |= {"relative": False, "eps": (1e-20, 1e-2), "maximize": True, "axes": (1, 0), "decay_rate": 0.5}
    two |= {"on_nonfinite": "raise", "weight_decay": 0.1}
    together, apart = model(), model()
    grouped = Adafactor([{"params": together.first.parameters(), **one}, {"params": together.last.parameters(), **two}])
    singles = [Adafactor(apart.first.parameters(), **one), Adafactor(apart.last.parameters(), **two)]
    for i in range(5):
        for net in (together, apart):
            net.zero_grad()
            loss_of(net, i).backward()
        grouped.step()
        for optimizer in singles:
            optimizer.step()
    assert torch.equal(weights(together), weights(apart))


def test_a_group_added_in_mid_run_starts_at_its_own_first_step() -> None:
    net = model()
    optimizer = Adafactor(net.first.parameters())
    train(net, optimizer, 3)
    optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 1e-3})
    train(net, optimizer, 2)
    steps = [int(optimizer.state[p]["step"]) for group in optimizer.param_groups for p in group["params"]]
    assert steps == [5, 5, 2, 2]
    assert optimizer.param_groups[1]["lr"] == 1e-3 and optimizer.param_groups[1]["clip"] == 1.0


def test_a_parameter_frozen_from_the_start_costs_nothing_until_it_is_trained() -> None:
    net = model()
    net.first.requires_grad_(False)
    optimizer = Adafactor(net.named_parameters(), beta1=0.9)
    assert [record.state_bytes for record in optimizer.report()][:2] == [0, 0]
    train(net, optimizer, 2)
    other = Adafactor(net.named_parameters(), beta1=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert net.first.weight not in other.state and int(other.state[net.last.weight]["step"]) == 2
    net.first.requires_grad_(True)
    train(net, other, 1)
    assert int(other.state[net.first.weight]["step"]) == 1


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


def test_momentum_switched_on_in_mid_run() -> None:
    """It starts at zero: the first step with it is a tenth of the one without, and so is what is kept."""
    net, plain = model().double(), model().double()
    optimizers = Adafactor(net.parameters()), Adafactor(plain.parameters())
    runs = [lambda x: net(x.double()), lambda x: plain(x.double())]
    for optimizer, run in zip(optimizers, runs, strict=True):
        train(run, optimizer, 2)
    before = weights(net)
    optimizers[0].param_groups[0]["beta1"] = 0.9
    for optimizer, run in zip(optimizers, runs, strict=True):
        train(run, optimizer, range(2, 3))
    first = weights(net) - before
    torch.testing.assert_close(first, 0.1 * (weights(plain) - before), rtol=1e-9, atol=1e-14)
    kept = torch.cat([optimizers[0].state[p]["momentum_of_update"].flatten() for p in net.parameters()])
    torch.testing.assert_close(kept, -first, rtol=1e-9, atol=1e-14)
    assert bool((first != 0).any())


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
