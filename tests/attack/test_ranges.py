"""Numbers at both ends of the range: the paper's value, wherever that value exists in the parameter's own dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from tests import oracle
from tests.attack.helpers import MOMENTUM, PLAIN, Walk, random

SHAPES = [(180, 180), (6, 4), (9,), (), (2, 30, 40)]
ESTIMATORS = ["outer", "row", "column", "none"]
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("shape", [(4,), (4, 4), (70, 50)], ids=str)
@pytest.mark.parametrize("beta2", [0.0, 1e-6, 1e-3, 0.1])
def test_rows_whose_gradient_becomes_zero_stay_where_they_are_at_small_beta2(
    shape: tuple[int, ...], beta2: float, backend: str
) -> None:
    walk = Walk(torch.ones(shape), replace(PLAIN, beta2=beta2), backend)
    for i in range(4):
        g = torch.ones(shape)
        g[: i % 3] = 0.0
        walk.check(g)


@pytest.mark.parametrize("fall", [1e-4, 1e-8, 1e-12, 1e-16, 1e-20])
@pytest.mark.parametrize("rates", [{"beta2": 0.0}, {"beta2": 1e-6}, {"beta2": 1e-3}, {"c": 1e-9}], ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_gradient_may_fall_far_in_one_step_at_small_beta2(
    fall: float, rates: dict[str, float], estimator: str, backend: str
) -> None:
    row = replace(PLAIN, estimator=estimator, relative=False, d=None, **rates)  # type: ignore[arg-type]
    walk = Walk(torch.zeros(8, 6), row, backend)
    for size in (1.0, fall, 1.0, fall, fall):
        walk.check(torch.full((8, 6), size) * torch.linspace(1, 2, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_gradient_that_hardly_counts_counts_with_all_digits(estimator: str, dtype: torch.dtype, backend: str) -> None:
    walk = Walk(torch.ones(8, 6, dtype=dtype), replace(PLAIN, estimator=estimator, c=3.0), backend)
    walk.check(random((8, 6), 0, dtype))
    walk.t = 20_000  # where 1 − β̂₂ₜ is about 1e-13
    walk.optimizer.state[walk.p]["step"].fill_(walk.t)
    for i in range(1, 4):
        walk.check(random((8, 6), i, dtype) * 1e7)


@pytest.mark.parametrize("fall", [1e-4, 1e-10, 1e-20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (40, 30)], ids=str)
def test_only_some_elements_may_fall_far_in_one_step_at_small_beta2(
    fall: float, dtype: torch.dtype, shape: tuple[int, ...], backend: str
) -> None:
    walk = Walk(torch.ones(shape, dtype=dtype), replace(PLAIN, beta2=0.0), backend)
    for i in range(4):
        g = random(shape, i, dtype)
        g[i % 2 :: 2] *= fall
        walk.check(g)


def tiny_eps1(rows: int, dtype: torch.dtype, backend: str, where: int = 0) -> None:
    row = replace(PLAIN, eps1=1.2e-38)
    g = torch.zeros(rows, 2, dtype=dtype)
    g[where] = 1e-25
    walk = Walk(torch.zeros(rows, 2, dtype=dtype), row, backend)
    for _ in range(2):
        walk.check(g)
    assert bool(walk.p.any()), "the step of that row can be seen"
    state = walk.optimizer.state[walk.p]
    torch.testing.assert_close(state["row"], torch.full((rows, 1), 1.2e-38, dtype=dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2**14, 2**18])
def test_a_mean_of_the_smallest_eps1_over_many_rows_is_itself(rows: int, dtype: torch.dtype, backend: str) -> None:
    tiny_eps1(rows, dtype, backend)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2**20, 2**23])
def test_a_mean_of_the_smallest_eps1_over_millions_of_rows_is_itself(rows: int, backend: str) -> None:
    tiny_eps1(rows, torch.float32, backend, where=rows - 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2e17, 1e18, 1e-18, 1e-25, 1e30])
def test_weights_of_any_size_take_steps_of_their_size(
    size: float, dtype: torch.dtype, shape: tuple[int, ...], backend: str
) -> None:
    walk = Walk(random(shape, 9, dtype) * size, replace(PLAIN, eps2=0.0), backend)
    for i in range(4):
        walk.check(random(shape, i, dtype))


@pytest.mark.parametrize("momentum", MOMENTUM)
@pytest.mark.parametrize("size", [1e18, 1e-25])
def test_momentum_takes_steps_of_the_weights_size_too(momentum: str, size: float, backend: str) -> None:
    walk = Walk(random((70, 50), 9) * size, replace(MOMENTUM[momentum], eps2=0.0), backend)
    for i in range(4):
        walk.check(random((70, 50), i))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e18, 1e-18])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_of_any_size_take_the_oracles_steps(
    size: float, dtype: torch.dtype, shape: tuple[int, ...], estimator: str, backend: str
) -> None:
    axes = (1, 2) if len(shape) == 3 else None
    row = oracle.Row(estimator, d=1.0, relative=True, multiplier=1e-2, eps1=1.2e-38, axes=axes)
    walk = Walk(random(shape, 9, dtype), row, backend)
    for i in range(4):
        walk.check(random(shape, i, dtype) * size)


@pytest.mark.parametrize("axes", [None, (1, 0)], ids=str)
@pytest.mark.parametrize("line", ["row", "column"])
@pytest.mark.parametrize("row", [*MOMENTUM.values(), replace(PLAIN, estimator="column")], ids=str)
def test_the_sum_of_a_line_may_leave_float32_where_no_square_does(
    row: oracle.Row, line: str, axes: tuple[int, int] | None, backend: str
) -> None:
    walk = Walk(random((65, 66), 9), replace(row, axes=axes), backend)
    for i in range(3):
        g = random((65, 66), i)
        (g if line == "row" else g.T)[0] = 5e18
        walk.check(g)


@pytest.mark.parametrize("weights", [1e150, 1e-150])
@pytest.mark.parametrize("gradients", [1e150, 1e-150])
def test_float64_has_a_range_of_its_own(weights: float, gradients: float, backend: str) -> None:
    walk = Walk(random((70, 50), 9, torch.float64) * weights, replace(PLAIN, eps2=0.0), backend)
    for i in range(3):
        walk.check(random((70, 50), i, torch.float64) * gradients)


@pytest.fixture
def flushing() -> Iterator[None]:
    """Torch's switch that makes the processor take subnormal numbers for zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize(("x", "g", "lr"), [(5e-5, 1.0, 0.0), (1.0, 5e-5, 1e-2), (5e-5, 5e-5, 1e-2), (3e-7, 1.0, 0.0)])
