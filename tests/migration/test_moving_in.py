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
    {"weight_decay": 0.1},
    {"maximize": True, "foreach": True},
]
TRANSFORMERS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-2, "relative_step": False},
    {**ABSOLUTE, "beta1": 0.9, "weight_decay": 0.1},
    {"scale_parameter": False, "beta1": 0.9, "clip_threshold": 0.5},
    {"beta1": 0.0, "decay_rate": -0.6, "eps": (1e-20, 1e-2)},
]
TIMM: list[dict[str, Any]] = [
    {},
    {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1},
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


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("source", "shapes", "arguments"),
    [
        pytest.param(*case, id=f"{case[0]} {case[2]}", marks=[] if case[0] == "torch" else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_both_take_the_same_steps(source: str, shapes: Shapes, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    given = {**arguments, **(FLOAT32 if dtype == torch.float32 and "momentum_dtype" in arguments else {})}
    unsaved = {key: given[key] for key in UNSAVED if key in given} if source == "pytorch_optimizer" else None
    assert moved_apart(source, shapes, given, unsaved=unsaved, dtype=dtype) < SAME[dtype]


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


@pytest.mark.slow
def test_a_warm_up_goes_on_as_a_schedule() -> None:
    def schedule(optimizer: torch.optim.Optimizer, t: int) -> Any:
        return adafactor.schedules.warmup(optimizer, last_epoch=t - 1)

    arguments = {"warmup_init": True, "beta1": 0.9}
    with notes() as told:
        assert moved_apart("transformers", SHAPES, arguments, scheduler=schedule) < SAME[torch.float64]
    assert f"warmup(optimizer, last_epoch={BEFORE - 1})" in told[1]


@pytest.mark.slow
def test_past_the_cap_of_beta2_the_constant_takes_over() -> None:
    # a cap of 0.1 is reached at the second step, and 0.1⁷ is below the rounding of float32
    arguments = {"beta2_cap": 0.1, "momentum": None, "lr": 1e-2}
    with notes() as told:
        assert moved_apart("timm_bv", CONVOLUTIONS, arguments) < 1e-6
    assert len(told) == 1 and "stops rising at 0.1" in told[0]  # from `like`, which starts before the cap


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
    for group in ours.param_groups[1:] if source == "transformers" else []:
        group["weight_decay"] = 0.0  # theirs is multiplied by α
    for group in theirs.param_groups[1:] if source == "transformers" else []:
        group["weight_decay"] = 0.0
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
