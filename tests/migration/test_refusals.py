"""What is not converted is said by name; what differs is said with its size, and the size is true."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adafactor
from tests.migration.peers import (
    CONVOLUTIONS,
    Shapes,
    falling,
    moved_apart,
    notes,
    original,
    parameters,
    steps,
)

MATRICES: Shapes = [(24, 18), (18, 24), (40,)]
VECTORS: Shapes = [(7,), (), (40,)]
SLOW = pytest.mark.slow
StateDict = dict[str, Any]


def saved(shapes: Shapes = [(4, 3), (5,)]) -> StateDict:  # noqa: B006
    """A small state dict of torch's."""
    params = parameters(shapes)
    theirs = torch.optim.Adafactor([(f"p{i}", p) for i, p in enumerate(params)])
    steps(theirs, params, range(2))
    return copy.deepcopy(theirs.state_dict())


DIFFERENCES: list[tuple[str, dict[str, Any], dict[str, Any], str, float]] = [
    ("timm", {"betas": (0.9, 0.99), "caution": True}, {}, "24 %", 0.24),
    ("timm_bv", {"lr": 1e-2}, {}, "0.8 %", 0.008),
    ("timm_bv", {"lr": 1e-2, "caution": True}, {}, "24 %", 0.24),
    ("timm_bv", {"lr": 1e-2, "momentum_dtype": torch.float16}, {}, "0.07 %", 0.0007),
    ("pytorch_optimizer", {}, {}, "0.8 %", 0.008),
    ("pytorch_optimizer", {"cautious": True}, {}, "22 %", 0.22),
    ("pytorch_optimizer", {"ams_bound": True}, {}, "114 %", 1.14),
    ("pytorch_optimizer", {"weight_decouple": False, "weight_decay": 0.01}, {}, "9 %", 0.09),
    ("pytorch_optimizer", {"weight_decouple": False, "weight_decay": 0.01}, {"rms": 0.01}, "81 %", 0.81),
    ("adamw", {"weight_decay": 0.01}, {"make": torch.optim.Adam}, "3 %", 0.03),
    ("adamw", {"weight_decay": 0.01}, {"make": torch.optim.Adam, "rms": 0.01}, "106 %", 1.06),
    ("adamw", {"amsgrad": True, "betas": (0.9, 0.95)}, {}, "6 %", 0.06),
]


@pytest.mark.parametrize(
    ("source", "arguments", "run", "words", "size"),
    [pytest.param(*d, marks=[] if d[0] == "adamw" else [SLOW], id=f"{d[0]} {d[1]} {d[3]}") for d in DIFFERENCES],
)
def test_the_difference_is_as_large_as_it_is_said_to_be(
    source: str, arguments: dict[str, Any], run: dict[str, Any], words: str, size: float
) -> None:
    shapes = VECTORS if source == "adamw" else MATRICES  # its matrices are factored, which alone takes them apart
    with notes() as told:
        distance = moved_apart(source, shapes, arguments, after=20, **run)
    assert any(words in note for note in told)
    assert size / 2 < distance < 2 * size


# float32's ε₁ in float64, so that nothing but ε₁ drives the two apart
FLOAT32 = {"eps": (torch.finfo(torch.float32).eps, 1e-3)}


@pytest.mark.parametrize(
    ("shapes", "rms", "words", "low", "high"),
    [
        (MATRICES[:2], 1e-1, "the same to rounding while gradients have an RMS of 0.00035 or more", 0.0, 1e-9),
        (MATRICES[:2], 2e-4, "2 to 32 %", 0.02, 0.32),
        (MATRICES[:2], 1e-6, "70 to 93 % below 1e-5", 0.70, 0.93),
        ([(8, 6, 3, 3)], 2e-4, "50 to 150 % in convolutions", 0.5, 1.5),
    ],
)
def test_the_difference_that_torchs_eps1_makes_is_as_large_as_it_is_said_to_be(
    shapes: Shapes, rms: float, words: str, low: float, high: float
) -> None:
    with notes() as told:
        distance = moved_apart("torch", shapes, FLOAT32, after=20, rms=rms, kind=falling)
    assert words in told[0] and low <= distance < high


