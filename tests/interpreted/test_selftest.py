"""The self-test that `backend="auto"` relies on finds nothing wrong with kernels that are right."""

from __future__ import annotations

import pytest
import torch

from adafactor import Adafactor
from adafactor.check import selftest
from adafactor.check.selftest import BF16, CASES, FP32, VARIANTS, TensorSpec, Variant

TENSORS = (
    TensorSpec((9, 7)),
    TensorSpec((6, 5), "transposed"),
    TensorSpec((32, 16, 3, 3), "channels last"),
    TensorSpec((11, 384)),
    TensorSpec((32, 130)),
    TensorSpec((5,)),
)
ROUNDED = [v for v in VARIANTS if v.momentum_dtype != "float32" or v.rounding == "stochastic"]


@pytest.mark.parametrize("variant", [*ROUNDED, Variant(BF16, FP32, "gradient", "kahan", "int8")], ids=str)
def test_it_finds_nothing_where_v_is_kept_whole(variant: Variant) -> None:
    """There, Triton leaves to eager PyTorch what does not lie row by row."""
    found = selftest.examine(Adafactor, torch.device("cpu"), variant, TENSORS, {"whole": CASES["unfactored"]})
    assert [str(finding) for finding in found] == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_finds_nothing(variant: Variant) -> None:
    assert [str(found) for found in selftest.examine(Adafactor, torch.device("cpu"), variant, TENSORS)] == []
