"""What is given is taken, or refused by name: odd dtypes, old names, and whom a warning is for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from adafactor import Adafactor, step_in_backward
from tests.attack.helpers import assert_unchanged, random, snapshot

SHAPE = (30, 20)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """New tensors are made on another device than the parameters'."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


KEYWORDS: list[dict[str, Any]] = [
    {},
    {"on_nonfinite": "raise"},
    {"on_nonfinite": "ignore", "factored": False},
    {"beta1": 0.9, "relative": False},
    {"factored": "row", "weight_decay": 0.1, "clip": None},
]


def run_with(keywords: dict[str, Any], backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """All that a run can do, with tensors whose device is said."""
    generator = torch.Generator("cpu").manual_seed(0)
    values = [torch.randn(SHAPE, generator=generator, device="cpu").to(dtype) for _ in range(6)]
    model = nn.ParameterList([nn.Parameter(values[0].clone()), nn.Parameter(values[0][0].clone())])
    optimizer = Adafactor(model.parameters(), backend=backend, **keywords)
    for value in values[1:4]:
        model[0].grad, model[1].grad = value.clone(), value[0].clone()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    with step_in_backward(model, optimizer):
        ((model[0] * values[4]).sum() + (model[1] * values[5][1]).sum()).backward()
        optimizer.step()
    records = optimizer.report()
    assert all(record.steps == 1 for record in records) or all(record.steps == 4 for record in records)
    return [p.detach() for p in model]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_torchs_default_device_does_not_matter_to_parameters_on_another(
    keywords: dict[str, Any], dtype: torch.dtype, any_backend: str, request: pytest.FixtureRequest
) -> None:
    expected = run_with(keywords, any_backend, dtype)
    request.getfixturevalue("elsewhere")
    got = run_with(keywords, any_backend, dtype)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with a scheduler"])
@pytest.mark.parametrize("closed", [False, True], ids=["step()", "step(closure)"])
def test_a_warning_points_at_the_line_that_called_step(scheduled: bool, closed: bool, any_backend: str) -> None:
    p = nn.Parameter(torch.ones(SHAPE))
    p.grad = torch.full(SHAPE, float("nan"))
    optimizer = Adafactor([p], backend=any_backend)
    if scheduled:
        LambdaLR(optimizer, lambda epoch: 1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            if closed:
                optimizer.step(lambda: 0.0)
            else:
                optimizer.step()
    assert [warning.filename for warning in told] == [__file__]


def test_a_refused_group_leaves_the_optimizer_as_it_was(backend: str) -> None:
    p, q = (nn.Parameter(random(SHAPE, i)) for i in range(2))
    optimizer = Adafactor([p], backend=backend)
    p.grad = q.grad = random(SHAPE, 2)
    optimizer.step()
    kept = snapshot(optimizer)
    for wrong in ({"lr": -1.0}, {"eps": "small"}, {"axes": (0, 5)}, {"beta1": 2.0}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            optimizer.add_param_group({"params": [q], **wrong})
        assert_unchanged(optimizer, kept)
    optimizer.step()
