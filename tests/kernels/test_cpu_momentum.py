"""The compiled backend with a momentum in bfloat16 or int8: what eager PyTorch does, by the same random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.core.rounding import random_words
from tests import reference

FORMATS = pytest.mark.parametrize("format", ["bfloat16", "int8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# uneven last blocks, more than a stretch, convolutions, stacks; and what int8 leaves in float32
SHAPES = [(40, 200), (9, 1030), (30, 17, 3, 3), (16, 2, 40, 7), (3, 20, 130), (1, 5000), (63, 65), (64, 63), (5000,)]


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in shapes]


def set_gradients(params: list[Parameter], seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=draws))  # in the order of its parameter


def train(params: list[Parameter], steps: int = 3, **keywords: Any) -> Adafactor:
    optimizer = Adafactor(params, backend="cpu", beta1=0.9, **keywords)
    for seed in range(steps):
        set_gradients(params, seed)
        optimizer.step()
    return optimizer


def everything(optimizer: Adafactor) -> list[Tensor]:
    return [t.clone() for p, state in optimizer.state.items() for t in (p.detach(), *state.values())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def cases(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    stored = ("nearest", "stochastic", "kahan") if dtype.itemsize == 2 else ("nearest",)
    for of, factored, rounding in product(("update", "direction", "gradient"), ("outer", False), stored):
        yield {"momentum_of": of, "factored": factored, "rounding": rounding}


def units_apart(state: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """How far two momenta are from each other, in units of their format, and what share of them differs."""
    one, two = reference.values(state)["momentum"], reference.values(other)["momentum"]
    unit = np.asarray(reference._unit(two, other))
    unit = unit + 1e-6 * np.abs(two).max()  # terms that cancel leave a rounding error of their own size
    apart = np.abs(one - two)
    return float((apart / unit).max()), float((apart > 0.5 * unit).mean())


@DTYPES
@FORMATS
def test_a_step_is_eagers_to_a_unit_of_the_momentum(format: str, dtype: torch.dtype) -> None:
    for keywords in cases(dtype):
        compare(format, dtype, {**keywords, "weight_decay": 0.1})


def compare(
    format: str,
    dtype: torch.dtype,
    keywords: dict[str, Any],
    shapes: Any = SHAPES,
) -> None:
    """From the same X and state, again and again; by the same random numbers, so that few are rounded otherwise."""
    given = {"beta1": 0.9, "momentum_dtype": format, "seed": 3, **keywords}
    params = parameters(dtype, shapes)
    optimizer = Adafactor(params, backend="eager", **given)
    for t in range(3):
        others = [Parameter(p.detach().clone()) for p in params]
        # blocks of an unfactored convolution's int8 momentum are left to eager
        backend = "auto" if format == "int8" and keywords["factored"] is False else "cpu"
        compiled = Adafactor(others, backend=backend, **given)
        compiled.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for some, stepped in ((params, optimizer), (others, compiled)):
            set_gradients(some, t)
            stepped.step()
        for p, q in zip(params, others, strict=True):
            told = f"{tuple(p.shape)} {keywords}, step {t}"
            unit = torch.finfo(p.dtype).eps * p.detach().abs().double() * (dtype.itemsize == 2)
            limit = 4 * torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps + unit
            assert p.stride() == q.stride() and bool(((p.double() - q.double()).abs() <= limit).all()), told
            if "momentum_scale" in optimizer.state[p] or format == "bfloat16":
                furthest, share = units_apart(compiled.state[q], optimizer.state[p])
                assert furthest <= 1.01 and share <= 0.002, told


@pytest.mark.parametrize("of", ["update", "gradient"])
@FORMATS
def test_a_gradient_that_is_not_finite_changes_nothing(format: str, of: str) -> None:
    for how in ("skip", "raise"):
        params = parameters()
        optimizer = train(params, momentum_dtype=format, momentum_of=of, on_nonfinite=how)
        before = everything(optimizer)
        for p in params:
            assert p.grad is not None
            p.grad.view(-1)[-1] = float("inf")
        with pytest.raises(FloatingPointError) if how == "raise" else pytest.warns(RuntimeWarning, match="not finite"):
            optimizer.step()
            optimizer.report()
        assert equal(before, everything(optimizer))
    params = parameters(shapes=[(40, 200)])
    optimizer = train(params, momentum_dtype=format, on_nonfinite="ignore")
    params[0].grad[3, 5] = float("nan")  # type: ignore[index]
    optimizer.step()
    assert params[0].isnan().any()


@pytest.mark.parametrize("shape", [(300,), (40, 200)], ids=str)
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8"])
def test_squares_of_a_momentum_may_leave_float32_where_it_does_not(format: str, shape: tuple[int, ...]) -> None:
    rms = {}
    for backend in ("eager", "cpu"):
        p = Parameter(torch.ones(shape))
        optimizer = Adafactor([p], backend=backend, beta1=0.9, momentum_of="gradient", momentum_dtype=format)
        for _ in range(2):
            p.grad = torch.linspace(0.1, 1, p.numel()).view(shape)
            optimizer.step()
            for key in ("momentum_of_gradient", "momentum_scale"):
                optimizer.state[p].get(key, torch.ones(())).mul_(1e25)
        (record,) = optimizer.report()
        rms[backend] = record.rms_update
    assert rms["cpu"] == pytest.approx(rms["eager"], rel=1e-4 if format == "float32" else 1e-2)
    assert rms["cpu"] > 1e20


def test_words_that_round_x_round_the_momentum_by_their_other_half() -> None:
    """X by the lower 16 bits, the momentum by the upper: drawn once for both."""
    words = random_words(torch.arange(1000), (5, 6)).numpy()
    low, high = (words & 0xFFFF).astype(float), (words >> 16).astype(float)
    assert abs(np.corrcoef(low, high)[0, 1]) < 0.15
