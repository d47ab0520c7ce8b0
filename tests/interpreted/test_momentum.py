"""The momentum in bfloat16 and int8, of the update, the gradient and the direction, beside eager PyTorch."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.core import momentum
from tests.interpreted.guarded import random_steps, starts, train

BACKENDS = ("triton", "eager")
F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# narrow, with two elements in the last block; beyond a line, and again uneven; a stack; whole blocks; kept as it is
SHAPES = [(37, 130), (10, 700), (3, 11, 200), (16, 384), (31,)]
CONVOLUTION = (30, 17, 3, 3)  # a block is 8 × 9 elements, and the last one 1 × 9


def read(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The momentum as numbers, and the distance of neighbours in its format."""
    kept = momentum.buffer(state)
    assert kept is not None
    if "momentum_scale" not in state:
        value = kept.double()
        unit = torch.finfo(kept.dtype).eps * value.abs()
        return value, unit if kept.dtype == B16 else 1e-5 * value.abs().max().expand_as(value)
    axis = state["momentum_scale"].dim() - 1
    behind = prod(kept.shape[axis + 1 :])
    length = max(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n == 1 or n * behind <= momentum.BLOCK)
    blocks = momentum.Blocks(axis, length)
    one = torch.ones_like(kept)
    value, unit = (momentum.decode(t, state["momentum_scale"], blocks).double() for t in (kept, one))
    return value, unit


def check(begin: list[Tensor], grads: list[list[Tensor | None]], **keywords: Any) -> Adafactor:
    """Compare all of X and the momentum: a number near the border may be rounded either way, seldom."""
    (ours, optimizer), (theirs, other) = (train(begin, grads, name, **keywords) for name in BACKENDS)
    states = zip(_states(optimizer), _states(other), strict=True)
    for a, b, start, (one, two) in zip(ours, theirs, begin, states, strict=True):
        (m, unit), (expected, _) = read(one), read(two)
        error = (m - expected).abs()
        assert (error <= 1.02 * unit.max()).all() and (error > 0.02 * unit + 1e-12).double().mean() < 0.02, keywords
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


X_AND_ROUNDING = [(F32, "nearest"), (F64, "nearest"), (B16, "stochastic"), (B16, "kahan"), (F16, "stochastic")]


@pytest.mark.parametrize(("x", "rounding"), X_AND_ROUNDING, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_every_dtype_and_rounding_of_x(x: torch.dtype, rounding: str, dtype: str) -> None:
    begin = starts([*SHAPES[1:3], CONVOLUTION], x)
    keywords = {"rounding": rounding, "momentum_dtype": dtype, "lr": 0.1, "lr_decay": None}
    check(begin, random_steps(begin, 2), beta1=0.9, momentum_of="direction", maximize=True, **keywords)


@pytest.mark.parametrize("of", ["update", "gradient", "direction"])
def test_every_momentum_of_a_tensor_whose_v_is_kept_whole(of: str) -> None:
    """Blocks that are whole lines of memory, a single row that ends within a block, and rows that do."""
    begin = starts([(33, 384), (1, 5000), (40, 128), (30, 200), CONVOLUTION])
    for dtype in ("bfloat16", "int8"):
        check(begin, random_steps(begin, 2), beta1=0.9, momentum_of=of, momentum_dtype=dtype, factored=False)


@pytest.mark.parametrize("of", ["update", "gradient", "direction"])
@pytest.mark.parametrize("factored", ["outer", "row", "column"])
def test_blocks_that_are_no_runs_of_memory(of: str, factored: str) -> None:
    """Convolutions row by row and channels last, a stack of columns, and a transposed matrix."""
    begin = starts([CONVOLUTION, (16, 40, 3, 3), (3, 20, 70, 2), (40, 200)])
    begin[1] = begin[1].to(memory_format=torch.channels_last)
    begin[-1] = begin[-1].t().contiguous().t()
    optimizer = check(
        begin, random_steps(begin, 2), beta1=0.9, momentum_of=of, momentum_dtype="int8", factored=factored
    )
    assert all("momentum_scale" in state for state in _states(optimizer))


def test_blocks_of_one_index_with_more_than_128_elements() -> None:
    begin = starts([(5, 6, 140)])
    check(begin, random_steps(begin, 2), beta1=0.9, momentum_of="gradient", momentum_dtype="int8", axes=(0, 1))


def test_a_gradient_of_another_order_in_memory_is_stepped_with_blocks() -> None:
    begin = starts([CONVOLUTION, (40, 200)])
    steps = random_steps(begin, 2)
    for step in steps:
        convolution, matrix = step
        assert convolution is not None and matrix is not None
        step[:] = [convolution.to(memory_format=torch.channels_last), matrix.t().contiguous().t()]
    check(begin, steps, beta1=0.9, momentum_dtype="int8")


@pytest.mark.parametrize("estimator", ["row", "column"])
def test_every_estimator(estimator: str) -> None:
    begin = starts([(37, 130), (8, 640)])
    check(begin, random_steps(begin, 2), beta1=0.9, momentum_dtype="int8", factored=estimator)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["update", "gradient"])
