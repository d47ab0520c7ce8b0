"""What is kept from step to step is given up when anything changes, and only then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests import inside
from tests.cases import normal
from tests.reference import Expected

SHAPES = [(30, 20), (12,), (4, 5, 6), (64, 3)]
Change = Callable[[Any, list[Any]], object]


def lay_differently(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def join(optimizer: Adafactor, params: list[Tensor]) -> None:
    new = torch.ones(7, 9, dtype=torch.float64, requires_grad=True)
    new.grad = torch.linspace(-1, 1, 63, dtype=torch.float64).view(7, 9)
    optimizer.add_param_group({"params": [new], "lr": 0.5})


CHANGES: dict[str, Change] = {
    "nothing": lambda o, params: None,
    "moved": lambda o, params: setattr(params[0], "data", params[0].data.clone()),
    "laid differently": lambda o, params: setattr(params[0], "data", lay_differently(params[0].data)),
    "state replaced": lambda o, params: o.state[params[0]].update(row=o.state[params[0]]["row"] * 3),
    "state moved": lambda o, params: setattr(o.state[params[3]]["col"], "data", o.state[params[3]]["col"] * 5),
    "note in the state": lambda o, params: o.state[params[1]].update(note=torch.ones(())),
    "loaded": lambda o, params: o.load_state_dict(o.state_dict()),
    "no gradient": lambda o, params: setattr(params[2], "grad", None),
    "gradient turned": lambda o, params: setattr(params[0], "grad", lay_differently(params[0].grad)),
    "left": lambda o, params: o.param_groups[0]["params"].pop(),
    "joined": join,
    "backend": lambda o, params: setattr(o, "backend", "eager"),
}
SETTINGS: dict[str, Any] = {
    "lr": 0.3,
    "weight_decay": 0.2,
    "beta2": 0.5,
    "clip": 0.1,
    "relative": False,
    "maximize": True,
    "beta1": 0.9,
}
SETTINGS |= {"eps": (1e-30, 0.5), "on_nonfinite": "raise"}
STAYS = {"nothing", "lr", "weight_decay", "beta2", "no gradient"}


@pytest.mark.parametrize("change", [*CHANGES, *SETTINGS])
def test_a_change_between_steps_counts_from_the_next_step_on(change: str) -> None:
    params: list[Any] = [normal(shape, i).requires_grad_() for i, shape in enumerate(SHAPES)]
    optimizer = Adafactor(list(params), lr=0.1)
    standing = []
    for t in range(7):
        for i, p in enumerate(params):
            p.grad = torch.empty_like(p).copy_(normal(SHAPES[i], 10 * t + i)).detach()
        if t == 4 and change in CHANGES:
            CHANGES[change](optimizer, params)
        elif t == 4:
            optimizer.param_groups[0][change] = SETTINGS[change]
        expected = Expected(optimizer)
        optimizer.step()
        assert not (problem := expected.problem()), f"step {t}: {problem}"
        standing.append(inside.prepared(optimizer))
    assert standing[3] is standing[0] is not None
    assert (standing[4] is standing[3]) == (change in STAYS)


def test_what_changes_nothing_makes_nothing_anew() -> None:
    """The same gradient for two parameters, none for one, steps inside autocast, a schedule."""
    params = [torch.ones(4, 3, requires_grad=True) for _ in range(2)]
    optimizer, prepared = Adafactor(params, lr=0.1, lr_decay=None), set()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for i in range(9):
        shared = torch.full((4, 3), 1.0 + i)
        params[0].grad, params[1].grad = shared, shared if i % 3 else shared.clone()
        if i % 4 == 3:
            params[1].grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 2 == 0):
            optimizer.step()
        schedule.step()
        prepared.add(inside.prepared(optimizer))
    assert len(prepared) == 1 and None not in prepared


@pytest.mark.parametrize("turn", [torch._neg_view, Tensor.double])
def test_a_gradient_of_another_kind_is_noticed(turn: Callable[[Tensor], Tensor]) -> None:
    ends = []
    for backend in ("auto", "eager"):
        p = torch.ones(6, 4, requires_grad=True)
        optimizer = Adafactor([p], lr=0.1, backend=backend)
        for i in range(6):
            g = torch.linspace(-1, 2, 24).view(6, 4) + i
            p.grad = torch.zeros_like(p)
            p.grad.data = turn(g) if i == 4 else g
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # that it is left to eager PyTorch
                optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
