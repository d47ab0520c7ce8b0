"""What the eager kernel promises: no host waits, and bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adafactor import Adafactor
from studies.temporaries import Largest
from tests import inside
from tests.cases import normal
from tests.reference import Expected

KEYWORDS: list[dict[str, Any]] = [
    {},
    {"factored": False},
    {"factored": "row", "beta1": 0.9},
    {"factored": "column", "beta1": 0.9, "momentum_of": "gradient", "weight_decay": 0.1},
]


def test_a_step_asks_nothing_of_a_device() -> None:
    """On the meta device every question to the host (`item`, `bool`) raises."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4), torch.nn.Conv2d(4, 4, 3)).to("meta")
    for keywords in KEYWORDS:
        optimizer = Adafactor(model.parameters(), **keywords)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()
    with pytest.raises(Exception, match="meta"):
        bool(next(model.parameters()).sum() > 0)  # the control


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keywords", [*KEYWORDS, {"rounding": "stochastic", "maximize": True}], ids=str)
@pytest.mark.filterwarnings("ignore:.*its gradient is not finite")
def test_parameters_side_by_side_as_on_a_device_step_as_each_would_alone(
    keywords: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.keep_scalars_on_the_device(monkeypatch)
    shapes = [(6, 5), (40, 30), (7,), (64,), (3, 12, 10), (16, 8, 3, 3), (5, 1), (), (9, 20)]
    params = [normal(shape, i, dtype).requires_grad_() for i, shape in enumerate(shapes)]
    optimizer = Adafactor(params, backend="eager", **keywords)
    for t in range(5):
        for i, p in enumerate(params):
            g = normal(shapes[i], 10 * t + i, dtype)
            if t == 2 and i in (1, 3, 5):
                g.view(-1)[0] = torch.nan
            p.grad = None if t == 3 and i % 3 == 0 else g
        expected = Expected(optimizer)
        optimizer.step()
        assert not (problem := expected.problem()), problem
    assert sum(record.skipped for record in optimizer.report()) == 3


@pytest.mark.parametrize(
    ("dtype", "rounding", "width"),
    [
        (torch.float32, "nearest", 4),
        (torch.bfloat16, "nearest", 4),
        (torch.bfloat16, "kahan", 4),
        (torch.bfloat16, "stochastic", 8),  # elements are numbered in int64
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3000, 2500), (7_500_000,)], ids=str)
def test_a_step_allocates_at_most_a_block_at_a_time(
    shape: tuple[int, ...], dtype: torch.dtype, rounding: str, width: int
) -> None:
    p = torch.ones(shape, dtype=dtype, requires_grad=True)
    optimizer = Adafactor([p], backend="eager", rounding=rounding)
    p.grad = torch.ones(shape, dtype=dtype)
    with Largest() as largest:
        optimizer.step()
    assert 0 < largest.bytes <= width * inside.chunk()
    assert p.numel() > 4 * inside.chunk(), "the control: there are several blocks"
