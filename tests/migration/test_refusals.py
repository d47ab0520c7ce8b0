"""What is not converted is said by name, and what differs is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import adafactor
from tests.migration.peers import Shapes, moved_apart, notes, original, parameters, steps

StateDict = dict[str, Any]


def saved(shapes: Shapes = [(4, 3), (5,)]) -> StateDict:  # noqa: B006
    """A small state dict of torch's."""
    params = parameters(shapes)
    theirs = torch.optim.Adafactor([(f"p{i}", p) for i, p in enumerate(params)])
    steps(theirs, params, range(2))
    return copy.deepcopy(theirs.state_dict())


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        ("torch", {}, "while gradients have an RMS of 3.4e-4 (0.09 in bfloat16) or more"),
        ("torch", {"eps": (1e-8, 1e-3)}, "while gradients have an RMS of 0.0001 or more"),
        ("adamw", {}, "single weights of matrices take others"),
        ("adamw", {"amsgrad": True}, "amsgrad of Adam or AdamW has no counterpart"),
    ],
)
def test_what_differs_is_said(source: str, arguments: dict[str, Any], words: str) -> None:
    params = parameters([(4, 3)])
    theirs = original(source)(params, **arguments)
    steps(theirs, params, range(2))
    for move in (
        lambda: adafactor.like(source, params, **arguments),
        lambda: adafactor.migrate(theirs.state_dict(), source),
    ):
        with notes() as told:
            move()
        assert any(words in note for note in told)


