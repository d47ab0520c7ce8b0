"""Every row of Table 2 is the oracle's, on every shape, in both precisions, and the oracle's rows are what is printed.

Each step of every keyword beside the paper's is compared in `tests/test_properties.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adafactor import Adafactor, schedules
from tests import oracle
from tests.compare import SHAPES, TOLERANCE, error, gradients, start, trained

pytestmark = pytest.mark.usefixtures("backend")

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


@DTYPES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("row", oracle.TABLE_2.values(), ids=oracle.TABLE_2)
def test_every_row_of_table_2_equals_the_oracle(row: oracle.Row, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert error(row, shape, dtype, steps=50) < TOLERANCE[dtype]


@pytest.mark.parametrize("row", oracle.TABLE_2.values(), ids=oracle.TABLE_2)
def test_every_row_equals_the_oracle_with_warm_up(row: oracle.Row) -> None:
    # float64 alone: with steps of 1e-7 the last digit of a float32 parameter hides the update
    assert error(row, (9, 7), torch.float64, s=schedules.with_warmup) < TOLERANCE[torch.float64]


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


@pytest.mark.parametrize(
    "wrong",
    [{"clip": 0.5}, {"decay_rate": 0.7}, {"factored": "row"}, {"relative": False}, {"eps": (1.0, 1e-3)}],
    ids=str,
)
def test_the_comparison_sees_a_wrong_optimizer(wrong: dict[str, Any]) -> None:
    """The control: another clip, decay or estimator than the oracle's is far outside every tolerance."""
    assert error(oracle.TABLE_2["O"], (9, 7), torch.float64, **wrong) > 1e-3
