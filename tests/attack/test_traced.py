"""A step that is looked at, operation by operation: a graph of it has the update, and later steps are as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from adafactor import Adafactor
from tests import inside
from tests.attack.helpers import random

SHAPE = (6, 4)
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"factored": False, "weight_decay": 0.1},
    {"beta1": 0.9, "momentum_of": "gradient"},
]


class Writes(TorchDispatchMode):
    """Counts the operations that write in place."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Every operation comes here."""
        self.count += func._schema.is_mutable
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_graph_of_a_training_step_has_the_update(mode: Any, keywords: dict[str, Any], any_backend: str) -> None:
    def train(x: Tensor, g: Tensor) -> Tensor:
        x.grad = g
        optimizer = Adafactor([x], lr_decay=None, backend=any_backend, **keywords)
        optimizer.step()
        optimizer.step()
        return x

    graph = make_fx(train, tracing_mode=mode)(random(SHAPE, 0), random(SHAPE, 1))
    x, g = random(SHAPE, 2) * 3, random(SHAPE, 3)
    torch.testing.assert_close(graph(x.clone(), g), train(x.clone(), g), rtol=1e-6, atol=1e-7)


def test_a_mode_sees_what_a_step_writes_and_the_next_step_is_compiled_again(backend: str) -> None:
    p, alone = (nn.Parameter(random(SHAPE, 0)) for _ in range(2))
    optimizer, other = (Adafactor([q], backend=backend) for q in (p, alone))
    for i in range(3):
        p.grad = alone.grad = random(SHAPE, i)
        other.step()
        if i != 1:
            optimizer.step()
            continue
        before = inside.prepared(optimizer)
        with Writes() as writes:
            optimizer.step()
        assert writes.count > 0 and inside.prepared(optimizer) is before
    torch.testing.assert_close(p, alone, rtol=1e-6, atol=1e-7)
    assert optimizer.report()[0].steps == 3


def test_a_step_inside_functionalize_is_taken(any_backend: str) -> None:
    def train(x: Tensor, g: Tensor) -> Tensor:
        x.grad = g
        Adafactor([x], backend=any_backend).step()
        return x

    x, g = random(SHAPE, 0), random(SHAPE, 1)
    found = torch.func.functionalize(train)(x.clone(), g)
    torch.testing.assert_close(found, train(x.clone(), g), rtol=1e-6, atol=1e-7)
