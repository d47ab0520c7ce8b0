"""Groups that are edited while steps go on inside backward, settings that are edited, and what a group cannot hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, step_in_backward
from tests.cases import normal
from tests.exact import assert_same, refused, snapshot


def layers(backend: str) -> tuple[nn.Sequential, Adafactor]:
    """A model whose optimizer steps inside backward, in two groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = Adafactor([{"params": list(model[i].parameters())} for i in (0, 2)], backend=backend)
    step_in_backward(model, optimizer)
    return model, optimizer


def once(model: nn.Module, optimizer: Adafactor | None, seed: int = 0) -> None:
    model(normal((3, 4), seed)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("grouped", [False, True], ids=["one parameter", "a whole group"])
def test_a_parameter_that_leaves_its_group_does_not_step_inside_backward_until_it_is_back(
    grouped: bool, backend: str
) -> None:
    model, optimizer = layers(backend)
    once(model, optimizer)
    group = optimizer.param_groups[1]
    gone = optimizer.param_groups.pop()["params"] if grouped else [group["params"].pop()]
    before = [p.detach().clone() for p in model.parameters()]
    for seed in (1, 2):
        once(model, optimizer, seed)
    for p, x in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, x) == any(p is q for q in gone)
    if grouped:
        optimizer.param_groups.append(group)
    else:
        group["params"] += gone
    model.zero_grad()
    once(model, optimizer, 3)
    assert all(not torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_twice_in_a_group_is_refused() -> None:
    a = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="group 0 has a parameter twice"):
        Adafactor([a, a])


@pytest.mark.parametrize("edit", ["removed", "added"])
def test_names_and_parameters_of_a_group_change_together(edit: str) -> None:
    optimizer = Adafactor([(name, nn.Parameter(torch.ones(3))) for name in "ab"], backend="eager")
    params = optimizer.param_groups[0]["params"]
    params.pop() if edit == "removed" else params.append(nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"group 0 has 2 'param_names' for \d 'params'"):
        optimizer.step()


BETA1: dict[str, Any] = {"beta1": 0.9}
# a shape, the keywords of the steps before, what is edited, and the keyword that the error names
REFUSED: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any], str]] = [
    ((8, 8), {"axes": (0, 1)}, {"axes": (1, 0)}, "axes"),
    ((3, 8, 8), {"axes": (1, 2)}, {"axes": (2, 1)}, "axes"),
    ((8, 8), {"axes": (0, 1), "factored": "row"}, {"axes": (1, 0)}, "axes"),
    ((8, 8), {"axes": (0, 1), "factored": "row"}, {"axes": (1, 0), "factored": "outer"}, "factored"),
    ((8, 8), {}, {"factored": False}, "factored"),
    ((8, 8), {}, {"min_factored": 9}, "min_factored"),
    ((1, 8, 8), {}, {"per_slice": True}, "per_slice"),
    ((1, 8, 8), {"per_slice": True}, {"per_slice": False}, "per_slice"),
    ((40, 128), {**BETA1, "momentum_dtype": "int8"}, {"momentum_of": "direction"}, "momentum_of"),
    ((8, 8), BETA1, {"momentum_of": "gradient", "beta1": 0.0}, "momentum_of"),
    ((8,), {**BETA1, "momentum_of": "gradient"}, {"momentum_of": "update"}, "momentum_of"),
]


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize(("shape", "given", "edit", "named"), REFUSED, ids=str)
def test_what_a_state_cannot_follow_is_refused_before_anything_changes(
    shape: tuple[int, ...], given: dict[str, Any], edit: dict[str, Any], named: str, is_copied: bool
) -> None:
    first, p = nn.Parameter(normal((40, 128), 8)), nn.Parameter(normal(shape, 9))
    groups: list[dict[str, Any]] = [{"params": [("first", first)]}, {"params": [("weight", p)], **given}]
    optimizer = Adafactor(groups, backend="eager")
    usual = optimizer.param_groups[1].copy()
    for i in range(2):
        first.grad, p.grad = normal((40, 128), i), normal(shape, i)
        optimizer.step()
    twin = copy.deepcopy(optimizer)
    optimizer = copy.deepcopy(optimizer) if is_copied else optimizer
    for each in (twin, optimizer):
        for q in (q for group in each.param_groups for q in group["params"]):
            q.grad = normal(tuple(q.shape), 5)
    other, group = optimizer.param_groups
    group.update(edit)
    other["beta1"] = 0.5  # which gives the first parameter a momentum, if it gets so far
    with refused(optimizer, ValueError, named):
        optimizer.step()
    group.update({name: usual[name] for name in edit})  # taken back in full, it goes on as if never edited
    other["beta1"] = 0.0
    optimizer.step()
    twin.step()
    assert_same(snapshot(optimizer)["weights"], snapshot(twin)["weights"])


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_tensor_is_no_way_around_the_limits_of_the_learning_rate(value: float) -> None:
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.ones(4, 3)
    rate: Any = torch.tensor(0.01)
    optimizer = Adafactor([p], lr=rate, backend="eager")
    optimizer.step()
    rate.fill_(value)
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert int(optimizer.state[p]["step"]) == 1


def test_a_checkpoint_keeps_a_learning_rate_in_a_tensor_of_its_own() -> None:
    rates: list[Any] = [torch.tensor(0.25), torch.tensor(0.5)]
    saved, loaded = (Adafactor([nn.Parameter(torch.ones(3))], lr=rate, backend="eager") for rate in rates)
    loaded.load_state_dict(saved.state_dict())
    rates[0].fill_(0.125)
    assert float(loaded.param_groups[0]["lr"]) == 0.25