def test_subnormal_halves_are_numbers_also_where_subnormal_floats_are_not(
    x: float, g: float, lr: float, rounding: str, backend: str, request: pytest.FixtureRequest
) -> None:
    def trained(backend: str) -> torch.Tensor:
        p = nn.Parameter(torch.full((64, 64), x, dtype=torch.float16))
        optimizer = Adafactor([p], lr=lr, rounding=rounding, backend=backend)
        for _ in range(2):
            p.grad = torch.full_like(p, g)
            optimizer.step()
        return p.detach()

    expected = trained("eager")
    request.getfixturevalue("flushing")
    assert torch.equal(trained(backend).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("factored", [False, "outer"])
def test_a_constant_second_moment_stays_what_it_is_in_a_long_run(factored: str | bool, any_backend: str) -> None:
    """At a late t, 1 − β̂₂ is so small that β̂₂ in float32 and its complement would not add up to 1."""
    p = nn.Parameter(torch.ones(60, 50))
    optimizer = Adafactor([p], lr=0.0, factored=factored, backend=any_backend)
    p.grad = torch.full((60, 50), 0.75)
    optimizer.step()
    optimizer.state[p]["step"].fill_(1e6)
    for _ in range(3000):
        optimizer.step()
    for key in ("full", "row", "col"):
        if key in optimizer.state[p]:
            torch.testing.assert_close(optimizer.state[p][key].unique(), torch.tensor([0.5625]), rtol=2e-6, atol=0)


@pytest.mark.parametrize("beta2", [1e-3, 1e-6, 1e-7, 2e-8])
@pytest.mark.parametrize("shape", [(16, 12), (40,)], ids=str)
def test_a_small_beta2_keeps_its_digits(shape: tuple[int, ...], beta2: float, any_backend: str) -> None:
    p = torch.nn.Parameter(torch.ones(shape))
    optimizer = Adafactor([p], beta2=beta2, backend=any_backend)
    for i, size in enumerate((1.0, 1e-6)):  # so that the second step keeps little but β̂₂·R
        p.grad = random(shape, i) * size
        if i:
            state = optimizer.state[p]
            key = "row" if len(shape) > 1 else "full"
            decay = beta2 * (1 - beta2) / (1 - beta2**2)
            squares = p.grad.double().square()
            new = squares.mean(1, keepdim=True) if len(shape) > 1 else squares
            expected = state[key].double() * decay + (new + 1e-30) * (1 - decay)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[p][key].double(), expected, rtol=1e-5, atol=0)
