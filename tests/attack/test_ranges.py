"""Numbers at both ends of the range: the paper's value, wherever that value exists in the parameter's own dtype."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from tests import inside
from tests.cases import Case, Run, normal

F32, F64 = torch.float32, torch.float64
WHERE = pytest.mark.parametrize(
    ("dtype", "backend"), [*product([F32], inside.HERE), (F64, "eager")], ids=lambda value: str(value)
)
ESTIMATORS = pytest.mark.parametrize("factored", ["outer", "row", "column", False])
SHAPES = pytest.mark.parametrize("shape", [(180, 180), (6, 4), (9,), (), (2, 30, 40)], ids=str)
MOMENTA: list[dict[str, Any]] = [{}, {"beta1": 0.9}, {"beta1": 0.9, "momentum_of": "gradient"}]


def start(x: Tensor, backend: str, **keywords: Any) -> Run:
    """A parameter with these values, which takes steps of 0.01 of its size."""
    case = Case("", tuple(x.shape), {"lr": 1e-2, "lr_decay": None, **keywords}, x.dtype)
    return Run(case, backend, x)


def walk(x: Tensor, grads: list[Tensor], backend: str, **keywords: Any) -> Run:
    """Steps with these gradients, each of which must be the oracle's."""
    run = start(x, backend, **keywords)
    for g in grads:
        run.check(g.to(x.dtype))
    assert run.p.isfinite().all()
    return run


@pytest.mark.parametrize("shape", [(4,), (70, 50)], ids=str)
@pytest.mark.parametrize("beta2", [0.0, 1e-6, 0.1])
def test_rows_whose_gradient_becomes_zero_stay_where_they_are_at_small_beta2(
    shape: tuple[int, ...], beta2: float, backend: str
) -> None:
    grads = [torch.ones(shape) for _ in range(4)]
    for i, g in enumerate(grads):
        g[: i % 3] = 0.0
    walk(torch.ones(shape), grads, backend, beta2=beta2)


@pytest.mark.parametrize("fall", [1e-4, 1e-12, 1e-20])
@pytest.mark.parametrize("rates", [{"beta2": 0.0}, {"beta2": 1e-6}, {"beta2": 2e-8}, {"decay_rate": 1e-9}], ids=str)
@ESTIMATORS
def test_a_gradient_may_fall_far_in_one_step_at_small_beta2(
    fall: float, rates: dict[str, float], factored: str | bool, backend: str
) -> None:
    grads = [torch.full((8, 6), size) * torch.linspace(1, 2, 6) for size in (1.0, fall, 1.0, fall, fall)]
    walk(torch.zeros(8, 6), grads, backend, factored=factored, relative=False, clip=None, **rates)


@WHERE
@ESTIMATORS
def test_a_gradient_that_hardly_counts_counts_with_all_digits(
    factored: str | bool, dtype: torch.dtype, backend: str
) -> None:
    run = start(torch.ones(8, 6, dtype=dtype), backend, factored=factored, decay_rate=3.0)
    run.check(normal((8, 6), 0, dtype))
    run.state["step"].fill_(20_000)  # where 1 − β̂₂ₜ is about 1e-13
    for i in range(1, 4):
        run.check(normal((8, 6), i, dtype) * 1e7)


@pytest.mark.parametrize("fall", [1e-4, 1e-20])
@WHERE
@pytest.mark.parametrize("shape", [(8,), (40, 30)], ids=str)
def test_only_some_elements_may_fall_far_in_one_step_at_small_beta2(
    fall: float, dtype: torch.dtype, shape: tuple[int, ...], backend: str
) -> None:
    grads = [normal(shape, i, dtype) for i in range(4)]
    for i, g in enumerate(grads):
        g[i % 2 :: 2] *= fall
    walk(torch.ones(shape, dtype=dtype), grads, backend, beta2=0.0)


@pytest.mark.parametrize("rows", [2**14, 2**18, *(pytest.param(n, marks=pytest.mark.slow) for n in (2**20, 2**23))])
@WHERE
def test_a_mean_of_the_smallest_eps1_over_many_rows_is_itself(rows: int, dtype: torch.dtype, backend: str) -> None:
    g = torch.zeros(rows, 2, dtype=dtype)
    g[-1] = 1e-25
    run = walk(torch.zeros_like(g), [g, g], backend, eps=(1.2e-38, 1e-3))
    assert bool(run.p.any()), "the step of that row can be seen"


