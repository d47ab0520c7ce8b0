"""Twenty architectures, tiny: ten steps with their own gradients, on every backend as in eager PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from adafactor import Adafactor, plan
from tests import inside
from tests.step.zoo import ZOO, saving

STEPS = 10
FAST = ("GPT-2", "ConvNeXt", "Mixtral")
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def need(package: str) -> None:
    """Skip where it is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("backend", inside.HERE)
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ZOO])
def test_ten_steps_are_those_of_eager_pytorch(name: str, backend: str) -> None:
    need(ZOO[name].package)
    torch.manual_seed(0)
    model = ZOO[name].build(tiny=True).train()
    names = [key for key, _ in model.named_parameters()]
    copies = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in model.parameters()]
    start = [p.detach().clone() for p in copies]
    leader = Adafactor(model.named_parameters(), backend="eager")
    other = Adafactor(zip(names, copies, strict=True), backend=backend)
    for _ in range(STEPS):
        model.zero_grad()
        ZOO[name].feed(model).backward()
        for p, copy in zip(model.parameters(), copies, strict=True):
            copy.grad = None if p.grad is None else p.grad.clone()
        leader.step()
        other.step()
    for p, copy, before, key in zip(model.parameters(), copies, start, names, strict=True):
        distance = (p - before).norm()
        assert (p - copy).norm() <= 1e-4 * distance + 1e-7 * before.norm(), key
        assert p.isfinite().all() and (p.grad is None or not p.grad.any() or distance > 0), key
    assert max(record.steps for record in other.report()) == STEPS
    kept = sum(value.nbytes for state in other.state.values() for value in state.values())
    planned = plan(model).line("adafactor-float32").bytes
    assert planned is not None and kept == planned.optimizer


def test_there_are_twenty_of_every_kind() -> None:
    kinds = " ".join(animal.kind for animal in ZOO.values())
    assert len(ZOO) >= 20
    for kind in ("decoder", "encoder-decoder", "experts", "state space", "1-d", "3-d", "vision", "speech", "diffusion"):
        assert kind in kinds, kind


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ZOO])
def test_what_the_page_says_is_factored_of_all_is_so_of_each(name: str) -> None:
    need(ZOO[name].package)
    text = PAGE.read_text().split("## Is every weight factored?")[1].split("\n## ")[0]
    share, times = saving(name)
    assert name in " ".join(text.split()) and "more than 99.7 %" in text and "286 times (ResNet) to 6,473" in text
    assert share > 0.997 and 286 <= round(times) <= 6473
