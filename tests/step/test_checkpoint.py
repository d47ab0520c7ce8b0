"""Save, load and continue as if nothing had happened."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import StateDict

from adafactor import Adafactor

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


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_loading_copies_so_that_the_source_can_go_on() -> None:
    net = model()
    optimizer = Adafactor(net.parameters())
    train(net, optimizer, range(2))
    twin_net = copy.deepcopy(net)
    twin = Adafactor(twin_net.parameters())
    twin.load_state_dict(optimizer.state_dict())
    train(net, optimizer, range(2, 4))
    assert int(twin.state[next(twin_net.parameters())]["step"]) == 2
    train(twin_net, twin, range(2, 4))
    assert same(net, twin_net)


def test_momentum_of_a_checkpoint_stays_when_the_new_optimizer_has_none() -> None:
    net = model()
    optimizer = Adafactor(net.parameters(), beta1=0.9)
    train(net, optimizer, range(2))
    other = copy.deepcopy(net)
    resumed = Adafactor(other.parameters())  # β₁ comes with the checkpoint's groups
    resumed.load_state_dict(optimizer.state_dict())
    train(net, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert same(net, other)


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
    after = other.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(torch.equal(before["state"][i][k], after["state"][i][k]) for i in range(4) for k in before["state"][i])


def test_names_tell_apart_what_shapes_cannot() -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    saved = Adafactor([("a", a.weight), ("b", b.weight)]).state_dict()
    with pytest.raises(ValueError, match="has 'b' where the state dict has 'a': another order"):
        Adafactor([("b", b.weight), ("a", a.weight)]).load_state_dict(saved)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_groups_or_parameters_is_refused(count: int) -> None:
    saved = Adafactor([{"params": [torch.ones(2, 3)]}, {"params": [torch.ones(2, 3)]}]).state_dict()
    with pytest.raises(ValueError, match="number of parameter groups"):
        Adafactor([{"params": [torch.ones(2, 3)]} for _ in range(count)]).load_state_dict(saved)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        pair = [torch.ones(2, 3), torch.ones(2, 3)]
        Adafactor([{"params": pair}, {"params": [torch.ones(2, 3)]}]).load_state_dict(saved)


def test_hooks_around_loading_see_the_right_things() -> None:
    net = model(torch.bfloat16)
    optimizer = Adafactor(net.parameters())
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    seen = []

    def before(_: object, given: StateDict) -> StateDict:
        changed = copy.deepcopy(given)
        changed["state"][0]["row"].fill_(3.0)
        return changed

    fresh = Adafactor(model(torch.bfloat16).parameters())
    fresh.register_load_state_dict_pre_hook(before)
    fresh.register_load_state_dict_post_hook(lambda o: seen.append(o.state[o.param_groups[0]["params"][0]]["row"]))
    fresh.load_state_dict(saved)
    assert seen[0].dtype == torch.float32 and bool((seen[0] == 3.0).all())


def test_the_whole_optimizer_survives_torch_save() -> None:
    net = model()
    optimizer = Adafactor(net.parameters())
    train(net, optimizer, range(2))
    buffer = io.BytesIO()
    torch.save((net, optimizer), buffer)
    buffer.seek(0)
    other, resumed = torch.load(buffer, weights_only=False)
    train(net, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert same(net, other)


def test_a_wrapper_may_prefix_the_names() -> None:
    net = model()
    optimizer = Adafactor([(f"_orig_mod.{name}", p) for name, p in net.named_parameters()])
    train(net, optimizer, range(2))
    fresh = Adafactor(net.named_parameters())
    fresh.load_state_dict(optimizer.state_dict())
    assert int(fresh.state[next(net.parameters())]["step"]) == 2


def test_the_state_of_another_optimizer_is_refused_by_name() -> None:
    p = torch.ones(3, 4, requires_grad=True)
    p.grad = torch.ones(3, 4)
    other = torch.optim.Adafactor([p])
    other.step()
    with pytest.raises(ValueError, match="of another optimizer: it has 'col_var', 'row_var'. adafactor.migrate"):
        Adafactor([p]).load_state_dict(other.state_dict())
    adam = torch.optim.Adam([p], eps=1e-8)
    adam.step()
    state = {"state": adam.state_dict()["state"], "param_groups": Adafactor([p]).state_dict()["param_groups"]}
    with pytest.raises(ValueError, match="of another optimizer: it has 'exp_avg', 'exp_avg_sq'. adafactor.migrate"):
        Adafactor([p]).load_state_dict(state)


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
