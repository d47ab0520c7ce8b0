"""Every row of Table 2 is the oracle's, on every shape, in both precisions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adafactor import Adafactor, schedules
from tests import inside, oracle
from tests.compare import SHAPES, TOLERANCE, error, gradients, start, trained

pytestmark = pytest.mark.usefixtures("backend")

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("row", oracle.TABLE_2.values(), ids=oracle.TABLE_2)
def test_every_row_of_table_2_equals_the_oracle(row: oracle.Row, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert error(row, shape, dtype, steps=50) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(37, 5), (5, 37), (3, 50), (101,), (4, 3, 6, 7)], ids=str)
@pytest.mark.parametrize("row", ["B", "D", "E", "O", "P"])
def test_cut_into_many_blocks_the_rows_still_equal_the_oracle(
    row: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.cut_into_chunks(monkeypatch, 24)
    axes = (2, 3) if len(shape) == 4 else None
    assert error(replace(oracle.TABLE_2[row], axes=axes), shape, dtype, steps=50) < TOLERANCE[dtype]


@pytest.mark.parametrize("row", oracle.TABLE_2.values(), ids=oracle.TABLE_2)
def test_every_row_equals_the_oracle_with_warm_up(row: oracle.Row) -> None:
    # float64 alone: with steps of 1e-7 the last digit of a float32 parameter hides the update
    assert error(row, (9, 7), torch.float64, s=schedules.with_warmup) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((6, 5, 3, 3), (0, 1)),  # a convolution
        ((4, 7, 9), (1, 2)),  # stacked layers
        ((9, 2, 7), (0, 2)),
        ((2, 3, 4, 5, 6), (3, 4)),
        ((5, 5, 5), (1, 2)),  # of equals the later
    ],
    ids=str,
)
def test_the_two_largest_axes_of_a_larger_tensor_are_factored(shape: tuple[int, ...], axes: tuple[int, int]) -> None:
    row = oracle.Row(estimator="outer", d=1.0, relative=True, multiplier=1.0, axes=axes)
    assert error(row, shape, torch.float64, axes=None) < 1e-10


@pytest.mark.parametrize("estimator", ["outer", "row", "column"])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0, 2), (2, 1)], ids=str)
def test_axes_can_be_named_by_hand(axes: tuple[int, int], estimator: str) -> None:
    row = oracle.Row(estimator=estimator, d=1.0, relative=True, multiplier=1.0, axes=axes)
    assert error(row, (4, 6, 5), torch.float64) < 1e-10
    negative = (axes[0] - 3, axes[1] - 3)
    assert error(row, (4, 6, 5), torch.float64, axes=negative) < 1e-10


@pytest.mark.parametrize("estimator", ["none", "outer", "row", "column"])
@pytest.mark.parametrize("momentum", ["gradient", "update", "direction"])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_ideas_combine(estimator: str, momentum: str, relative: bool) -> None:
    row = oracle.Row(estimator, 0.8, momentum, c=0.7, d=0.5, relative=relative, multiplier=1.0, weight_decay=0.3)
    assert error(row, (11, 13), torch.float64) < 1e-10
    assert error(row, (11, 13), torch.float32) < 1e-5


@pytest.mark.parametrize("by", ["rho", "alpha"])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
@pytest.mark.parametrize("shape", [(11, 13), (31,)], ids=str)
def test_weight_decay_is_by_what_is_said(shape: tuple[int, ...], relative: bool, by: str) -> None:
    row = oracle.Row("outer", d=0.5, relative=relative, multiplier=1.0, weight_decay=0.2, decay_by=by)
    for dtype, tolerance in TOLERANCE.items():
        assert error(row, shape, dtype) < tolerance
    if by == "alpha" and relative:  # the control
        assert error(row, shape, torch.float64, weight_decay_by="rho") > 1e-3


@pytest.mark.parametrize(("shape", "is_factored"), [((8, 9), True), ((7, 9), False), ((9, 7), False)], ids=str)
def test_a_matrix_with_an_axis_shorter_than_min_factored_is_unfactored(
    shape: tuple[int, ...], is_factored: bool
) -> None:
    assert error(replace(oracle.TABLE_2["O"], min_factored=8), shape, torch.float64) < 1e-10
    p = torch.nn.Parameter(torch.ones(shape))
    assert ("row" in Adafactor([p], min_factored=8).state[p]) == is_factored


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_row_b_is_torch_adam(beta1: float) -> None:
    x, grads = start((6, 4)), gradients((6, 4), 60)
    p = torch.nn.Parameter(torch.tensor(x))
    adam = torch.optim.Adam([p], lr=1e-3, betas=(beta1, 0.999), eps=0.0)
    for g in grads:
        p.grad = torch.tensor(g)
        adam.step()
    row = oracle.Row(beta1=beta1, beta2=0.999, multiplier=1e-3)
    torch.testing.assert_close(trained(row, x, grads, lambda t: 1.0), p.detach(), rtol=1e-12, atol=1e-14)


def test_algorithms_1_to_3_as_printed() -> None:
    x, grads = start((6, 4)), gradients((6, 4), 60)

    def alpha(t: int) -> float:
        return 0.1 * schedules.without_warmup(t)

    adam = oracle.algorithm_1(x, grads, alpha, 0.9, 0.999)
    np.testing.assert_allclose(oracle.algorithm_3(x, grads, alpha, 0.9, 0.999), adam, rtol=1e-12, atol=1e-14)
    for row, printed in [("B", adam), ("C", oracle.algorithm_2(x, grads, alpha, 0.999))]:
        ours = trained(oracle.TABLE_2[row], x, grads, schedules.without_warmup)
        np.testing.assert_allclose(ours.numpy(), printed, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(6, 4), (1, 5), (5, 1), (7,), ()], ids=str)
def test_the_defaults_are_algorithms_4_to_6_as_printed(shape: tuple[int, ...]) -> None:
    x, grads = start(shape), gradients(shape, 60)
    algorithm = oracle.algorithm_4 if len(shape) == 2 else oracle.algorithm_5
    p = torch.nn.Parameter(torch.tensor(x))
    optimizer = Adafactor([p])
    for g in grads:
        p.grad = torch.tensor(g)
        optimizer.step()
    np.testing.assert_allclose(p.detach().numpy(), algorithm(x, grads, **oracle.algorithm_6()), rtol=1e-12, atol=1e-14)


def test_the_comparison_sees_a_wrong_optimizer() -> None:
    """The control: another clip, decay or estimator than the oracle's is far outside every tolerance."""
    row = oracle.TABLE_2["O"]
    for wrong in (
        {"clip": 0.5},
        {"decay_rate": 0.7},
        {"factored": "row"},
        {"relative": False},
        {"eps": (1.0, 1e-3)},
    ):
        assert error(row, (9, 7), torch.float64, **wrong) > 1e-3, wrong
