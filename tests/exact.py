"""Bit equality of two runs: the weights and everything the optimizer remembers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

StateDict = dict[str, Any]


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they are now, out of reach of later steps."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(got: Any, expected: Any, where: str = "") -> None:
    """Dicts and lists with the same keys and values: of tensors, the same shape, dtype and bits; NaN is NaN."""
    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(got[key], value, f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for number, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{where} {number}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")
    else:
        assert got == expected, where


def assert_float32_statistics(optimizer: StateDict, steps: int) -> None:
    """Every parameter took that many steps, and its statistics have digits that bfloat16 would have lost."""
    assert optimizer["state"]
    for state in optimizer["state"].values():
        assert state["step"] == steps
        for key in state.keys() - {"step"}:
            assert state[key].dtype == torch.float32
            assert (state[key] != state[key].bfloat16()).any(), key


def snapshot(optimizer: Any) -> StateDict:
    """All that a step or a load can change, out of reach of later ones."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy({"weights": [p.detach() for p in params], **optimizer.state_dict()})


@contextmanager
def refused(optimizer: Any, kind: Any, match: str | None = None) -> Iterator[None]:
    """What is done here raises such an error, and has changed nothing."""
    before = snapshot(optimizer)
    with pytest.raises(kind, match=match):
        yield
    assert_same(snapshot(optimizer), before)
