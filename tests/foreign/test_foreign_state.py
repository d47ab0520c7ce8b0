"""What torch asks of an optimizer's state: dicts, copies, names, groups and the hooks around saving and loading."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tests.exact import assert_same
from tests.foreign.database import DEPARTURES, SUBJECTS, Subject, linear, train


def primed(subject: Subject, steps: int = 3) -> tuple[Tensor, Tensor, Optimizer]:
    weight, bias = linear()
    optimizer = subject.make([weight, bias])
    train(optimizer, weight, bias, steps)
    return weight, bias, optimizer


def saved_by(subject: Subject, optimizer: Optimizer) -> Any:
    """Its state dict, which only ours may load elsewhere as it is while the optimizer goes on."""
    own = subject.departs("loaded state in memory of its own")
    return optimizer.state_dict() if own else copy.deepcopy(optimizer.state_dict())


def copies(weight: Tensor, bias: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    first, second = (p.detach().clone().to(dtype).requires_grad_() for p in (weight, bias))
    return first, second


@SUBJECTS
@pytest.mark.parametrize("how", ["as it is", "shallow copy", "through a file"])
def test_a_loaded_optimizer_goes_on_as_the_first(subject: Subject, how: str, tmp_path: Path) -> None:
    weight, bias, optimizer = primed(subject)
    saved = saved_by(subject, optimizer)
    if how == "through a file":
        torch.save(saved, tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
    saved = copy.copy(saved) if how == "shallow copy" else saved
    kept = copy.deepcopy(saved)
    second = copies(weight, bias)
    other = subject.make(second)
    other.load_state_dict(saved)
    assert_same(saved, kept)  # loading changes nothing in what is loaded
    train(optimizer, weight, bias, 3)
    train(other, *second, 3)
    assert torch.equal(weight, second[0]) and torch.equal(bias, second[1])
    assert_same(optimizer.state_dict(), other.state_dict())


@SUBJECTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_state_can_be_loaded_for_parameters_of_another_dtype(subject: Subject, dtype: torch.dtype) -> None:
    if subject.keywords.get("backend") == "cpu" and dtype == torch.float64:
        pytest.skip("the compiled step has no float64")
    weight, bias, optimizer = primed(subject)
    second = copies(weight, bias, dtype)
    other = subject.make(second)
    other.load_state_dict(optimizer.state_dict())
    train(other, *second)
    assert all(bool(p.isfinite().all()) for p in second)
    kept = {v.dtype for state in other.state.values() for key, v in state.items() if v is not None and key != "step"}
    if subject.departs("state in the parameter's dtype"):
        assert kept == {torch.float64 if dtype == torch.float64 else torch.float32}
    elif subject.kind is not torch.optim.Adafactor:  # which computes its own in float32, and so departs as we do
        assert kept <= {dtype}


@SUBJECTS
def test_names_are_kept_in_the_state_dict_and_need_not_be_there(subject: Subject) -> None:
    weight, bias = linear()
    named = subject.make([("weight", weight), ("bias", bias)])
    train(named, weight, bias)
    assert named.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    second = copies(weight, bias)
    plain = subject.make(second)
    plain.load_state_dict(saved_by(subject, named))
    train(plain, *second)
    train(named, weight, bias)
    assert torch.equal(weight, second[0])
    named.load_state_dict(subject.make(copies(weight, bias)).state_dict())
    assert "param_names" in named.param_groups[0]


@SUBJECTS
def test_hooks_around_saving_and_loading_run_in_order(subject: Subject) -> None:
    _, _, optimizer = primed(subject)
    said: list[str] = []

    def saved(opt: Optimizer, it: dict[str, Any]) -> dict[str, Any]:
        said.append("saved")
        return {**it, "more": 1}

    def loading(opt: Optimizer, it: dict[str, Any]) -> dict[str, Any]:
        said.append("loading")
        assert it.pop("more") == 1
        return it

    optimizer.register_state_dict_pre_hook(lambda opt: said.append("saving"))
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_pre_hook(lambda opt, it: said.append("loading, first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: said.append("loaded"))
    optimizer.register_load_state_dict_post_hook(lambda opt: said.append("loaded, first"), prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert said == ["saving", "saved", "loading, first", "loading", "loaded, first", "loaded"]


@SUBJECTS
def test_a_state_dict_of_other_groups_or_another_optimizer_is_refused(subject: Subject) -> None:
    weight, bias, optimizer = primed(subject)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(subject.make([{"params": [p]} for p in linear()]).state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(subject.make([linear()[0]]).state_dict())
    if subject.departs("state dict of another optimizer"):
        other = torch.optim.Adam([weight, bias])
        train(other, weight, bias)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError):
            optimizer.load_state_dict(other.state_dict())
        assert_same(optimizer.state_dict(), before)


def test_every_departure_from_torch_has_a_check() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert not [name for name in DEPARTURES if f'"{name}"' not in text]
