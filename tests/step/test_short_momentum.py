"""A momentum in bfloat16 or int8 beside what people use with an optimizer: files, copies, scalers, averages."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adafactor import Adafactor, step_in_backward
from tests.integrations.exact import assert_same

pytestmark = pytest.mark.usefixtures("backend")

FORMATS = pytest.mark.parametrize("format", ["bfloat16", "int8"])
Training = tuple[nn.Module, Adafactor]


def make(format: str, **keywords: Any) -> Training:
    """A matrix that is large enough for int8, one whose rows are too short, and two vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 32), nn.Tanh(), nn.Linear(32, 150))
    return model, Adafactor(model.named_parameters(), beta1=0.9, momentum_dtype=format, seed=3, **keywords)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Of a batch of this step's own."""
    batch = torch.randn(4, 200, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(batch).square().mean()
    return loss


def train(training: Training, first: int = 0, last: int = 2) -> Training:
    """Take steps, each with its own batch."""
    model, optimizer = training
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return training


def assert_equal(one: Training, other: Training) -> None:
    """Weights and states have the same bits and dtypes."""
    assert_same(one[0].state_dict(), other[0].state_dict())
    assert_same(one[1].state_dict()["state"], other[1].state_dict()["state"])


def file_of(state_dict: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A state dict as a safetensors file has it: tensors by name, and text."""
    tensors = {f"{n}.{key}": v for n, state in state_dict["state"].items() for key, v in state.items()}
    return tensors, {"param_groups": json.dumps(state_dict["param_groups"])}


@FORMATS
def test_it_goes_through_a_safetensors_file(format: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    whole = train(make(format))
    tensors, words = file_of(whole[1].state_dict())
    save_file(tensors, tmp_path / "optimizer.safetensors", words)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in load_file(tmp_path / "optimizer.safetensors").items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
        groups = json.loads(file.metadata()["param_groups"])
    resumed = make(format)
    resumed[0].load_state_dict(whole[0].state_dict())
    resumed[1].load_state_dict({"state": state, "param_groups": groups})
    assert_equal(train(resumed, 2, 4), train(whole, 2, 4))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@FORMATS
def test_a_copy_goes_on_as_the_original_does(format: str, how: str) -> None:
    original = train(make(format))
    if how == "deepcopy":
        other = copy.deepcopy(original)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(original))
    else:
        torch.save(original, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert_equal(train(other, 2, 4), train(original, 2, 4))


@FORMATS
def test_inside_backward_it_is_that_of_the_ordinary_loop(format: str) -> None:
    model, optimizer = make(format)
    step_in_backward(model, optimizer)
    assert_equal(train((model, optimizer), 0, 4), train(make(format), 0, 4))


@FORMATS
def test_a_gradient_that_raises_leaves_it_alone(format: str) -> None:
    model, optimizer = train(make(format, on_nonfinite="raise"))
    before = copy.deepcopy((model, optimizer))
    loss_of(model, 2).backward()
    gradient = model[2].weight.grad  # type: ignore[index]
    assert isinstance(gradient, Tensor)
    gradient[5, 7] = float("inf")
    with pytest.raises(FloatingPointError, match=r"2\.weight"):
        optimizer.step()
    assert_equal((model, optimizer), before)


@FORMATS
def test_a_scaler_changes_nothing_and_leaves_a_step_out_when_its_scale_is_too_large(format: str) -> None:
    model, optimizer = make(format)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # a power of two: gradients are exact
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            before = copy.deepcopy((model, optimizer))
            for p in model.parameters():
                p.grad = torch.full_like(p, float("inf"))
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert_equal((model, optimizer), before)
    plain = make(format)
    assert_equal((model, optimizer), train(train(plain, 0, 1), 2, 3))


@FORMATS
def test_averages_of_the_weights_are_of_weights_alone(format: str) -> None:
    averaged: list[nn.Module] = []
    for kept in ("float32", format):
        model, optimizer = make(kept)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(4):
            train((model, optimizer), step, step + 1)
            average.update_parameters(model)
        averaged.append(average)
    for a, b in zip(*(model.parameters() for model in averaged), strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=0.05, atol=1e-3)


@FORMATS
def test_a_report_counts_its_bytes_and_the_updates_stay_alike(format: str) -> None:
    (_, wide), (_, short) = train(make("float32")), train(make(format))
    saved = {}
    for one, other in zip(wide.report(), short.report(), strict=True):
        assert one.name == other.name and one.rms_update == pytest.approx(other.rms_update, rel=0.05)
        saved[other.name] = one.state_bytes - other.state_bytes
    if format == "bfloat16":
        assert saved == {"0.weight": 2 * 6400, "0.bias": 2 * 32, "2.weight": 2 * 4800, "2.bias": 2 * 150}
    else:  # two blocks, of 128 and 72, in each row
        assert saved == {"0.weight": 3 * 6400 - 4 * 2 * 32, "0.bias": 0, "2.weight": 0, "2.bias": 0}
