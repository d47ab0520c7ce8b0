"""Every row of Table 2 is the oracle's, in Triton, on every shape."""

from __future__ import annotations

import pytest
import torch

from tests import oracle
from tests.compare import SHAPES, TOLERANCE, error

SHORT = 3e-5  # in a few steps a parameter does not go far beside its last digit; plain torch's error is the same


@pytest.mark.parametrize("shape", [SHAPES["tall"], SHAPES["vector"]], ids=str)
@pytest.mark.parametrize("row", oracle.TABLE_2.values(), ids=oracle.TABLE_2)
def test_every_row_of_table_2_equals_the_oracle(row: oracle.Row, shape: tuple[int, ...]) -> None:
    assert error(row, shape, torch.float32, steps=3, backend="triton") < SHORT


@pytest.mark.parametrize("row", oracle.TABLE_2.values(), ids=oracle.TABLE_2)
def test_in_double_precision_too(row: oracle.Row) -> None:
    assert error(row, (9, 7), torch.float64, steps=3, backend="triton") < TOLERANCE[torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("row", oracle.TABLE_2.values(), ids=oracle.TABLE_2)
def test_for_many_steps(row: oracle.Row, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert error(row, shape, dtype, steps=30, backend="triton") < TOLERANCE[dtype]


@pytest.mark.parametrize("estimator", ["none", "outer", "row", "column"])
@pytest.mark.parametrize("momentum", ["gradient", "update"])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_ideas_combine(estimator: str, momentum: str, relative: bool) -> None:
    row = oracle.Row(estimator, 0.8, momentum, c=0.7, d=0.5, relative=relative, multiplier=1.0, weight_decay=0.3)
    assert error(row, (11, 13), torch.float32, steps=4, backend="triton") < SHORT
