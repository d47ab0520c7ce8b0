"""Bit equality of two runs: the weights and everything the optimizer remembers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

StateDict = dict[str, Any]


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they are now, out of reach of later steps."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(got: StateDict, expected: StateDict) -> None:
    """The same keys and, under each, the same value: of tensors, the same shape, dtype and bits."""
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert got[key].dtype == value.dtype, key
            assert torch.equal(got[key], value), f"{key}: {got[key]} is not {value}"
        elif isinstance(value, dict):
            assert_same(got[key], value)
        else:
            assert got[key] == value, key


def assert_float32_statistics(optimizer: StateDict, steps: int) -> None:
    """Every parameter took that many steps, and its statistics have digits that bfloat16 would have lost."""
    assert optimizer["state"]
    for state in optimizer["state"].values():
        assert state["step"] == steps
        for key in state.keys() - {"step"}:
            assert state[key].dtype == torch.float32
            assert (state[key] != state[key].bfloat16()).any(), key
