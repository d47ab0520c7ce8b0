"""Subclasses of Tensor: the right step, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from adafactor import Adafactor
from tests import inside
from tests.cases import normal


class Plain(Tensor):
    """A subclass that changes nothing."""


def wrapped(t: Tensor) -> Tensor:
    """A wrapper: two tensors that go through every operation together, and no memory of its own."""
    return TwoTensor(t.clone(), t.clone())


@pytest.mark.parametrize("kind", ["gradient of a subclass", "both of a subclass", "wrappers"])
def test_a_subclass_of_tensor_steps_in_eager_or_is_refused_by_a_backend_that_was_named(
    kind: str, any_backend: str
) -> None:
    x, g, expected = normal((6, 4), 0), normal((6, 4), 1), nn.Parameter(normal((6, 4), 0))
    make = wrapped if "wrapper" in kind else lambda t: t.as_subclass(Plain)
    p = nn.Parameter(x.clone() if kind.startswith("gradient") else make(x.clone()))
    p.grad, expected.grad = make(g), g
    optimizer = Adafactor([("weight", p)], backend=any_backend)
    if any_backend in inside.COMPILED:
        with pytest.raises(ValueError, match="weight.*a subclass of Tensor"):
            optimizer.step()
        return
    optimizer.step()
    Adafactor([expected], backend="eager").step()
    with torch.no_grad():
        assert torch.equal(getattr(p, "a", p).as_subclass(Tensor), expected)
