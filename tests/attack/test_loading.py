"""A state dict that does not fit is refused before anything changes, or is taken for what it means."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from tests.attack.helpers import assert_unchanged, random, snapshot
from tests.exact import assert_same

SHAPES = {"first": (4, 4), "second": (5, 3), "third": (6,)}
StateDict = dict[str, Any]


def optimizer_of(backend: str, seed: int, **keywords: Any) -> Adafactor:
    """After three steps, which are others for another seed."""
    params = [(name, nn.Parameter(random(shape, seed))) for name, shape in SHAPES.items()]
    optimizer = Adafactor(params, backend=backend, **keywords)
    for i in range(3):
        for _, p in params:
            p.grad = random(tuple(p.shape), seed + i)
        optimizer.step()
    return optimizer


def set_to(key: str, value: Any, number: int = 1) -> Callable[[StateDict], None]:
    def edit(saved: StateDict) -> None:
        saved["state"][number][key] = value

    return edit


def without(key: str, number: int = 1) -> Callable[[StateDict], None]:
    def edit(saved: StateDict) -> None:
        del saved["state"][number][key]

    return edit


def third(key: str, value: Any) -> Callable[[StateDict], None]:
    return set_to(key, value, number=2)


WRONG: dict[str, tuple[str, Callable[[StateDict], None]]] = {
    "row too short": ("row", set_to("row", torch.ones(4, 1))),
    "row without its last axis": ("row", set_to("row", torch.ones(5))),
    "row a single number": ("row", set_to("row", torch.ones(()))),
    "row of the columns' length": ("row", set_to("row", torch.ones(3, 1))),
    "row None": ("row", set_to("row", None)),
    "row a word": ("row", set_to("row", "ones")),
    "row of complex numbers": ("row", set_to("row", torch.ones(5, 1, dtype=torch.complex64))),
    "no row": ("row", without("row")),
    "col too long": ("col", set_to("col", torch.ones(1, 4))),
    "col None": ("col", set_to("col", None)),
    "no col": ("col", without("col")),
    "full too short": ("full", third("full", torch.ones(5))),
    "full None": ("full", third("full", None)),
    "no full": ("full", without("full", number=2)),
    "row a list": ("row", set_to("row", [1.0] * 5)),
    "momentum of another shape": ("momentum", set_to("momentum_of_update", torch.ones(3, 5))),
    "momentum None": ("momentum", set_to("momentum_of_update", None)),
    "no step": ("step", without("step")),
    "step None": ("step", set_to("step", None)),
    "step a word": ("step", set_to("step", "three")),
    "step -1": ("step", set_to("step", torch.tensor(-1.0))),
    "step -5": ("step", set_to("step", torch.tensor(-5.0))),
    "step -1 without a tensor": ("step", set_to("step", -1)),
    "step NaN": ("step", set_to("step", torch.tensor(math.nan))),
    "step infinite": ("step", set_to("step", torch.tensor(math.inf))),
    "step two and a half": ("step", set_to("step", torch.tensor(2.5))),
    "one step in a vector": ("step", set_to("step", torch.tensor([3.0]))),
    "two steps": ("step", set_to("step", torch.tensor([3.0, 3.0]))),
    "no steps": ("step", set_to("step", torch.tensor([]))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_that_cannot_be_is_refused_before_anything_changes(wrong: str, backend: str) -> None:
    key, edit = WRONG[wrong]
    saved = copy.deepcopy(optimizer_of(backend, 100, beta1=0.9).state_dict())
    edit(saved)
    optimizer = optimizer_of(backend, 200, beta1=0.9)
    before = snapshot(optimizer)
    with pytest.raises(ValueError) as refusal:
        optimizer.load_state_dict(saved)
    assert ("third" if key == "full" else "second") in str(refusal.value) and key in str(refusal.value)
    assert_unchanged(optimizer, before)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()  # and training goes on


class Stubborn:
    """Cannot be copied."""

    def __deepcopy__(self, _: Any) -> Any:
        """Never."""
        raise RuntimeError("cannot be copied")


@pytest.mark.parametrize(
    "what", [("row", torch.ones(5, 1, device="meta")), ("beside", Stubborn())], ids=["no data", "no copy"]
)
def test_a_load_that_fails_half_way_changes_nothing(what: tuple[str, Any], backend: str) -> None:
    saved = copy.deepcopy(optimizer_of(backend, 100).state_dict())
    saved["state"][1][what[0]] = what[1]
    optimizer = optimizer_of(backend, 200)
    before = snapshot(optimizer)
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("grouped", [False, True], ids=["their groups", "our groups"])
@pytest.mark.parametrize(
    ("kind", "named"), [(torch.optim.Adafactor, "'col_var', 'row_var'"), (torch.optim.AdamW, "'exp_avg', 'exp_avg_sq'")]
)
def test_the_state_of_another_optimizer_is_refused_with_the_cure(
    kind: Any, named: str, grouped: bool, backend: str
) -> None:
    optimizer = optimizer_of(backend, 200)
    theirs = kind(optimizer.param_groups[0]["params"])
    theirs.step()
    before, saved = snapshot(optimizer), theirs.state_dict()
    if grouped:
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=f"of another optimizer: it has {named}.*adafactor.migrate"):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("step", [3, torch.tensor(3)], ids=["a number", "an integer tensor"])
def test_a_count_of_steps_may_be_an_integer(step: Any, backend: str) -> None:
    source, optimizer = optimizer_of(backend, 100), optimizer_of(backend, 200)
    saved = copy.deepcopy(source.state_dict())
    saved["state"][1]["step"] = step
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"], source.state_dict()["state"])


def test_a_state_whose_keys_json_has_made_strings_is_refused(backend: str) -> None:
    optimizer, saved = optimizer_of(backend, 200), copy.deepcopy(optimizer_of(backend, 100).state_dict())
    saved["state"]["1"] = saved["state"].pop(1)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="a state .1. that belongs to none of its parameters"):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)


def test_a_group_that_lacks_a_keyword_is_refused_by_its_name(backend: str) -> None:
    optimizer, saved = optimizer_of(backend, 200, beta1=0.9), optimizer_of(backend, 100, beta1=0.9).state_dict()
    del saved["param_groups"][0]["momentum_of"]
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="a group has no 'momentum_of'"):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)
