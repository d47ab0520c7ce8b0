"""Parameters that change groups, leave them, or are in one twice: every step goes by the groups as they are now."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor, step_in_backward
from tests.attack.helpers import assert_unchanged, random, snapshot, steps_of

SHAPE = (40, 30)
SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.0},
    {"maximize": True},
    {"weight_decay": 5.0},
    {"clip": 0.1},
    {"clip": None},
    {"eps": (1e-3, 1e-3)},
    {"relative": False},
    {"beta2": 0.5},
    {"decay_rate": 0.2},
    {"lr_decay": None, "lr": 3.0},
]


def parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(random(SHAPE, 90 + i)) for i in range(count)]


def step(optimizer: Adafactor, params: list[nn.Parameter], first: int, steps: int = 2) -> None:
    for i in range(first, first + steps):
        for j, p in enumerate(params):
            p.grad = random(SHAPE, 10 * i + j)
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_parameter_that_is_moved_steps_by_the_settings_of_its_new_group(
    settings: dict[str, Any], backend: str
) -> None:
    moved, edited = parameters(), parameters()
    optimizer = Adafactor([{"params": moved[:2]}, {"params": moved[2:], **settings}], backend=backend)
    expected = Adafactor(
        [{"params": edited[:1]}, {"params": edited[1:2]}, {"params": edited[2:], **settings}], backend=backend
    )
    step(optimizer, moved, 0, 4)
    step(expected, edited, 0, 4)
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    expected.param_groups[1].update(settings)
    step(optimizer, moved, 4)
    step(expected, edited, 4)
    for p, q in zip(moved, edited, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("inside", [False, True], ids=["ordinary steps", "inside backward"])
def test_parameters_that_swap_groups_swap_settings(inside: bool, backend: str) -> None:
    model = nn.ParameterList(parameters(2))
    a, b = model
    optimizer = Adafactor([{"params": [a], "lr": 1e-2}, {"params": [b], "lr": 0.0}], backend=backend)
    if inside:
        step_in_backward(model, optimizer)

    def once(seed: int) -> None:
        optimizer.zero_grad()
        loss = sum(((p * random(SHAPE, seed)).sum() for p in model), torch.zeros(()))
        loss.backward()
        optimizer.step()

    for seed in range(4):
        once(seed)
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    x, y = a.detach().clone(), b.detach().clone()
    once(5)
    assert torch.equal(a, x), "its lr is 0 now"
    assert bool((b != y).all()), "its lr is 0.01 now"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def once(model: nn.Module, optimizer: Adafactor, seed: int = 0) -> None:
    model(random((3, 4), seed)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("grouped", [False, True], ids=["one parameter", "a whole group"])
def test_a_parameter_that_is_no_longer_in_a_group_does_not_step_inside_backward(grouped: bool, backend: str) -> None:
    model = layers()
    first, last = list(model[0].parameters()), list(model[2].parameters())
    optimizer = Adafactor([{"params": first}, {"params": last}], backend=backend)
    step_in_backward(model, optimizer)
    once(model, optimizer)
    if grouped:
        gone = optimizer.param_groups.pop()["params"]
    else:
        gone = [optimizer.param_groups[1]["params"].pop()]
    before = {p: p.detach().clone() for p in model.parameters()}
    for seed in (1, 2):
        once(model, optimizer, seed)
    for p, value in before.items():
        left = any(p is q for q in gone)
        assert torch.equal(p, value) == left


def test_a_parameter_that_comes_back_to_a_group_steps_inside_backward_again(backend: str) -> None:
    model = layers()
    optimizer = Adafactor(model.parameters(), backend=backend)
    step_in_backward(model, optimizer)
    once(model, optimizer)
    p = optimizer.param_groups[0]["params"].pop()
    once(model, optimizer, 1)
    optimizer.param_groups[0]["params"].append(p)
    p.grad = None
    before = p.detach().clone()
    once(model, optimizer, 2)
    assert bool((p != before).all()) and int(optimizer.state[p]["step"]) == 2


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, saved], ids=["deepcopy", "torch.save"])
def test_a_model_may_be_copied_between_backward_and_step(
    copied: Callable[[nn.Module], nn.Module], backend: str
) -> None:
    model = layers()
    optimizer = Adafactor(model.parameters(), backend=backend)
    step_in_backward(model, optimizer)
    model(random((3, 4), 0)).square().mean().backward()
    twin = copied(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    before = snapshot(optimizer)
    twin.zero_grad()
    twin(random((3, 4), 1)).square().mean().backward()
    assert_unchanged(optimizer, before)
    optimizer.step()
    once(model, optimizer, 1)
    assert steps_of(optimizer) == [2] * 4


def test_after_a_backward_that_failed_training_goes_on(backend: str) -> None:
    model = layers()
    optimizer = Adafactor(model.parameters(), backend=backend)
    step_in_backward(model, optimizer)

    def fail(_: Tensor) -> None:
        raise MemoryError("as from an allocator")

    hook = next(model.parameters()).register_hook(fail)
    with pytest.raises(MemoryError):
        model(random((3, 4), 0)).square().mean().backward()
    hook.remove()
    before = steps_of(optimizer)
    optimizer.zero_grad()
    once(model, optimizer, 1)
    assert steps_of(optimizer) == [count + 1 for count in before]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_twice_in_a_group_is_refused() -> None:
    a, b = parameters(2)
    with pytest.raises(ValueError, match="group 0 has a parameter twice"):
        Adafactor([a, b, a])


@pytest.mark.parametrize("edit", ["removed", "added"])
def test_names_and_parameters_of_a_group_change_together(edit: str) -> None:
    a, b = parameters(2)
    optimizer = Adafactor([("a", a), ("b", b)], backend="eager")
    params = optimizer.param_groups[0]["params"]
    if edit == "removed":
        params.pop()
    else:
        params.append(nn.Parameter(torch.ones(3)))
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"group 0 has 2 'param_names' for \d 'params'"):
        optimizer.step()
