"""Nothing is kept of a parameter that is no longer in use: its memory is free when its last holder lets go of it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from adafactor import Adafactor, step_in_backward
from tests import inside
from tests.cases import normal

pytestmark = pytest.mark.usefixtures("without_collector")
Reference = weakref.ref[Any]
SHAPE = (30, 20)


def step(optimizer: Adafactor, seed: int = 0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = normal(tuple(p.shape), seed)
    optimizer.step()


def backward(model: nn.Module) -> None:
    model(normal((3, 6), 0)).square().mean().backward()


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What a first step imports leaves frames behind that only the collector frees."""
    for backend in inside.HERE:
        step(Adafactor([nn.Parameter(normal(SHAPE, 0))], backend=backend))


def replace(optimizer: Adafactor, keep_state: bool = True) -> Reference:
    """Put another parameter in the place of the first, as pruning does; returns a weak reference to the old one."""
    params = optimizer.param_groups[0]["params"]
    old = params[0]
    state = optimizer.state.pop(old)
    params[0] = nn.Parameter(old.detach().clone())
    if keep_state:
        optimizer.state[params[0]] = state
    return weakref.ref(old)


@pytest.mark.parametrize("keep_state", [True, False], ids=["with its state", "without state"])
@pytest.mark.parametrize("others", [0, 2])
def test_a_replaced_parameter_is_gone_after_the_next_step(keep_state: bool, others: int, any_backend: str) -> None:
    optimizer = Adafactor([nn.Parameter(normal(SHAPE, i)) for i in range(1 + others)], backend=any_backend)
    for seed in range(3):
        step(optimizer)
        old = replace(optimizer, keep_state)
        step(optimizer, seed)
        assert old() is None


@pytest.mark.parametrize("use", [Adafactor.state_dict, step], ids=["state_dict", "step"])
def test_what_stands_in_the_groups_has_the_state_although_it_came_after_the_optimizer(
    use: Callable[[Adafactor], object],
) -> None:
    """Accelerate shards a model by FSDP2 after the optimizer is made, and puts the shards into its groups."""
    optimizer = Adafactor([nn.Parameter(normal(SHAPE, 0)), nn.Parameter(normal((7,), 1))], backend="eager")
    group = optimizer.param_groups[0]
    old = [weakref.ref(p) for p in group["params"]]
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    use(optimizer)
    assert [p() for p in old] == [None, None]
    saved = optimizer.state_dict()["state"]
    assert [sorted(saved[key]) for key in (0, 1)] == [["col", "row", "step"], ["full", "step"]] and len(saved) == 2


def test_a_parameter_that_is_replaced_while_it_steps_inside_backward_is_gone_after_the_next_step(
    any_backend: str,
) -> None:
    model = nn.Linear(6, 4)
    optimizer = Adafactor(model.parameters(), backend=any_backend)
    step_in_backward(model, optimizer)
    for number in range(3):
        if number == 1:
            old = replace(optimizer)
            model.weight = optimizer.param_groups[0]["params"][0]
        backward(model)
        optimizer.step()
    assert old() is None
    assert int(optimizer.state[model.weight]["step"]) == 3


def loaded(model: nn.Module, optimizer: Adafactor) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer)


def inside_backward(model: nn.Module, optimizer: Adafactor) -> None:
    step_in_backward(model, optimizer)
    backward(model)
    optimizer.step()


def failed(model: nn.Module, optimizer: Adafactor) -> None:
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        step(optimizer)


USES: dict[str, Callable[[nn.Module, Adafactor], object]] = {
    "nothing more": lambda model, optimizer: None,
    "reported": lambda model, optimizer: optimizer.report(),
    "loaded": loaded,
    "inside backward": inside_backward,
    "failed": failed,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("keywords", [{"beta1": 0.9}, {"on_nonfinite": "raise"}], ids=str)
def test_parameters_are_free_as_soon_as_model_and_optimizer_are(
    use: str, keywords: dict[str, Any], any_backend: str
) -> None:
    def run() -> list[Reference]:
        model = nn.Linear(6, 4)
        optimizer = Adafactor(model.parameters(), backend=any_backend, **keywords)
        step(optimizer)
        step(optimizer)
        USES[use](model, optimizer)
        return [weakref.ref(p) for p in model.parameters()] + [weakref.ref(optimizer)]

    assert [reference() for reference in run()] == [None, None, None]
