"""The optimizers that are asked what torch asks of its own, and the one table of where ours departs from them.

The checks in this folder are written after torch's `test/test_optim.py`. They run on some of torch's own optimizers
too, which shows that they ask for nothing that torch does not do.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor

# What torch's optimizers do and ours does not, each with its reason; a check that meets one asks for what we promise
DEPARTURES = {
    "state in the parameter's dtype": "statistics of 16-bit parameters stay float32: in bfloat16 they would not move",
    "loaded state in memory of its own": "torch's shares it with the dict and so with its source; ours copies",
    "state dict of another optimizer": "refused before anything changes, where torch loads it and fails in the step",
}


class Subject(NamedTuple):
    """An optimizer and keywords for it."""

    kind: Any
    keywords: dict[str, Any]

    def departs(self, name: str) -> bool:
        """Is it ours, which differs in this? A name that is not in the table is a mistake."""
        return bool(DEPARTURES[name]) and self.kind is Adafactor

    def make(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        """With these parameters or groups."""
        optimizer: torch.optim.Optimizer = self.kind(params, **{**self.keywords, **more})
        return optimizer

    def accepts(self, keyword: str) -> bool:
        """Is there such a keyword?"""
        return keyword in inspect.signature(self.kind).parameters


ALL: dict[str, Subject] = {
    "ours-eager": Subject(Adafactor, {"backend": "eager"}),
    "ours-cpu": Subject(Adafactor, {"backend": "cpu"}),
    "ours-ascending": Subject(Adafactor, {"weight_decay": 0.1, "maximize": True}),
    "ours-momentum": Subject(Adafactor, {"beta1": 0.9, "clip": None}),
    **{kind.__name__: Subject(kind, {}) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor)},
}
SUBJECTS = pytest.mark.parametrize("subject", ALL.values(), ids=ALL)


def linear() -> tuple[Tensor, Tensor]:
    """A weight and a bias."""
    draws = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(10, 5, generator=draws), torch.randn(10, generator=draws)
    return weight.requires_grad_(), bias.requires_grad_()


def loss_of(weight: Tensor, bias: Tensor) -> Tensor:
    """Of a fixed input: the sum of the squares that come out."""
    data = torch.linspace(0.5, 1.5, 5, dtype=weight.dtype, device=weight.device)
    return (weight.mv(data) + bias).square().sum()


def train(optimizer: torch.optim.Optimizer, weight: Tensor, bias: Tensor, steps: int = 1) -> None:
    """Some ordinary steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(weight, bias).backward()
        optimizer.step()
