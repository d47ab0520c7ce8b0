"""The same bits for any number of threads, of the compiled step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from tests import inside
from tests.attack.helpers import random

pytestmark = [pytest.mark.usefixtures("threads")]
DTYPES = [torch.float32, torch.float64]
COUNTS = (1, 2, 3, 4, 8)
THIN: list[tuple[tuple[int, ...], str | bool]] = [
    ((100_000, 1), "column"),
    ((1, 100_000), "row"),
    ((100_000, 2), "outer"),
    ((100_000, 2), "row"),
    ((2, 100_000), "outer"),
    ((2, 100_000), "column"),
    ((40_000, 8), "outer"),
    ((3, 100_000), "outer"),
    ((2, 3, 60_000), "outer"),
    ((100_000,), False),
    ((500, 500), "outer"),
    ((500, 500), False),
]


@pytest.fixture(params=[name for name in inside.HERE if name in inside.COMPILED])
def backend(request: pytest.FixtureRequest) -> str:
    """Eager PyTorch's sums are torch's, which cuts them between its threads."""
    return str(request.param)


def ends(backend: str, threads: int, shape: tuple[int, ...], dtype: torch.dtype, **keywords: Any) -> list[Tensor]:
    """The weights and all of the state after three steps."""
    torch.set_num_threads(threads)
    p = nn.Parameter(random(shape, 9, dtype))
    optimizer = Adafactor([p], backend=backend, **keywords)
    for i in range(3):
        p.grad = random(shape, i, dtype)
        optimizer.step()
    return [p.detach(), *optimizer.state[p].values()]


def assert_same_bits(backend: str, shape: tuple[int, ...], dtype: torch.dtype, **keywords: Any) -> None:
    expected = ends(backend, 1, shape, dtype, **keywords)
    for threads in COUNTS[1:]:
        got = ends(backend, threads, shape, dtype, **keywords)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), f"{threads} threads"


@pytest.mark.parametrize(("shape", "factored"), THIN, ids=str)
def test_tall_and_wide_tensors_end_in_the_same_bits(shape: tuple[int, ...], factored: str | bool, backend: str) -> None:
    assert_same_bits(backend, shape, torch.float32, factored=factored)


@pytest.mark.parametrize(("shape", "factored"), [THIN[2], THIN[4], THIN[8]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_so_do_other_dtypes(dtype: torch.dtype, shape: tuple[int, ...], factored: str | bool, backend: str) -> None:
    assert_same_bits(backend, shape, dtype, factored=factored)


@pytest.mark.parametrize("of", ["update", "gradient"])
def test_so_does_momentum(of: str, backend: str) -> None:
    assert_same_bits(backend, (100_000, 2), torch.float32, beta1=0.9, momentum_of=of)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1_000_000, 2), (2, 1_000_000), (1_000_000,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_million_rows_end_in_the_same_bits(dtype: torch.dtype, shape: tuple[int, ...], backend: str) -> None:
    assert_same_bits(backend, shape, dtype)


def test_many_tensors_together_end_in_the_same_bits(backend: str) -> None:
    shapes = [(300, 200), (64, 3, 3, 3), (50_000, 2), (7,), (), (1, 9), (20_000,), (129, 1030)]

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        params = [nn.Parameter(random(shape, i)) for i, shape in enumerate(shapes)]
        optimizer = Adafactor(params, backend=backend)
        for t in range(3):
            for i, p in enumerate(params):
                p.grad = random(tuple(p.shape), 10 * t + i)
            optimizer.step()
        return [p.detach() for p in params]

    expected = run(1)
    for threads in COUNTS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run(threads), expected, strict=True)), f"{threads} threads"


def test_the_number_of_threads_may_change_in_mid_run(backend: str) -> None:
    def run(counts: list[int]) -> Tensor:
        p = nn.Parameter(random((50_000, 2), 9))
        optimizer = Adafactor([p], backend=backend)
        for i, threads in enumerate(counts):
            torch.set_num_threads(threads)
            p.grad = random((50_000, 2), i)
            optimizer.step()
        return p.detach()

    assert torch.equal(run([1, 2, 4, 1, 2, 3]), run([1] * 6))
