"""Save, load and continue as if nothing had happened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from tests.exact import assert_same, copy_of

pytestmark = pytest.mark.usefixtures("backend")


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)).to(dtype)


def train(net: nn.Module, optimizer: Adafactor, steps: range) -> None:
    dtype = next(net.parameters()).dtype
    for i in steps:
        optimizer.zero_grad()
        data = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
        net(data).square().mean().backward()
        optimizer.step()


def test_momentum_of_a_checkpoint_stays_when_the_new_optimizer_has_none() -> None:
    net = model()
    optimizer = Adafactor(net.parameters(), beta1=0.9)
    train(net, optimizer, range(2))
    other = copy.deepcopy(net)
    resumed = Adafactor(other.parameters())  # β₁ comes with the checkpoint's groups
    resumed.load_state_dict(optimizer.state_dict())
    train(net, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert_same(copy_of(net), copy_of(other))


@pytest.mark.parametrize("named", [False, True])
def test_groups_in_another_order_are_refused(named: bool) -> None:
    net = model()
    params = list(net.named_parameters()) if named else list(net.parameters())
    optimizer = Adafactor([{"params": params[:2]}, {"params": params[2:]}])
    train(net, optimizer, range(1))
    other = Adafactor([{"params": params[2:]}, {"params": params[:2]}])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="another order"):
        other.load_state_dict(optimizer.state_dict())
    assert_same(other.state_dict(), before)


def test_names_tell_apart_what_shapes_cannot() -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    saved = Adafactor([("a", a.weight), ("b", b.weight)]).state_dict()
    with pytest.raises(ValueError, match="has 'b' where the state dict has 'a': another order"):
        Adafactor([("b", b.weight), ("a", a.weight)]).load_state_dict(saved)


def test_a_wrapper_may_prefix_the_names() -> None:
    net = model()
    optimizer = Adafactor([(f"_orig_mod.{name}", p) for name, p in net.named_parameters()])
    train(net, optimizer, range(2))
    fresh = Adafactor(net.named_parameters())
    fresh.load_state_dict(optimizer.state_dict())
    assert int(fresh.state[next(net.parameters())]["step"]) == 2


@pytest.mark.parametrize("kind", [Adafactor, torch.optim.AdamW])
def test_a_state_dict_holds_the_tensors_themselves(kind: Any) -> None:
    """As the docstring says: AdamW's from the first step on, ours from the start."""
    net = model()
    optimizer = kind(net.parameters())
    early = optimizer.state_dict()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    late = copy.deepcopy(saved := optimizer.state_dict())
    optimizer.step()
    assert [float(state["step"]) for state in early["state"].values()] == ([2.0] * 4 if kind is Adafactor else [])
    assert [float(state["step"]) for state in saved["state"].values()] == [2.0] * 4
    assert [float(state["step"]) for state in late["state"].values()] == [1.0] * 4
