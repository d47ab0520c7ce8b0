"""Tensors whose memory does not hold their values as they are: the right step, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from adafactor import Adafactor
from tests import inside
from tests.attack.helpers import random, refused


def negative(t: Tensor) -> Tensor:
    """The same values, kept with the other sign and a bit that says so: nothing but the bit tells."""
    lazy = torch._neg_view(-t)
    assert lazy.is_neg() and torch.equal(lazy, t)
    return lazy


def test_a_gradient_that_comes_out_of_complex_numbers_leads_downhill(any_backend: str) -> None:
    z = torch.tensor([1 + 2j, -0.5 + 0.3j, 0.2 - 1j])
    target = z * (0.36 - 0.9j)
    p = nn.Parameter(torch.tensor(0.5))
    optimizer = Adafactor([p], lr=0.05, relative=False, lr_decay=None, backend=any_backend)
    for _ in range(60):
        optimizer.zero_grad()
        (z * torch.complex(torch.tensor(0.36), p).conj() - target).abs().square().mean().backward()
        assert p.grad is not None and p.grad.is_neg()
        optimizer.step()
    assert p.item() == pytest.approx(0.9, abs=0.06)


def test_a_gradient_may_become_lazily_negated_in_mid_run(any_backend: str) -> None:
    p, q = (nn.Parameter(random((64, 48), 0)) for _ in range(2))
    lazy, plain = (Adafactor([x], backend=any_backend) for x in (p, q))
    for i in range(6):
        g = random((64, 48), i)
        p.grad, q.grad = negative(g) if i in (3, 4) else g, g.clone()
        lazy.step()
        plain.step()
        assert torch.equal(p, q)


class Plain(Tensor):
    """A subclass that changes nothing."""


def wrapped(t: Tensor) -> Tensor:
    """A wrapper: two tensors that go through every operation together, and no memory of its own."""
    return TwoTensor(t.clone(), t.clone())


@pytest.mark.parametrize("kind", ["gradient of a subclass", "both of a subclass", "wrappers"])
def test_a_subclass_of_tensor_steps_in_eager_or_is_refused_by_a_backend_that_was_named(
    kind: str, any_backend: str
) -> None:
    x, g, expected = random((6, 4), 0), random((6, 4), 1), nn.Parameter(random((6, 4), 0))
    make = wrapped if "wrapper" in kind else lambda t: t.as_subclass(Plain)
    p = nn.Parameter(x.clone() if kind.startswith("gradient") else make(x.clone()))
    p.grad, expected.grad = make(g), g
    message = refused(lambda: Adafactor([("weight", p)], backend=any_backend).step(), ValueError)
    if message is not None:
        assert any_backend in inside.COMPILED and "weight" in message and "a subclass of Tensor" in message
        return
    Adafactor([expected], backend="eager").step()
    with torch.no_grad():
        assert torch.equal(getattr(p, "a", p).as_subclass(Tensor), expected)
