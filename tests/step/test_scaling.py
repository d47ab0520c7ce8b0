"""What a GradScaler leaves on the optimizer: a scale, and whether it found an infinity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.core import sums
from adafactor.core.grad_scaler import Scaling

pytestmark = pytest.mark.usefixtures("backend")


SHAPES = [(37, 20), (33,), (4, 6, 5)]


def everything(optimizer: Adafactor) -> list[Tensor]:
    """Parameters and state."""
    return [t.detach() for p in optimizer.param_groups[0]["params"] for t in (p, *optimizer.state[p].values())]


def set_gradients(params: list[Tensor], seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = scale * torch.randn(p.shape, generator=generator)


def test_the_scale_is_taken_out_and_an_infinity_stops_the_step() -> None:
    kinds: list[dict[str, Any]] = [{}, {"beta1": 0.9, "momentum_of": "gradient"}]
    for keywords in kinds:
        plain, scaled = ([torch.ones(shape, requires_grad=True) for shape in SHAPES] for _ in range(2))
        ordinary, optimizer = Adafactor(plain, **keywords), Adafactor(scaled, **keywords)
        for number, found in enumerate((0.0, 1.0, 0.0)):
            set_gradients(scaled, number, 1024.0)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor([found])  # type: ignore[attr-defined]
            if not found:
                set_gradients(plain, number, 1.0)
                ordinary.step()
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(everything(ordinary), everything(optimizer), strict=True))


def test_an_infinity_that_the_scaler_has_found_raises_nothing() -> None:
    good, bad = (torch.ones(8, 6, requires_grad=True) for _ in range(2))
    optimizer = Adafactor([good, bad], on_nonfinite="raise")
    good.grad, bad.grad = torch.ones(8, 6), torch.full((8, 6), float("inf"))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(good, torch.ones(8, 6)) and torch.equal(bad, torch.ones(8, 6))
    assert [record.skipped for record in optimizer.report()] == [0, 0]


def test_gradients_that_were_unscaled_before_are_left_alone() -> None:
    g = torch.ones(3)
    assert Scaling(None, torch.zeros(1)).unscale_([g], may_wait=True) and torch.equal(g, torch.ones(3))


def test_where_the_host_may_not_wait_gradients_become_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "on_host", lambda t: False)
    for found, expected in ((0.0, 0.5), (2.0, torch.nan)):
        g = torch.ones(3)
        assert Scaling(torch.tensor(2.0), torch.tensor([found])).unscale_([g], may_wait=False)
        torch.testing.assert_close(g, torch.full((3,), expected), equal_nan=True)