@SHAPES
@WHERE
@pytest.mark.parametrize("size", [2e17, 1e18, 1e-18, 1e-25, 1e30])
def test_weights_of_any_size_take_steps_of_their_size(
    size: float, dtype: torch.dtype, shape: tuple[int, ...], backend: str
) -> None:
    grads = [normal(shape, i) for i in range(4)]
    for momentum in MOMENTA if abs(size) < 1e20 else MOMENTA[:1]:
        walk(normal(shape, 9, dtype) * size, grads, backend, eps=(1e-30, 0.0), **momentum)


@SHAPES
@WHERE
@pytest.mark.parametrize("size", [1e18, 1e-18])
@ESTIMATORS
def test_gradients_of_any_size_take_the_oracles_steps(
    size: float, dtype: torch.dtype, shape: tuple[int, ...], factored: str | bool, backend: str
) -> None:
    grads = [normal(shape, i, dtype) * size for i in range(4)]
    walk(normal(shape, 9, dtype), grads, backend, factored=factored, eps=(1.2e-38, 1e-3))


@pytest.mark.parametrize("axes", [None, (1, 0)], ids=str)
@pytest.mark.parametrize("line", ["row", "column"])
@pytest.mark.parametrize("keywords", [*MOMENTA, {"factored": "column"}], ids=str)
def test_the_sum_of_a_line_may_leave_float32_where_no_square_does(
    keywords: dict[str, Any], line: str, axes: tuple[int, int] | None, backend: str
) -> None:
    grads = [normal((65, 66), i) for i in range(3)]
    for g in grads:
        (g if line == "row" else g.T)[0] = 5e18
    walk(normal((65, 66), 9), grads, backend, axes=axes, **keywords)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e10])
def test_factors_may_leave_float32_where_the_step_does_not(
    scale: float, turned: bool, maximize: bool, backend: str
) -> None:
    """Of rows whose gradients have become small; α and the factors of the other axis bring them back, or G is zero."""
    large, small = normal((11, 4), 1) * 1e16, normal((11, 4), 2) * 1e16
    small[2:] *= 1e-35
    small[3] = 0.0
    cross = normal((11, 4), 3) * 1e16
    cross[3], cross[:, 1] = 0.0, 0.0
    x, grads = normal((11, 4), 9) * 1e16 * scale, [large * 1e-33, large * 0, small, cross]
    if turned:
        x, *grads = (t.t().contiguous().t() for t in (x, *grads))
    run = start(x, backend, beta2=0.0, eps=(2e-38, 1e-3), maximize=maximize)
    for g in grads:
        run.check(g)
    assert run.p.isfinite().all()


@pytest.mark.parametrize("weights", [1e150, 1e-150])
@pytest.mark.parametrize("gradients", [1e150, 1e-150])
def test_float64_has_a_range_of_its_own(weights: float, gradients: float) -> None:
    grads = [normal((70, 50), i, F64) * gradients for i in range(3)]
    walk(normal((70, 50), 9, F64) * weights, grads, "eager", eps=(1e-30, 0.0))


@pytest.mark.parametrize("shape", [(300,), (40, 200)], ids=str)
@pytest.mark.parametrize("momentum_dtype", ["float32", "bfloat16", "int8"])
def test_squares_of_a_momentum_may_leave_float32_where_it_does_not(
    momentum_dtype: str, shape: tuple[int, ...], backend: str
) -> None:
    run = start(torch.ones(shape), backend, **MOMENTA[2], momentum_dtype=momentum_dtype)
    for _ in range(2):
        run.check(torch.linspace(0.1, 1, run.p.numel()).view(shape))
        for key in run.state.keys() & {"momentum_of_gradient", "momentum_scale"}:
            run.state[key].mul_(1e25)
    assert run.optimizer.report()[0].rms_update > 1e20


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
def test_a_constant_second_moment_stays_what_it_is_in_a_long_run(factored: str | bool, backend: str) -> None:
    """At a late t, 1 − β̂₂ is so small that β̂₂ in float32 and its complement would not add up to 1."""
    run = start(torch.ones(60, 50), backend, factored=factored, lr=0.0)
    run.check(torch.full((60, 50), 0.75))
    run.state["step"].fill_(1e6)
    for _ in range(3000):
        run.optimizer.step()
    for key in run.state.keys() - {"step"}:
        torch.testing.assert_close(run.state[key].unique(), torch.tensor([0.5625]), rtol=2e-6, atol=0)
