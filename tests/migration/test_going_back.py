"""Ours back to torch and to transformers, and what these cannot take."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import adafactor
from adafactor import Adafactor
from adafactor.core.settings import Settings
from adafactor.migration.peer import translate
from adafactor.migration.peers import PEERS
from tests.migration.peers import AFTER, BEFORE, SAME, SHAPES, Shapes, apart, notes, original, parameters, steps

SLOW = pytest.mark.slow
LAST_TWO = {"axes": (-2, -1)}
TARGETS = ["torch", "transformers"]


def trained(keywords: dict[str, Any], shapes: Shapes, dtype: torch.dtype) -> tuple[Adafactor, list[torch.Tensor]]:
    params = parameters(shapes, dtype=dtype)
    ours = Adafactor(params, **keywords)
    steps(ours, params, range(BEFORE))
    return ours, params


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("target", "keywords"),
    [
        ("torch", {"lr": 0.3, "weight_decay": 0.1, "weight_decay_by": "lr"}),
        ("torch", {"lr": 0.1, "clip": None, "decay_rate": 0.6, "maximize": True}),
        pytest.param("transformers", {"beta1": 0.9}, marks=SLOW),
        pytest.param("transformers", {"weight_decay": 0.1, "weight_decay_by": "alpha"}, marks=SLOW),
        pytest.param("transformers", {"lr": 1e-3, "lr_decay": None, "clip": 0.5}, marks=SLOW),
        pytest.param(
            "transformers", {"lr": 1e-3, "lr_decay": None, "relative": False, "weight_decay": 0.1}, marks=SLOW
        ),
    ],
    ids=str,
)
def test_the_other_takes_our_steps(target: str, keywords: dict[str, Any], dtype: torch.dtype) -> None:
    ours, params = trained({**keywords, **LAST_TWO}, SHAPES, dtype)
    theirs_params = [p.detach().clone().requires_grad_() for p in params]
    start = [p.detach().clone() for p in params]
    theirs = original(target)(theirs_params)
    theirs.load_state_dict(adafactor.migrate(ours.state_dict(), "adafactor", target, params=params))
    steps(ours, params, range(BEFORE, BEFORE + AFTER))
    steps(theirs, theirs_params, range(BEFORE, BEFORE + AFTER))
    assert apart(theirs_params, params, start) < SAME[dtype]


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.parametrize("target", TARGETS)
def test_there_and_back_again_is_the_same_state(target: str) -> None:
    by = PEERS[target].fixed["weight_decay_by"]
    ours, _ = trained({**LAST_TWO, "weight_decay": 0.1, "weight_decay_by": by}, SHAPES, torch.float32)
    saved = ours.state_dict()
    there = adafactor.migrate(saved, "adafactor", target)
    back = adafactor.migrate(there, target)
    assert {k: v for k, v in back["param_groups"][0].items()} == saved["param_groups"][0]
    for key, state in saved["state"].items():
        assert back["state"][key].keys() == state.keys()
        assert all(torch.allclose(value, back["state"][key][name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("target", "keywords", "message"),
    [
        ("torch", {"beta1": 0.9}, "beta1=0.9"),
        ("torch", {"relative": False, "beta2": 0.99}, r"nothing like relative=False, beta2=0\.99$"),
        ("transformers", {"factored": "row"}, "factored='row'"),
        ("transformers", {"beta1": 0.9, "momentum_of": "gradient"}, "momentum_of='gradient'"),
        ("transformers", {"weight_decay": 0.1}, "weight_decay_by='rho'"),
        ("transformers", {"beta1": 0.9, "momentum_dtype": "int8"}, "momentum_dtype='int8'"),
        ("transformers", {"lr": 0.1}, "nothing like lr=0.1 with lr_decay='rsqrt'"),
        *((target, {"rounding": "kahan"}, "nothing like rounding='kahan'") for target in TARGETS),
        *((target, {"rounding": "stochastic", "seed": 3}, "rounding='stochastic', seed=3") for target in TARGETS),
    ],
)
def test_keywords_without_a_counterpart_are_refused(target: str, keywords: dict[str, Any], message: str) -> None:
    ours, _ = trained(keywords, [(4, 3)], torch.float32)
    with pytest.raises(ValueError, match=message):
        adafactor.migrate(ours.state_dict(), "adafactor", target)


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_bad_gradient_does_there_is_said_unless_it_does_the_same_here(target: str) -> None:
    with notes() as told:
        adafactor.migrate(trained({}, [(4, 3)], torch.float32)[0].state_dict(), "adafactor", target)
    assert any("steps with NaN and infinite gradients too" in note for note in told)
    _, said = translate(Settings(on_nonfinite="ignore", seed=3), PEERS[target])  # a seed is of stochastic rounding
    assert not any("NaN" in note for note in said)


@pytest.mark.parametrize(("eps1", "bound"), [(1e-30, "1e-08"), (1e-8, "0.29")])
def test_how_small_gradients_may_be_follows_from_the_eps1_that_is_given_up(eps1: float, bound: str) -> None:
    _, said = translate(Settings(eps=(eps1, 1e-3)), PEERS["torch"])
    assert any(f"while gradients have an RMS of {bound} or more" in note for note in said)


@pytest.mark.parametrize("target", TARGETS)
def test_a_keyword_that_is_yet_to_come_is_refused_and_not_dropped(target: str) -> None:
    cap = dataclasses.field(default=1.0, metadata={"check": lambda _, value: value, "rate": False})
    wider = dataclasses.make_dataclass("Wider", [("cap", float, cap)], bases=(Settings,), frozen=True)
    translate(wider(), PEERS[target])
    with pytest.raises(ValueError, match=rf"{PEERS[target].name} has nothing like cap=0\.5"):
        translate(wider(cap=0.5), PEERS[target])


def test_a_tensor_factored_over_other_axes_is_refused_by_name() -> None:
    conv = torch.ones(8, 6, 3, 3, requires_grad=True)
    saved = Adafactor([("conv", conv)]).state_dict()
    for params in (None, [("conv", conv)]):
        with pytest.raises(ValueError, match=r"conv of shape \(8, 6, 3, 3\) is factored over .* the last two axes"):
            adafactor.migrate(saved, "adafactor", "torch", params=params)
    reversed_axes = Adafactor([("conv", conv)], axes=(-1, -2)).state_dict()
    with notes():
        state = adafactor.migrate(reversed_axes, "adafactor", "torch")["state"][0]
    assert state["row_var"].shape == (8, 6, 3, 1) and state["col_var"].shape == (8, 6, 1, 3)


def test_a_foreign_state_dict_is_not_taken_for_ours() -> None:
    adam = torch.optim.Adam([torch.ones(2, requires_grad=True)])
    with pytest.raises(ValueError, match="the state of Adam or AdamW .* not of adafactor.Adafactor"):
        adafactor.migrate(copy.deepcopy(adam.state_dict()), "adafactor", "torch")


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_a_group_without_parameters_gets_no_names() -> None:
    """Torch would refuse to add a group to some with names and some without."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": parameters([(4, 3)])}]
    ours = Adafactor(groups)
    converted = adafactor.migrate(ours.state_dict(), "adafactor", "transformers")
    assert not any("param_names" in group for group in converted["param_groups"])
