"""`adafactor.hf.Adafactor` takes transformers' arguments and takes transformers' steps; ours may be given besides."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adafactor
from adafactor import Adafactor, hf
from adafactor.core.settings import Settings
from adafactor.migration.peers import TRANSFORMERS

ABSOLUTE = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"warmup_init": True},
    {"scale_parameter": False, "beta1": 0.9},
    ABSOLUTE,
    {**ABSOLUTE, "weight_decay": 0.1, "clip_threshold": 0.5, "decay_rate": -0.7, "eps": (1e-20, 1e-2)},
    {"lr": 1e-2, "relative_step": False, "warmup_init": False},
    {"weight_decay": 0.1, "beta1": 0.9},
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def taken(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> list[Tensor]:
    """The weights after these steps."""
    for number in steps:
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 3e-7


def test_the_arguments_and_their_defaults_are_those_of_transformers() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    theirs = list(inspect.signature(optimization.Adafactor).parameters.values())
    ours = list(inspect.signature(hf.Adafactor).parameters.values())[: len(theirs)]
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]
    assert {p.name: p.default for p in theirs[1:]} == TRANSFORMERS.defaults


def test_every_keyword_of_ours_is_there_too_or_has_a_word_of_theirs() -> None:
    """Also one that does not exist yet: nothing here or there lists them."""
    ours = set(inspect.signature(Adafactor).parameters)
    assert ours - set(inspect.signature(hf.Adafactor).parameters) == set(hf.THEIR_WORD)
    given = {"rounding": "stochastic", "seed": 3, "on_nonfinite": "raise", "axes": None, "maximize": "true"}
    optimizer = hf.Adafactor([{"params": net().parameters(), "seed": 4}], **ABSOLUTE, **given, backend="eager")
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in given} == {**given, "seed": 4, "maximize": True}
    assert optimizer.backend == "eager" and Settings.of(group).lr == 1e-3


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_the_steps_are_those_of_transformers_and_go_on_from_its_state(arguments: dict[str, Any]) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    their_model, our_model = net(), net()
    theirs, ours = (
        c(m.parameters(), **arguments) for c, m in ((optimization.Adafactor, their_model), (hf.Adafactor, our_model))
    )
    assert_close(taken(our_model, ours, range(5)), taken(their_model, theirs, range(5)))
    fresh = hf.Adafactor(our_model.parameters(), **arguments)
    fresh.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert_close(taken(our_model, fresh, range(5, 9)), taken(their_model, theirs, range(5, 9)))


@pytest.mark.filterwarnings("ignore:the state dict has another `momentum_dtype`:RuntimeWarning")
def test_a_state_of_transformers_leaves_the_keywords_that_it_does_not_have() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    model = net()
    theirs = optimization.Adafactor(model.parameters(), **{**ABSOLUTE, "lr": 1e-4}, beta1=0.9)
    taken(model, theirs, range(2))
    own: dict[str, Any] = {"rounding": "kahan", "seed": 3, "momentum_dtype": "bfloat16"}
    ours = hf.Adafactor(model.bfloat16().parameters(), **ABSOLUTE, beta1=0.9, **own)
    ours.load_state_dict(theirs.state_dict())
    group = ours.param_groups[0]
    assert {name: group[name] for name in own} == own and group["lr"] == 1e-4
    assert all("compensation" in state for state in ours.state.values())
    assert {state["momentum_of_update"].dtype for state in ours.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("arguments", [each for each in ARGUMENTS if "warmup_init" not in each], ids=str)
def test_it_is_like_transformers(arguments: dict[str, Any]) -> None:
    """But for warm-up, which `like` leaves to a scheduler."""
    ours, like = (
        hf.Adafactor(net().parameters(), **arguments),
        adafactor.like("transformers", net().parameters(), **arguments),
    )
    for a, b in zip(ours.param_groups, like.param_groups, strict=True):
        assert Settings.of(a) == Settings.of(b)


@pytest.mark.parametrize("arguments", [{}, {"warmup_init": True}], ids=str)
def test_no_scheduler_changes_relative_steps(arguments: dict[str, Any]) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    their_model, our_model, plain = net(), net(), net()
    theirs = optimization.Adafactor(their_model.parameters(), **arguments)
    ours = hf.Adafactor(our_model.parameters(), **arguments)
    expected = taken(their_model, theirs, range(5), optimization.AdafactorSchedule(theirs, 1.0))
    assert_close(taken(our_model, ours, range(5), optimization.AdafactorSchedule(ours, 1.0)), expected)
    decaying = hf.Adafactor(plain.parameters(), **arguments)
    assert_close(taken(plain, decaying, range(5), torch.optim.lr_scheduler.ExponentialLR(decaying, 0.1)), expected)


@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_warm_up_goes_on_after_a_checkpoint(way: str) -> None:
    whole, halves = net(), net()
    expected = taken(whole, hf.Adafactor(whole.parameters(), warmup_init=True), range(6))
    first = hf.Adafactor(halves.parameters(), warmup_init=True)
    taken(halves, first, range(3))
    if way == "state_dict":
        second = hf.Adafactor(halves.parameters(), warmup_init=True)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    else:
        halves, second = pickle.loads(pickle.dumps((halves, first)))
        second.add_param_group({"params": [nn.Parameter(torch.ones(2))], "decay_rate": -0.5})
        assert second.param_groups[-1]["decay_rate"] == 0.5
    assert all(map(torch.equal, taken(halves, second, range(3, 6)), expected))


def test_warm_up_goes_on_inside_backward_but_cannot_be_counted_where_parameters_step_alone() -> None:
    ordinary, inside = net(), net()
    expected = taken(ordinary, hf.Adafactor(ordinary.parameters(), warmup_init=True), range(4))
    optimizer = hf.Adafactor(inside.parameters(), warmup_init=True)
    with adafactor.step_in_backward(inside, optimizer):
        assert all(map(torch.equal, taken(inside, optimizer, range(4)), expected))
    with pytest.raises(ValueError, match="counts the calls of step"):
        optimizer.step_param(next(inside.parameters()))


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"relative": False}, TypeError, "has transformers' word for 'relative': scale_parameter"),
        ({"lr": 1e-3}, ValueError, "takes lr=0.001 only with relative_step=False"),
        ({"relative_step": False}, ValueError, "lr=None with relative_step=False"),
        ({"warmup_init": True, "relative_step": False, "lr": 1e-3}, ValueError, "needs relative_step=True"),
        ({"decay_rate": 0.8}, ValueError, "decay_rate=0.8 must be below 0"),
        ({"betas": (0.9, 0.99)}, TypeError, "here it is beta1 and beta2"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        hf.Adafactor(net().parameters(), **arguments)
