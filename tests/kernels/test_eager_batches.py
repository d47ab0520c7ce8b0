"""Many parameters side by side, as on a device: each steps as it would alone, whatever its neighbours do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests import inside

SHAPES = [(6, 5), (40, 30), (7,), (64,), (3, 12, 10), (16, 8, 3, 3), (5, 1), (), (9, 20)]
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"beta1": 0.9},
    {"beta1": 0.9, "momentum_of": "gradient", "beta2": 0.99},
    {"factored": "row", "weight_decay": 0.1},
    {"factored": "column", "relative": False, "lr": 1e-3},
    {"factored": False, "clip": None},
    {"rounding": "stochastic", "maximize": True},
    {"rounding": "kahan"},
]


def trained(keywords: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], Adafactor]:
    """Five steps of which one lacks a gradient and one has a NaN."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in SHAPES]
    optimizer = Adafactor(params, backend="eager", **keywords)
    for step in range(5):
        for i, p in enumerate(params):
            g = torch.randn(p.shape, generator=draw).to(dtype)
            if step == 2 and i in (1, 3, 5):
                g.view(-1)[0] = torch.nan
            p.grad = None if step == 3 and i % 3 == 0 else g
        optimizer.step()
    return [p.detach() for p in params], optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_parameters_side_by_side_step_as_they_would_alone(
    keywords: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of skipped steps
        alone, optimizer = trained(keywords, dtype)
        records = optimizer.report()
        inside.keep_scalars_on_the_device(monkeypatch)
        together, other = trained(keywords, dtype)
        both = list(zip(records, other.report(), strict=True))
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2**-7, 2**-9)
    torch.testing.assert_close(together, alone, rtol=rtol, atol=atol)
    assert sum(a.skipped for a, _ in both) == 3
    for a, b in both:
        assert (a.steps, a.skipped, a.state_bytes) == (b.steps, b.skipped, b.state_bytes)
        assert b.step_size == pytest.approx(a.step_size, rel=1e-3) and b.beta2 == pytest.approx(a.beta2)
        assert b.rms_update == pytest.approx(a.rms_update, rel=1e-3 if dtype == torch.float32 else 0.05)