def test_torchs_eps1_makes_the_difference_that_is_said_and_none_above() -> None:
    """Float32's ε₁ in float64, so that nothing but ε₁ drives the two apart."""
    eps = {"eps": (torch.finfo(torch.float32).eps, 1e-3)}
    with notes():
        large, small = (moved_apart("torch", [(24, 18)], eps, rms=rms) for rms in (1e-2, 1e-6))
    assert large < 1e-9 and small > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("state"), "needs 'state' and 'param_groups'"),
        (lambda s: s["param_groups"][0].pop("params"), "group 0 of the state dict has no list 'params'"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "in two groups"),
        (lambda s: s["state"].update({9: {}}), "state for parameter 9, which is in no group"),
        (lambda s: s["state"].update({0: 3}), "the state of p0 is int, not a dict"),
        (lambda s: s["state"][0].pop("col_var"), "p0 has no 'col_var'; it has 'step', 'row_var'"),
        (lambda s: s["state"][1].pop("step"), "'step' of p1 is None, not a number of steps"),
        (
            lambda s: s["state"][0]["row_var"][2].fill_(float("inf")),
            "'row_var' of p0 has elements that are .* infinite",
        ),
        (lambda s: s["state"][1]["variance"][0].fill_(-1.0), "'variance' of p1 has elements that are negative"),
        (lambda s: s["state"][1].update(variance=[1.0]), r"'variance' of p1 is \[1.0\], not a floating-point tensor"),
        (lambda s: s["state"][0].update(row_var=torch.ones(4)), "of p0 are"),
        (lambda s: s["state"][0]["col_var"].mul_(2), "the row and column statistics of p0 have the means"),
        (lambda s: s["param_groups"][0].update(beta2_decay=0.0), "decay_rate=-0.0 must be"),
        (lambda s: s["param_groups"][0].update(param_names=["p0"]), "'param_names' that are not a name for each"),
        (lambda s: s["param_groups"][0].update(param_names=["p0", "q"]), "the state dict lacks 'p1'"),
    ],
)
def test_a_damaged_state_dict_is_refused_by_name(change: Callable[[StateDict], Any], message: str) -> None:
    damaged = saved()
    change(damaged)
    with pytest.raises(ValueError, match=message):
        adafactor.migrate(damaged, "torch", params={"p0": (4, 3), "p1": (5,)})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"p0": (4, 3), "p1": (5,), "p2": (1,)}, "the state dict lacks 'p2'"),
        ({"p0": (3, 4), "p1": (5,)}, r"p0 has the shape \(3, 4\), its state is of the shape \(4, 3\)"),
        ([torch.ones(4, 3)], "the state dict has 2 parameters, params has 1"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adafactor.migrate(saved(), "torch", params=params)


def test_one_peers_state_is_not_taken_for_anothers() -> None:
    with pytest.raises(ValueError, match="the state of torch.optim.Adafactor .*'beta2_decay', 'd'.*source is 'torch'"):
        adafactor.migrate(saved(), "transformers")
    nameless = saved()
    nameless["param_groups"] = [{"params": [0, 1]}]
    with pytest.raises(ValueError, match="neither 'exp_avg_sq_row' nor 'exp_avg_sq'; it has 'step', 'row_var'"):
        adafactor.migrate(nameless, "transformers")


def test_whose_a_state_is_must_be_said_where_its_keys_do_not_tell() -> None:
    sgd = [{"params": [0], "momentum": 0.9, "nesterov": True}]
    timm = [
        {"params": [0], "eps": 1e-30, "eps_scale": 1e-3, "clip_threshold": 1.0, "scale_parameter": True, "lr": None}
    ]
    nadam = torch.optim.NAdam(parameters([(2, 2)])).state_dict()["param_groups"]
    for groups, named in ((sgd, "'momentum', 'nesterov'"), (timm, "'eps', 'eps_scale'"), (nadam, "'momentum_decay'")):
        with pytest.raises(ValueError, match=f"cannot be told whose state this is, which has .*{named}"):
            adafactor.migrate({"state": {}, "param_groups": groups})
    others: tuple[Any, ...] = ([], 3, {"weight": torch.ones(2)}, {"state": {}, "param_groups": [3]})
    for other in others:
        with pytest.raises(ValueError, match="cannot be told whose state this is"):
            adafactor.migrate(other)


def test_an_old_state_that_may_be_adams_or_adamws_says_so() -> None:
    params = parameters([(3,)])
    theirs = torch.optim.AdamW(params)
    steps(theirs, params, range(2))
    old = theirs.state_dict()
    del old["param_groups"][0]["decoupled_weight_decay"]
    for arguments, said in (({}, "taken as AdamW's"), ({"decoupled_weight_decay": False}, "no counterpart")):
        with notes() as told:
            moved = adafactor.migrate(old, arguments=arguments)
        assert said in told[1] and bool(moved["param_groups"][0]["weight_decay"]) == (not arguments)


def test_unknown_names_and_arguments_are_refused() -> None:
    p = [torch.ones(2, requires_grad=True)]
    for call, message in (
        (lambda: adafactor.migrate(saved(), "keras"), "source='keras' must be one of 'torch'"),
        (lambda: adafactor.migrate(saved(), "torch", "adamw"), "target='adamw' must be one of"),
        (lambda: adafactor.migrate(saved(), "torch", "torch"), "nothing to convert"),
        (
            lambda: adafactor.migrate(saved(), "torch", arguments={"d": 2.0}),
            "d=2.0 is given, but the state dict has 1.0",
        ),
        (lambda: adafactor.like("transformers", p, momentum=0.9), "has no argument 'momentum'; it has lr, .*eps"),
        (lambda: adafactor.like("transformers", p, lr=1e-3), "only with relative_step=False"),
        (lambda: adafactor.like("transformers", p, relative_step=False), "lr=None with relative_step=False"),
        (lambda: adafactor.like("transformers", p, eps=(0.0, 1e-3)), r"eps\[0\]=0.0 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_keyword_of_ours_in_a_group_of_theirs_is_refused_as_elsewhere() -> None:
    group = {"params": parameters([(4, 3)]), "rounding": "stochastic"}
    with pytest.raises(ValueError, match="transformers' Adafactor has no argument 'rounding'"):
        adafactor.like("transformers", [group], lr=1e-3, relative_step=False)
