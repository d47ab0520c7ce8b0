"""Our entry for torch's optimizer database, and the one table of where we depart from what torch's optimizers do.

The checks in this folder are written after torch's `test/test_optim.py`. They run on some of torch's own optimizers
too, which shows that they ask for nothing that torch does not do.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
import unittest
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import adafactor


def _load() -> Any:
    """Torch's database: it wants a package for tests of its own, and would forbid setting flags in this process."""
    stub = types.ModuleType("expecttest")
    stub.TestCase, stub.ACCEPT = unittest.TestCase, False  # type: ignore[attr-defined]
    if missing := importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = stub
    try:
        with mock.patch("torch.backends.disable_global_flags"):
            return importlib.import_module("torch.testing._internal.common_optimizers")
    except ImportError as problem:  # it is internal to torch, and may go
        pytest.skip(f"torch's optimizer database cannot be imported: {problem}", allow_module_level=True)
    finally:
        if missing:
            del sys.modules["expecttest"]


torch_database = _load()

# What torch's optimizers do and ours does not, each with its reason; a check that meets one asks for what we promise
DEPARTURES = {
    "Tensor lr must be 1-element": "the message begins with the argument's name and value, as for all of our keywords",
    "a param group cannot have duplicate parameters": "refused, where torch warns that it will be",
    "state in the parameter's dtype": "statistics of 16-bit parameters stay float32: in bfloat16 they would not move",
    "loaded state in memory of its own": "torch's shares it with the dict and so with its source; ours copies",
    "state dict of another optimizer": "refused before anything changes, where torch loads it and fails in the step",
}


def departure(name: str) -> str:
    """The reason; a name that is not in the table is a mistake."""
    return DEPARTURES[name]


PEERS = [info.optim_cls for info in torch_database.optim_db if info.name in ("SGD", "Adam", "Adafactor")]


class Subject(NamedTuple):
    """An optimizer and keywords for it."""

    kind: Any
    keywords: dict[str, Any]

    @property
    def ours(self) -> bool:
        """Is it the one that is tested, and not one that shows what torch asks?"""
        return self.kind is adafactor.Adafactor

    def make(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        """With these parameters or groups."""
        optimizer: torch.optim.Optimizer = self.kind(params, **{**self.keywords, **more})
        return optimizer

    def accepts(self, keyword: str) -> bool:
        """Is there such a keyword?"""
        return keyword in inspect.signature(self.kind).parameters


OURS: dict[str, dict[str, Any]] = {
    "ours-eager": {"backend": "eager"},
    "ours-cpu": {"backend": "cpu"},
    "ours-ascending": {"weight_decay": 0.1, "maximize": True},
    "ours-momentum": {"beta1": 0.9, "clip": None},
}
SUBJECTS = pytest.mark.parametrize(
    "subject",
    [
        *(pytest.param(Subject(adafactor.Adafactor, keywords), id=name) for name, keywords in OURS.items()),
        *(pytest.param(Subject(kind, {}), id=kind.__name__) for kind in PEERS),
    ],
)


def linear(gaps: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A weight and a bias; with gaps they lie in memory that is not theirs alone."""
    generator = torch.Generator().manual_seed(0)
    if gaps:
        weight, bias = torch.randn(10, 5, 2, generator=generator)[..., 0], torch.randn(10, 2, generator=generator)[:, 0]
    else:
        weight, bias = torch.randn(10, 5, generator=generator), torch.randn(10, generator=generator)
    return weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()


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
