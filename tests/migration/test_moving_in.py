"""Train with the original, move in, go on with both: the same steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import adafactor
from tests.migration.peers import (
    BEFORE,
    CONVOLUTIONS,
    SAME,
    SHAPES,
    Shapes,
    moved_apart,
    notes,
    original,
    parameters,
    steps,
)

FLOAT32 = {"momentum_dtype": torch.float32}
EXACT = {"momentum_dtype": torch.float64}
ABSOLUTE = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}

TORCH: list[dict[str, Any]] = [
    {},
    {"lr": 0.1},
    {"lr": 0.03, "beta2_decay": -0.5, "d": 2.0, "eps": (1e-12, 1e-2)},
    {"lr": 0.3, "weight_decay": 0.1},  # above 1/√t from step 12 on
    {"maximize": True, "foreach": True},
]
TRANSFORMERS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-2, "relative_step": False},
    {**ABSOLUTE, "beta1": 0.9, "weight_decay": 0.1},
    {"scale_parameter": False, "beta1": 0.9, "clip_threshold": 0.5},
    {"beta1": 0.0, "decay_rate": -0.6, "eps": (1e-20, 1e-2)},
    {"beta1": 0.9, "weight_decay": 0.1},
]
TIMM: list[dict[str, Any]] = [
    {},
    {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1},
    {"weight_decay": 0.1},
    {"min_dim_size_to_factor": 1},
    {"min_dim_size_to_factor": 1000, "scale_parameter": False, "eps": 1e-20, "eps_scale": 1e-2},
]
TIMM_BV: list[dict[str, Any]] = [
    {"momentum": None},
    {**EXACT, "lr": 1e-2, "clipping_threshold": 1.0, "weight_decay": 0.1},
    {**EXACT, "lr": 1e-2, "weight_decay": 1e-3, "unscaled_wd": True, "min_dim_size_to_factor": 2},
]
PYTORCH_OPTIMIZER: list[dict[str, Any]] = [
    {"betas": (None, 0.999)},
    EXACT,
    {**EXACT, "foreach": False, "clip_threshold": 0.5, "maximize": True},
    {**EXACT, **ABSOLUTE, "weight_decay": 0.1},
    {**EXACT, "weight_decay": 0.1},
    {**EXACT, "weight_decay": 1e-3, "fixed_decay": True},
]
CASES = [
    *(("torch", SHAPES, arguments) for arguments in TORCH),
    *(("transformers", SHAPES, arguments) for arguments in TRANSFORMERS),
    *(("timm", CONVOLUTIONS, arguments) for arguments in TIMM),
    *(("timm_bv", CONVOLUTIONS, arguments) for arguments in TIMM_BV),
    *(("pytorch_optimizer", SHAPES, arguments) for arguments in PYTORCH_OPTIMIZER),
]
UNSAVED = ("clip_threshold", "momentum_dtype", "maximize", "decay_rate")
TOLD = pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")  # of others, a warning is an error
SLOW = [pytest.mark.slow]
# ε₁ of torch, and what pytorch_optimizer's state dicts do not say
MARKS: dict[str, list[pytest.MarkDecorator]] = {"torch": [TOLD], "pytorch_optimizer": [TOLD, *SLOW]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("source", "shapes", "arguments"),
    [pytest.param(*case, id=f"{case[0]} {case[2]}", marks=MARKS.get(case[0], SLOW)) for case in CASES],
)
def test_both_take_the_same_steps(source: str, shapes: Shapes, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    given = {**arguments, **(FLOAT32 if dtype == torch.float32 and "momentum_dtype" in arguments else {})}
    unsaved = {key: given[key] for key in UNSAVED if key in given} if source == "pytorch_optimizer" else None
    assert moved_apart(source, shapes, given, unsaved=unsaved, dtype=dtype) < SAME[dtype]


UNSCALED = {"weight_decay": 1e-2, "unscaled_wd": True}
SCHEDULED: list[tuple[str, dict[str, Any]]] = [
    ("torch", {"lr": 1e-2, "weight_decay": 0.1}),
    ("timm", {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1}),
    ("timm_bv", {**EXACT, "lr": 1e-2}),
    ("timm_bv", {**EXACT, **UNSCALED, "lr": 1e-2}),
    ("timm_bv", {**EXACT, **UNSCALED, "lr": 1e-2, "corrected_weight_decay": True}),
    ("timm_bv", {**EXACT, "lr": 1e-2, "weight_decay": 0.1, "corrected_weight_decay": True}),
    ("pytorch_optimizer", {**EXACT, **ABSOLUTE, "weight_decay": 1e-3, "fixed_decay": True}),
]


@pytest.mark.parametrize(
    ("source", "arguments"),
    [pytest.param(*case, id=f"{case[0]} {case[1]}", marks=MARKS.get(case[0], SLOW)) for case in SCHEDULED],
)
def test_both_take_the_same_steps_when_lr_changes(source: str, arguments: dict[str, Any]) -> None:
    unsaved = EXACT if source == "pytorch_optimizer" else {"lr": arguments["lr"]}
    assert moved_apart(source, CONVOLUTIONS, arguments, unsaved=unsaved, lr_after=5e-3) < SAME[torch.float64]


@pytest.mark.slow
def test_the_lr_that_a_corrected_decay_divides_by_is_that_of_the_optimizer_or_is_asked_for() -> None:
    params = parameters([(24, 18), (5,)])
    groups = [{"params": params[:1], "lr": 1e-3}, {"params": params[1:]}]
    arguments = {"lr": 1e-2, "momentum": None, "weight_decay": 0.1, "corrected_weight_decay": True}
    ours = adafactor.like("timm_bv", groups, **arguments)
    assert [(g["lr"], g["weight_decay_by"]) for g in ours.param_groups] == [(1e-3, 1e-2), (1e-2, 1e-2)]
    ours = adafactor.like("timm_bv", parameters([(5,)]), **{**arguments, "lr": torch.tensor(0.5)})
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["weight_decay_by"]) == (0.5, 0.5)
    theirs = original("timm_bv")(params, **arguments)
    torch.optim.lr_scheduler.ConstantLR(theirs, 0.5)
    with notes() as told:
        moved = adafactor.migrate(theirs.state_dict(), "timm_bv")
    assert "do not hold the lr that it was made with" in told[0] and "taken as 0.01" in told[0]
    assert (moved["param_groups"][0]["lr"], moved["param_groups"][0]["weight_decay_by"]) == (5e-3, 1e-2)


@TOLD
@pytest.mark.slow
@pytest.mark.parametrize("source", ["timm_bv", "pytorch_optimizer"])
def test_a_momentum_in_bfloat16_moves_in_bit_for_bit(source: str) -> None:
    params = parameters(CONVOLUTIONS)
    theirs = original(source)(params)
    steps(theirs, params, range(BEFORE))
    mine = [p.detach().clone().requires_grad_() for p in params]
    ours = adafactor.like(source, mine)
    ours.load_state_dict(adafactor.migrate(theirs.state_dict(), source, params=mine))
    for p, q in zip(params, mine, strict=True):
        assert ours.state[q]["momentum"].dtype == torch.bfloat16
        assert torch.equal(ours.state[q]["momentum"], theirs.state[p]["exp_avg"])
    group = ours.param_groups[0]
    assert (group["momentum_dtype"], group["momentum_rounding"]) == ("bfloat16", "nearest")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["transformers", "timm"])
def test_bfloat16_parameters_take_the_same_steps_bit_for_bit(source: str) -> None:
    params = parameters([(24, 18), (18, 24), (9,)], dtype=torch.bfloat16)
    theirs = original(source)(params)
    steps(theirs, params, range(BEFORE))
    mine = [p.detach().clone().requires_grad_() for p in params]
    ours = adafactor.like(source, mine)
    ours.load_state_dict(adafactor.migrate(theirs.state_dict(), source, params=mine))
    for t in range(BEFORE, BEFORE + 20):
        steps(theirs, params, range(t, t + 1))
        steps(ours, mine, range(t, t + 1))
    assert all(torch.equal(p, q) for p, q in zip(params, mine, strict=True))


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
        assert "momentum" not in state and "momentum" in whole["state"][key]
        assert all(torch.equal(value, whole["state"][key][name]) for name, value in state.items())


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_a_parameter_that_adamw_never_stepped_moves_in_without_state() -> None:
    params = parameters([(4, 3), (2, 2)])
    theirs = torch.optim.AdamW(params)
    params[0].grad = torch.ones(4, 3)
    theirs.step()
    moved = adafactor.migrate(theirs.state_dict(), "adamw")
    assert list(moved["state"]) == [0] and len(moved["param_groups"]) == 1
    adafactor.Adafactor(parameters([(4, 3), (2, 2)])).load_state_dict(moved)


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("torch", {}),
        ("adamw", {}),
        pytest.param("transformers", {}, marks=pytest.mark.slow),
        pytest.param("timm", {}, marks=pytest.mark.slow),
        pytest.param("timm_bv", {}, marks=pytest.mark.slow),
        pytest.param("pytorch_optimizer", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_whose_state_it_is_is_told_from_its_keys(source: str, arguments: dict[str, Any]) -> None:
    params = parameters([(24, 18), (5,)])
    theirs = original(source)(params, **arguments)
    steps(theirs, params, range(2))
    found, told = (adafactor.migrate(theirs.state_dict(), *which) for which in ((), (source,)))
    assert found["param_groups"] == told["param_groups"]
    assert all(torch.equal(value, told["state"][0][name]) for name, value in found["state"][0].items())


@pytest.mark.slow
def test_a_warm_up_goes_on_as_a_schedule() -> None:
    def schedule(optimizer: torch.optim.Optimizer, t: int) -> Any:
        return adafactor.schedules.warmup(optimizer, last_epoch=t - 1)

    arguments = {"warmup_init": True, "beta1": 0.9}
    with notes() as told:
        assert moved_apart("transformers", SHAPES, arguments, scheduler=schedule) < SAME[torch.float64]
    assert f"warmup(optimizer, last_epoch={BEFORE - 1})" in told[1]


@pytest.mark.slow
@pytest.mark.parametrize("cap", [0.1, 0.8, 1.0])  # reached before the move, after it, and never
def test_the_cap_of_beta2_moves_in(cap: float) -> None:
    arguments = {"beta2_cap": cap, "momentum": None, "lr": 1e-2}
    assert moved_apart("timm_bv", CONVOLUTIONS, arguments) < SAME[torch.float64]  # and there is no warning


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
    for key, state in before["state"].items():
        assert all(torch.equal(value, converted["state"][key][name]) for name, value in state.items())
