"""Weights that somebody else has written to: the next step starts from what is there, not from what was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from tests.attack.helpers import random


def in_place(p: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        p.copy_(value)


def clamp(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.clamp_(-100, 100)


def swap_and_swap_back(p: nn.Parameter) -> None:
    kept = p.detach().clone()
    in_place(p, torch.zeros_like(p))
    in_place(p, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16, 12), (40,), (8, 6, 3, 3)], ids=str)
@pytest.mark.parametrize("write", [clamp, swap_and_swap_back], ids=lambda write: str(write.__name__))
def test_what_kahan_kept_outlives_a_write_that_changes_nothing(
    write: Callable[[nn.Parameter], None], shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    written, left_alone = (nn.Parameter(random(shape, 9, dtype)) for _ in range(2))
    kahan, lr = "kahan", 1e-3  # steps of about half a unit in the last place
    optimizers = [Adafactor([p], rounding=kahan, lr=lr, relative=True, backend=backend) for p in (written, left_alone)]
    for i in range(20):
        for p, optimizer in zip((written, left_alone), optimizers, strict=True):
            p.grad = random(shape, i, dtype)
            optimizer.step()
        write(written)
    assert torch.equal(written, left_alone)
    assert bool(optimizers[0].state[written]["compensation"].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("edit", ["the whole", "one row"])
def test_what_kahan_kept_of_a_weight_is_not_added_to_another_that_takes_its_place(
    dtype: torch.dtype, edit: str, backend: str
) -> None:
    p = nn.Parameter(torch.full((16, 12), 1.0, dtype=dtype))
    optimizer = Adafactor([p], rounding="kahan", lr=1e-4, lr_decay=None, relative=True, backend=backend)
    for i in range(3):  # each below half a unit in the last place, so that the remainder holds it
        p.grad = random((16, 12), i, dtype).abs()
        optimizer.step()
    written = slice(None) if edit == "the whole" else slice(0, 1)
    with torch.no_grad():
        p[written] = 2.0**-10
    optimizer.param_groups[0]["lr"] = 0.0
    p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
        assert bool((p[written] == 2.0**-10).all())
