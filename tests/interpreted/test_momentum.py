"""The momentum in bfloat16 and int8, of the update, the gradient and the direction, beside eager PyTorch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.core import momentum
from adafactor.core.factoring import Factored
from adafactor.kernels.triton.executor import Executor
from tests.interpreted.guarded import random_steps, starts, train

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# narrow, with two elements in the last block; beyond a line, and again uneven; a stack; whole blocks; kept as it is
SHAPES = [(37, 130), (10, 700), (3, 11, 200), (16, 384), (31,)]


def read(state: dict[str, Tensor], axis: int) -> tuple[Tensor, Tensor]:
    """The momentum as numbers, and the distance of neighbours in its format."""
    if "momentum" in state:
        value = state["momentum"].double()
        unit = torch.finfo(state["momentum"].dtype).eps * value.abs()
        return value, unit if state["momentum"].dtype == B16 else 1e-5 * value.abs().max().expand_as(value)
    blocks = momentum.Blocks(axis, momentum.BLOCK)
    one = torch.ones_like(state["momentum_int8"])
    value, unit = (momentum.decode(t, state["momentum_scale"], blocks).double() for t in (state["momentum_int8"], one))
    return value, unit


def check(begin: list[Tensor], grads: list[list[Tensor | None]], **keywords: Any) -> Adafactor:
    """Compare all of X and the momentum: a number near the border may be rounded either way, seldom."""
    (ours, optimizer), (theirs, other) = (train(begin, grads, name, **keywords) for name in ("triton", "eager"))
    states = zip(_states(optimizer), _states(other), strict=True)
    for a, b, start, (one, two) in zip(ours, theirs, begin, states, strict=True):
        (m, unit), (expected, _) = read(one, a.dim() - 1), read(two, a.dim() - 1)
        apart = (m - expected).abs() / (unit + 1e-12)
        assert apart.max() <= 1.02 and (apart > 0.02).double().mean() < 0.02, keywords
        if "momentum_scale" in one:
            torch.testing.assert_close(one["momentum_scale"], two["momentum_scale"], rtol=1e-5, atol=0)
        travelled = (b.double() - start.double()).abs().max()
        error, grain = (a.double() - b.double()).abs(), torch.finfo(a.dtype).eps * b.abs().double()
        is_off = error > 1e-4 * travelled + (0 if a.dtype.itemsize > 2 else 0.01) * grain
        assert is_off.double().mean() < 0.02 and (error <= 0.02 * travelled + 2.02 * grain).all(), keywords
        assert torch.equal(one["step"], two["step"])
    return optimizer


def _states(optimizer: Adafactor) -> list[dict[str, Tensor]]:
    return [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize(("of", "dtype"), [*product(["update", "gradient", "direction"], ["bfloat16", "int8"])])
def test_every_momentum_in_every_format(of: str, dtype: str) -> None:
    begin = starts(SHAPES)
    check(begin, random_steps(begin, 3), beta1=0.9, momentum_of=of, momentum_dtype=dtype, weight_decay=0.1)