def test_rows_of_every_length(of: str) -> None:
    """Those that are held by several programs, too, and those whose chunks are shorter than a block."""
    begin = starts([(32, 128), (20, 256), (9, 520), (3, 4112), (2, 16400), (2, 16403)])
    check(begin, random_steps(begin, 2), beta1=0.9, momentum_of=of, momentum_dtype="int8")


@pytest.mark.parametrize("first", [(37, 130), CONVOLUTION], ids=str)
def test_the_bits_do_not_depend_on_what_is_beside_a_tensor(first: tuple[int, ...]) -> None:
    keywords: dict[str, Any] = {"beta1": 0.9, "momentum_dtype": "int8"}
    begin = starts([first, (3, 11, 200), (3, 20, 70, 2), (31,)])
    together, optimizer = train(begin, random_steps(begin, 2), **keywords)
    alone, other = train(begin[:1], [step[:1] for step in random_steps(begin, 2)], **keywords)
    assert torch.equal(together[0], alone[0])
    assert all(torch.equal(value, _states(other)[0][key]) for key, value in _states(optimizer)[0].items())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("of", ["update", "gradient"])
def test_a_step_that_is_not_taken_leaves_every_bit(of: str, dtype: str) -> None:
    begin = starts([CONVOLUTION, (16, 384), (37, 130)])
    steps = random_steps(begin, 2)
    for bad in steps[1][::2]:
        assert bad is not None
        bad[3, 5] = torch.nan
    kept = [train(begin, steps[:count], beta1=0.9, momentum_of=of, momentum_dtype=dtype) for count in (1, 2)]
    (before, first), (after, second) = kept
    assert not torch.equal(before[1], after[1])
    for i in (0, 2):
        assert torch.equal(before[i], after[i])
        assert all(torch.equal(value, _states(second)[i][key]) for key, value in _states(first)[i].items())


BY = ["rho", "alpha", "lr"]


@pytest.mark.parametrize("by", BY, ids=str)
@pytest.mark.parametrize("keywords", [{}, {"relative": False, "maximize": True, "lr": 0.03}], ids=str)
def test_weight_decay_by_anything(by: str | float, keywords: dict[str, Any]) -> None:
    begin = starts([(9, 20), (31,)])
    grads = random_steps(begin, 3)
    both = (train(begin, grads, name, weight_decay=0.3, weight_decay_by=by, **keywords)[0] for name in BACKENDS)
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-7)
    if by != "rho":
        (plain, _) = train(begin, grads, weight_decay=0.3, **keywords)
        assert not torch.equal(plain[0], b)


@pytest.mark.parametrize(
    ("shape", "transposed", "keywords", "why"),
    [
        ((40, 200), True, {"factored": False}, "it does not lie row by row in memory, as the blocks of its int8"),
        ((3, 4, 520), False, {"axes": (0, 1)}, "the blocks of its int8 momentum have more than 512 elements"),
    ],
)
def test_blocks_that_are_left_to_eager_are_refused_by_name(
    shape: tuple[int, ...], transposed: bool, keywords: dict[str, Any], why: str
) -> None:
    begin = [t.t().contiguous().t() if transposed else t for t in starts([shape])]
    with pytest.raises(ValueError, match=why):
        train(begin, random_steps(begin, 1), beta1=0.9, momentum_dtype="int8", **keywords)
    train(begin, random_steps(begin, 1), beta1=0.9, momentum_dtype="bfloat16", **keywords)
