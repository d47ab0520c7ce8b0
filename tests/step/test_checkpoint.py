"""Save, load and continue as if nothing had happened; what does not fit is refused before anything changes.

That a saved run goes on to the same bits is a property: `tests/test_properties.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from adafactor import Adafactor
from tests.cases import normal
from tests.exact import StateDict, assert_same, refused

SHAPES = {"first": (4, 4), "second": (5, 3), "third": (6,)}


def trained(seed: int, **keywords: Any) -> Adafactor:
    """After three steps, which are others for another seed."""
    params = [(name, Parameter(normal(shape, seed))) for name, shape in SHAPES.items()]
    optimizer = Adafactor(params, **keywords)
    train(optimizer, seed)
    return optimizer


def train(optimizer: Adafactor, seed: int) -> None:
    for i in range(3):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = normal(tuple(p.shape), seed + i)
        optimizer.step()


WRONG: list[tuple[str, Any]] = [  # of a state, what is put in the place of which entry; nothing: it is missing
    *(("row", value) for value in (torch.ones(4, 1), torch.ones(()), None, torch.ones(5, 1).to(torch.complex64))),
    *(("row", value) for value in ([1.0] * 5, ...)),
    *(("col", value) for value in (torch.ones(1, 4), ...)),
    *(("full", value) for value in (torch.ones(5), None, ...)),
    *(("momentum_of_update", value) for value in (torch.ones(3, 5), None)),
    *(("step", value) for value in (None, "three", -1, torch.tensor(math.nan), torch.tensor(2.5), ...)),
    *(("step", value) for value in (torch.tensor([3.0]), torch.tensor([]))),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_a_state_that_cannot_be_is_refused_before_anything_changes(key: str, value: Any) -> None:
    name, number = ("third", 2) if key == "full" else ("second", 1)
    saved = copy.deepcopy(trained(100, beta1=0.9).state_dict())
    if value is ...:
        del saved["state"][number][key]
    else:
        saved["state"][number][key] = value
    optimizer = trained(200, beta1=0.9)
    with refused(optimizer, ValueError, f"(?s)(?=.*{name})(?=.*{key.partition('_')[0]})"):
        optimizer.load_state_dict(saved)
    train(optimizer, 5)  # and training goes on


class Stubborn:
    """Cannot be copied."""

    def __deepcopy__(self, _: Any) -> Any:
        """Never."""
        raise RuntimeError("cannot be copied")


@pytest.mark.parametrize(
    ("key", "value"), [("row", torch.ones(5, 1, device="meta")), ("beside", Stubborn())], ids=["no data", "no copy"]
)
def test_a_load_that_fails_half_way_changes_nothing(key: str, value: Any) -> None:
    saved = copy.deepcopy(trained(100).state_dict())
    saved["state"][1][key] = value
    optimizer = trained(200)
    with refused(optimizer, (RuntimeError, NotImplementedError)):
        optimizer.load_state_dict(saved)


def edit_keys(saved: StateDict) -> None:
    saved["state"]["1"] = saved["state"].pop(1)


def lose_keyword(saved: StateDict) -> None:
    del saved["param_groups"][0]["momentum_of"]


def turn_per_slice(saved: StateDict) -> None:
    saved["param_groups"][0]["per_slice"] = True
    saved["state"][1]["step"] = torch.ones(5)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_keys, "a state .1. that belongs to none of its parameters"),
        (lose_keyword, "a group has no 'momentum_of'"),
        (turn_per_slice, "second of shape .*per_slice"),
    ],
)
def test_a_state_dict_that_was_changed_is_refused_by_what_is_wrong(
    edit: Callable[[StateDict], None], message: str
) -> None:
    optimizer, saved = trained(200), copy.deepcopy(trained(100).state_dict())
    edit(saved)
    with refused(optimizer, ValueError, message):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["their groups", "our groups"])
@pytest.mark.parametrize(
    ("kind", "named"), [(torch.optim.Adafactor, "'col_var', 'row_var'"), (torch.optim.AdamW, "'exp_avg', 'exp_avg_sq'")]
)
def test_the_state_of_another_optimizer_is_refused_with_the_cure(kind: Any, named: str, is_grouped: bool) -> None:
    optimizer = trained(200)
    theirs = kind([Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    theirs.step()
    saved = theirs.state_dict()
    if is_grouped:
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
    with refused(optimizer, ValueError, f"of another optimizer: it has {named}.*adafactor.migrate"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("step", [3, torch.tensor(3)], ids=["a number", "an integer tensor"])
def test_a_count_of_steps_may_be_an_integer(step: Any) -> None:
    source, optimizer = trained(100), trained(200)
    saved = copy.deepcopy(source.state_dict())
    saved["state"][1]["step"] = step
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"], source.state_dict()["state"])


def test_momentum_of_a_checkpoint_stays_when_the_new_optimizer_has_none() -> None:
    saved = trained(100, beta1=0.9)
    copies = [Parameter(p.detach().clone()) for p in saved.param_groups[0]["params"]]
    resumed = Adafactor(zip(SHAPES, copies, strict=True))
    resumed.load_state_dict(saved.state_dict())  # β₁ comes with the checkpoint's groups
    for optimizer in (saved, resumed):
        train(optimizer, 5)
    assert_same(resumed.state_dict(), saved.state_dict())


@pytest.mark.parametrize("named", [False, True])
def test_groups_in_another_order_are_refused(named: bool) -> None:
    net = nn.Linear(3, 4)
    params: list[Any] = list(net.named_parameters()) if named else list(net.parameters())
    saved, other = (Adafactor([{"params": [p]} for p in order]) for order in (params, params[::-1]))
    with refused(other, ValueError, "another order"):
        other.load_state_dict(saved.state_dict())


def test_names_tell_apart_what_shapes_cannot() -> None:
    named = [(name, Parameter(torch.ones(3, 3))) for name in "ab"]
    other = Adafactor(named[::-1])
    with refused(other, ValueError, "has 'b' where the state dict has 'a': another order"):
        other.load_state_dict(Adafactor(named).state_dict())


def test_a_wrapper_may_prefix_the_names() -> None:
    optimizer = trained(100)
    group = optimizer.param_groups[0]
    fresh = Adafactor([(f"_orig_mod.{name}", p) for name, p in zip(SHAPES, group["params"], strict=True)])
    fresh.load_state_dict(optimizer.state_dict())
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("kind", [Adafactor, torch.optim.AdamW])
def test_a_state_dict_holds_the_tensors_themselves(kind: Any) -> None:
    """As the docstring says: AdamW's from the first step on, ours from the start."""
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = kind([p])
    early = optimizer.state_dict()
    optimizer.step()
    late = copy.deepcopy(saved := optimizer.state_dict())
    optimizer.step()
    steps = [[float(state["step"]) for state in each["state"].values()] for each in (early, saved, late)]
    assert steps == [[2.0] if kind is Adafactor else [], [2.0], [1.0]]
