"""The metrics of a report are what the steps did."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from adafactor.core.report import rms
from tests.diagnostics.runs import Perceptron, regression, run


@pytest.mark.parametrize("clip", [1.0, 0.2, None])
@pytest.mark.parametrize("relative", [True, False])
def test_the_relative_change_is_what_the_step_did(relative: bool, clip: float | None) -> None:
    model = Perceptron().double()
    optimizer = Adafactor(
        model.named_parameters(), clip=clip, relative=relative, lr=1e-3, lr_decay=None, backend="eager"
    )
    for t in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        x = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        (model(x).square().sum() * 10.0**t).backward()
        optimizer.step()
        for record, p, old in zip(optimizer.report(), model.parameters(), before, strict=True):
            size = old if relative else p.detach()  # absolute steps leave RMS(X) to the report
            expected = float((p.detach() - old).norm() / size.norm())
            assert record.relative_change == pytest.approx(expected, rel=1e-9)
            assert record.rms_parameter == pytest.approx(float(size.square().mean().sqrt()), rel=1e-12)


def test_a_parameter_of_zeros_changes_infinitely_and_one_without_gradient_not_at_all() -> None:
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    p.grad, q.grad = torch.ones(3), torch.zeros(3)
    optimizer = Adafactor([p, q])
    optimizer.step()
    assert [record.relative_change for record in optimizer.report()] == [math.inf, 0.0]


def test_a_report_changes_nothing_and_counts_all_steps() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.parameters())
    run(optimizer, regression(model), steps=3, every=1)
    first, again = optimizer.report(), optimizer.report()
    assert first == again and first.step == 3 and [record.steps for record in first] == [3] * 4
    assert all(0 <= record.clip_rate <= 1 for record in first), "also after a watch"


def test_a_report_prints_as_a_table_of_a_hundred_columns_with_three_digits() -> None:
    names = ["w", "model.decoder.layers.11." + 4 * "a_very_long_name." + "weight", "cube", "bias", "scalar"]
    shapes: list[tuple[int, ...]] = [(8, 6), (1_000_000, 1), (3, 4, 5, 6), (5,), ()]
    params = [nn.Parameter(torch.full(shape, 0.123456)) for shape in shapes]
    optimizer = Adafactor(zip(names, params, strict=True))
    assert "nan" not in str(optimizer.report())
    for p in params[:4]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    title, head, *rows = (text := str(optimizer.report())).splitlines()
    assert title == "step 1: 5 tensors" and len(rows) == 5 and repr(optimizer.report()) == text
    assert head.split() == ["parameter", "shape", "RMS(U)", "clipped", "step", "size", "RMS(X)", "change"]
    assert rows[0].split() == ["w", "8", "x", "6", "1", "0%", "0.00123", "0.123", "0.01"]
    assert rows[1].startswith("model.decoder.") and rows[1].split()[0].endswith("name.weight")
    assert rows[4].split() == ["scalar", "scalar", "-", "-", "-", "-", "-"]
    assert len({len(line) for line in (head, *rows)}) == 1 and len(head) <= 100
    assert isinstance(optimizer.report(), list) and optimizer.report()[0].name == "w"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_of_a_parameter_is_that_of_a_sum_in_double(dtype: torch.dtype) -> None:
    scaled = torch.randn(700, 500).mul_(torch.logspace(-3, 3, 500)).to(dtype)
    wide, ones = scaled.view(100, 7, 500), torch.full((10_000_000,), 0.1, dtype=dtype)
    for x in (scaled, scaled.t(), wide.transpose(0, 1), wide[:, ::2], scaled[0, 0], scaled[:3, 0], ones):
        expected = float(x.double().square().mean().sqrt())
        assert rms(x) == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert math.isnan(rms(torch.empty(0)))