def test_below_the_root_of_eps1_torch_drives_an_update_up_to_d_and_ours_keeps_its_rms() -> None:
    (theirs_x,) = parameters([(24, 18)], dtype=torch.float64)
    theirs = torch.optim.Adafactor([theirs_x], **FLOAT32)  # type: ignore[arg-type]
    steps(theirs, [theirs_x], range(7), 2e-4, falling)
    before, mine = theirs_x.detach().clone(), theirs_x.detach().clone().requires_grad_()
    with notes():
        ours = adafactor.like("torch", [mine], **FLOAT32)
        ours.load_state_dict(adafactor.migrate(theirs.state_dict(), "torch"))
    steps(theirs, [theirs_x], range(7, 8), 2e-4, falling)
    steps(ours, [mine], range(7, 8), 2e-4, falling)
    size, mean = ours.report()[0].rms_update, float(ours.state[mine]["row"].mean())
    raised = min(1.0, size * (FLOAT32["eps"][0] / mean) ** 0.5)
    assert size < 0.95 and raised == 1.0
    assert torch.allclose(theirs_x - before, (mine - before) * raised / size, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("state"), "needs 'state' and 'param_groups'"),
        (lambda s: s.update(param_groups=3), "'param_groups' a list"),
        (lambda s: s["param_groups"][0].pop("params"), "group 0 of the state dict has no list 'params'"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "in two groups"),
        (lambda s: s["state"].update({9: {}}), "state for parameter 9, which is in no group"),
        (lambda s: s["state"].update({0: 3}), "the state of p0 is int, not a dict"),
        (lambda s: s["state"][0].pop("col_var"), "p0 has no 'col_var'; it has 'step', 'row_var'"),
        (lambda s: s["state"][1].pop("variance"), "p1 has neither 'row_var' nor 'variance'"),
        (lambda s: s["state"][1].pop("step"), "'step' of p1 is None, not a number of steps"),
        (lambda s: s["state"][1].update(step=-1), "'step' of p1 is -1"),
        (lambda s: s["state"][1].update(variance=[1.0]), r"'variance' of p1 is \[1.0\], not a floating-point tensor"),
        (lambda s: s["state"][0].update(row_var=torch.ones(4)), "of p0 are"),
        (lambda s: s["state"][0].update(row_var=torch.ones(3, 1)), "p0 has the shape"),
        (lambda s: s["state"][0]["col_var"].mul_(2), "the row and column statistics of p0 have the means"),
        (lambda s: s["param_groups"][0].update(beta2_decay=0.0), "decay_rate=-0.0 must be"),
        (lambda s: s["param_groups"][0].update(param_names=["p0"]), "another number of 'param_names'"),
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
        ({"p0": (4, 3)}, "params lacks 'p1'"),
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
    for groups, message in (
        (
            [{"params": [0], "momentum": 0.9, "nesterov": True}],
            "cannot be told .* has 'params', 'momentum', 'nesterov'",
        ),
        (torch.optim.NAdam(parameters([(2, 2)])).state_dict()["param_groups"], "cannot be told .*'momentum_decay'"),
        ([{"params": [0], "clip_threshold": 1.0, "scale_parameter": True, "beta1": None}], "fairseq's .*: say which"),
    ):
        with pytest.raises(ValueError, match=message):
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
        (lambda: adafactor.migrate(saved(), "torch", "timm"), "target='timm' must be one of"),
        (lambda: adafactor.migrate(saved(), "torch", "torch"), "nothing to convert"),
        (
            lambda: adafactor.migrate(saved(), "torch", arguments={"d": 2.0}),
            "d=2.0 is given, but the state dict has 1.0",
        ),
        (lambda: adafactor.like("transformers", p, momentum=0.9), "has no argument 'momentum'; it has lr, .*eps"),
        (lambda: adafactor.like("transformers", p, lr=1e-3), "only with relative_step=False"),
        (lambda: adafactor.like("transformers", p, relative_step=False), "lr=None with relative_step=False"),
        (lambda: adafactor.like("timm", p, lr=1e-3, warmup_init=True), "only without lr"),
        (lambda: adafactor.like("optax", p, learning_rate=lambda t: t), "is a schedule"),
        (lambda: adafactor.like("transformers", p, eps=(0.0, 1e-3)), r"eps\[0\]=0.0 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_small_axes_are_not_factored_and_axes_that_we_would_not_choose_get_a_group_of_their_own() -> None:
    params: list[Tensor] = parameters(CONVOLUTIONS)
    ours = adafactor.like("timm", params)
    kinds = {
        (group["axes"], group["min_factored"]): [tuple(p.shape) for p in group["params"]] for group in ours.param_groups
    }
    assert kinds == {
        (None, 17): [shape for shape in CONVOLUTIONS if shape != (20, 20, 20)],
        ((0, 1), 0): [(20, 20, 20)],
    }
    unfactored = [tuple(p.shape) for p in params if "full" in ours.state[p]]
    assert unfactored == [(8, 30), (9,), (16, 16), (2, 20, 1)]


@SLOW
@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_a_parameter_without_state_needs_its_shape_where_shapes_decide() -> None:
    params = parameters([(20, 20), (4, 4)])
    theirs = original("timm")(params)
    params[0].grad = torch.ones(20, 20)
    theirs.step()
    with pytest.raises(ValueError, match="parameter 1 has no state, so that its shape is unknown: pass params"):
        adafactor.migrate(theirs.state_dict(), "timm")
    moved = adafactor.migrate(theirs.state_dict(), "timm", params=params)
    assert [group["min_factored"] for group in moved["param_groups"]] == [17] and list(moved["state"]) == [0]


def test_a_keyword_of_ours_in_a_group_of_theirs_is_refused_as_elsewhere() -> None:
    group = {"params": parameters([(4, 3)]), "rounding": "stochastic"}
    with pytest.raises(ValueError, match="transformers' Adafactor has no argument 'rounding'"):
        adafactor.like("transformers", [group], lr=1e-3, relative_step=False)
