"""What a GradScaler leaves on the optimizer: a scale, and whether it found an infinity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.core import sums
from adafactor.core.grad_scaler import Scaling

pytestmark = pytest.mark.usefixtures("backend")


def stepped(scale: float | None, found: float) -> Tensor:
    """A parameter after a step with gradients of this scale."""
    p = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    optimizer = Adafactor([p])
    p.grad = torch.linspace(1, 2, 12).view(3, 4) * (scale or 1)
    if scale is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor([found])  # type: ignore[attr-defined]
    optimizer.step()
    return p.detach()


def test_the_scale_is_taken_out_and_an_infinity_stops_the_step() -> None:
    assert torch.equal(stepped(1024.0, 0.0), stepped(None, 0.0))
    assert torch.equal(stepped(1024.0, 1.0), torch.linspace(-1, 1, 12).view(3, 4))


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
