"""Train with the original, move in, go on with both: the same steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import adafactor
from tests.exact import assert_same
from tests.migration.peers import BEFORE, SAME, SHAPES, Shapes, moved_apart, notes, original, parameters, steps

ABSOLUTE = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}

TORCH: list[dict[str, Any]] = [
    {},
    {"lr": 0.1},
    {"lr": 0.03, "beta2_decay": -0.5, "d": 2.0, "eps": (1e-12, 1e-2)},
    {"lr": 0.3, "weight_decay": 0.1},  # above 1/√t from step 12 on
    {"maximize": True, "foreach": True},
]
TRANSFORMERS: list[dict[str, Any]] = [
    {**ABSOLUTE, "beta1": 0.9, "weight_decay": 0.1},
    {"scale_parameter": False, "beta1": 0.9, "clip_threshold": 0.5},
    {"beta1": 0.0, "decay_rate": -0.6, "eps": (1e-20, 1e-2)},
]
CASES = [
    *(("torch", arguments) for arguments in TORCH),
    *(("transformers", arguments) for arguments in TRANSFORMERS),
]
TOLD = pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")  # of others, a warning is an error
SLOW = [pytest.mark.slow]
MARKS: dict[str, list[pytest.MarkDecorator]] = {"torch": [TOLD], "transformers": SLOW}  # ε₁ of torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("source", "arguments"),
    [pytest.param(*case, id=f"{case[0]} {case[1]}", marks=MARKS[case[0]]) for case in CASES],
)
def test_both_take_the_same_steps(source: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    assert moved_apart(source, SHAPES, arguments, dtype=dtype) < SAME[dtype]


@TOLD
def test_both_take_the_same_steps_when_lr_changes() -> None:
    arguments = {"lr": 1e-2, "weight_decay": 0.1}
    assert moved_apart("torch", SHAPES, arguments, lr_after=5e-3) < SAME[torch.float64]


ADAMW: list[dict[str, Any]] = [
    {"eps": 1e-12},
    {"eps": 1e-12, "lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1},
    {"eps": 1e-12, "maximize": True, "foreach": True},
    {"eps": 1e-12, "betas": (0.0, 0.9)},  # without momentum ours is clipped
]


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.parametrize("arguments", ADAMW, ids=str)
def test_the_means_of_adamws_second_moment_are_what_adafactor_would_have_by_now(arguments: dict[str, Any]) -> None:
    params, mine = (parameters([*SHAPES, (4, 3, 5, 5)], dtype=torch.float64) for _ in range(2))
    theirs, ours = torch.optim.AdamW(params, **arguments), adafactor.like("adamw", mine, **arguments)
    steps(theirs, params, range(BEFORE))
    steps(ours, mine, range(BEFORE))
    moved, expected = adafactor.migrate(theirs.state_dict(), "adamw"), ours.state_dict()
    assert moved["param_groups"] == expected["param_groups"]
    assert {name for state in moved["state"].values() for name in state} >= {"row", "col", "full"}
    for key, state in expected["state"].items():
        assert state.keys() == moved["state"][key].keys()
        for name, value in state.items():
            assert torch.allclose(value, moved["state"][key][name], rtol=1e-12, atol=1e-20), (key, name)


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("arguments", ADAMW[:-1], ids=str)
def test_what_is_not_factored_takes_adamws_steps(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    shapes: Shapes = [(7,), (), (5, 1), (1, 6)]
    assert moved_apart("adamw", shapes, arguments, dtype=dtype) < SAME[dtype]


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_adamws_average_of_gradients_can_be_left_behind() -> None:
    params = parameters(SHAPES)
    theirs = torch.optim.AdamW(params)
    steps(theirs, params, range(BEFORE))
    moved = adafactor.migrate(theirs.state_dict(), arguments={"betas": (0.0, 0.999), "lr": 1e-4})
    whole = adafactor.migrate(theirs.state_dict())
    assert moved["param_groups"][0]["beta1"] == 0.0 and moved["param_groups"][0]["clip"] == 1.0
    assert whole["param_groups"][0]["clip"] is None and moved["param_groups"][0]["lr"] == 1e-4
    for key, state in moved["state"].items():
        assert "momentum_of_gradient" not in state and "momentum_of_gradient" in whole["state"][key]
        assert all(torch.equal(value, whole["state"][key][name]) for name, value in state.items())


@pytest.mark.parametrize("source", ["torch", "adamw", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_whose_state_it_is_is_told_from_its_keys(source: str) -> None:
    params = parameters([(24, 18), (5,)])
    theirs = original(source)(params)
    steps(theirs, params, range(2))
    assert_same(adafactor.migrate(theirs.state_dict()), adafactor.migrate(theirs.state_dict(), source))


@pytest.mark.slow
def test_a_warm_up_goes_on_as_a_schedule() -> None:
    def schedule(optimizer: torch.optim.Optimizer, t: int) -> Any:
        return adafactor.schedules.warmup(optimizer, last_epoch=t - 1)

    arguments = {"warmup_init": True, "beta1": 0.9}
    with notes() as told:
        assert moved_apart("transformers", SHAPES, arguments, scheduler=schedule) < SAME[torch.float64]
    assert f"warmup(optimizer, last_epoch={BEFORE - 1})" in told[1]


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.parametrize("source", ["torch", pytest.param("transformers", marks=pytest.mark.slow)])
def test_groups_names_and_frozen_parameters_move_in(source: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(8, 3)).double()
    model[0].bias.requires_grad_(False)
    theirs = original(source)(_groups(model))
    _train(model, theirs, range(4))
    twin = copy.deepcopy(model)
    ours = adafactor.like(source, _groups(twin))
    assert ours.param_groups[1]["weight_decay"] == 0.1
    ours.load_state_dict(adafactor.migrate(theirs.state_dict(), source, params=_groups(twin)))
    assert ours.param_groups[1]["param_names"] == ["0.bias", "2.bias"]
    assert twin[0].bias not in ours.state
    _train(model, theirs, range(4, 24))
    _train(twin, ours, range(4, 24))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-14)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and all else with weight decay, with names."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1]},
        {"params": [(name, p) for name, p in named if p.dim() == 1], "weight_decay": 0.1},
    ]


def _train(model: nn.Module, optimizer: Any, span: range) -> None:
    for t in span:
        optimizer.zero_grad()
        data = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(t)).double()
        model(data).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_the_source_can_go_on_after_it_was_converted() -> None:
    params = [torch.ones(3, 4, requires_grad=True), torch.ones(5, requires_grad=True)]
    theirs = torch.optim.Adafactor(params)
    steps(theirs, params, range(2))
    converted = adafactor.migrate(theirs.state_dict(), "torch")
    before = copy.deepcopy(converted)
    steps(theirs, params, range(2, 4))
    assert_same(converted, before)
