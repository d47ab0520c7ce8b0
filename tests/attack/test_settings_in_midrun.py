"""Settings that change between steps: seen from the next step on, and nothing kept is taken for something else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from tests.attack.helpers import assert_unchanged, random, snapshot

COPIES: dict[str, Callable[[Adafactor], Adafactor]] = {
    "itself": lambda optimizer: optimizer,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}
BETA1 = {"beta1": 0.9}
# a shape, the keywords of the steps before, what is edited, and the keyword that the error names
REFUSED: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any], str]] = [
    ((8, 8), {"axes": (0, 1)}, {"axes": (1, 0)}, "axes"),
    ((8, 8), {}, {"axes": (1, 0)}, "axes"),
    ((3, 8, 8), {"axes": (1, 2)}, {"axes": (2, 1)}, "axes"),
    ((6, 6, 6), {"axes": (0, 1)}, {"axes": (0, 2)}, "axes"),
    ((8, 8), {"axes": (0, 1), "factored": "row"}, {"axes": (1, 0)}, "axes"),
    ((8, 8), {"axes": (0, 1), "factored": "row"}, {"axes": (1, 0), "factored": "outer"}, "factored"),
    ((8, 8), {}, {"factored": False}, "factored"),
    ((8, 8), {}, {"factored": "row"}, "factored"),
    ((8, 8), {}, {"min_factored": 9}, "min_factored"),
    ((1, 8, 8), {}, {"per_slice": True}, "per_slice"),
    ((1, 8, 8), {"per_slice": True}, {"per_slice": False}, "per_slice"),
    ((8, 8), BETA1, {"momentum_of": "gradient"}, "momentum_of"),
    ((40, 128), {**BETA1, "momentum_dtype": "int8"}, {"momentum_of": "direction"}, "momentum_of"),
    ((8, 8), BETA1, {"momentum_of": "gradient", "beta1": 0.0}, "momentum_of"),
    ((8,), {**BETA1, "momentum_of": "gradient"}, {"momentum_of": "update"}, "momentum_of"),
]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(("shape", "given", "edit", "named"), REFUSED, ids=str)
def test_what_a_state_cannot_follow_is_refused_before_anything_changes(
    shape: tuple[int, ...], given: dict[str, Any], edit: dict[str, Any], named: str, how: str
) -> None:
    first = nn.Parameter(random((40, 128), 8))
    p = nn.Parameter(random(shape, 9))
    groups: list[dict[str, Any]] = [{"params": [("first", first)]}, {"params": [("weight", p)], **given}]
    optimizer = Adafactor(groups, backend="eager")
    usual = optimizer.param_groups[1].copy()
    for i in range(2):
        first.grad, p.grad = random((40, 128), i), random(shape, i)
        optimizer.step()
    twin, optimizer = copy.deepcopy(optimizer), COPIES[how](optimizer)
    other, group = optimizer.param_groups
    for each in (twin, optimizer):
        for q in (q for each_group in each.param_groups for q in each_group["params"]):
            q.grad = random(tuple(q.shape), 5)
    group.update(edit)
    other["beta1"] = 0.5  # which gives the first parameter a momentum, if it gets so far
    kept = snapshot(optimizer)
    with pytest.raises(ValueError, match=named):
        optimizer.step()
    assert_unchanged(optimizer, kept)
    group.update({name: usual[name] for name in edit})  # taken back in full, it goes on as if never edited
    other["beta1"] = 0.0
    optimizer.step()
    twin.step()
    for ours, theirs in zip(optimizer.param_groups, twin.param_groups, strict=True):
        assert torch.equal(ours["params"][0], theirs["params"][0])


def tensor(value: float) -> Any:
    return torch.tensor(value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_tensor_is_no_way_around_the_limits_of_the_learning_rate(value: float) -> None:
    p = nn.Parameter(random((4, 3), 0))
    with pytest.raises(ValueError, match="lr"):
        Adafactor([p], lr=tensor(value), backend="eager")
    optimizer = Adafactor([p], lr=tensor(0.01), backend="eager")
    p.grad = torch.ones(4, 3)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(value)
    kept = p.detach().clone(), int(optimizer.state[p]["step"])
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert torch.equal(p, kept[0]) and int(optimizer.state[p]["step"]) == kept[1]


def test_a_checkpoint_keeps_a_learning_rate_in_a_tensor() -> None:
    p, q = (nn.Parameter(random((30, 20), 9)) for _ in range(2))
    saved, loaded = (Adafactor([x], lr=tensor(lr), backend="eager") for x, lr in ((p, 0.25), (q, 0.5)))
    loaded.load_state_dict(saved.state_dict())
    saved.param_groups[0]["lr"].fill_(0.125)  # the two do not share it
    assert float(loaded.param_groups[0]["lr"]) == 0.25
    p.grad = q.grad = random((30, 20), 0)
    saved.step()
    loaded.step()
    expected = nn.Parameter(random((30, 20), 9))
    expected.grad = q.grad
    Adafactor([expected], lr=0.25, backend="eager").step()
    assert torch.equal(q, expected) and not torch.equal(p, expected)
