"""Memory that is not given back: over many steps, many optimizers, and parameters that come and go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import Parameter

from adafactor import Adafactor
from tests import inside
from tests.faults.launch import found

MB = 1024
TIMES = {"steps": 10_000, "optimizers": 1000, "replaced": 50}
BOUNDS = {"steps": 8 * MB, "optimizers": 8 * MB, "replaced": 16 * MB}  # 50 that are never freed would be 100 MB or more
BACKENDS = pytest.mark.parametrize("backend", inside.HERE)


@pytest.fixture(scope="module", params=inside.HERE)
def grown(request: pytest.FixtureRequest) -> dict[str, int]:
    """By how many kB the memory of a process has grown."""
    kilobytes: dict[str, int] = found("grown", request.param, *(f"{what}={times}" for what, times in TIMES.items()))
    print(request.param, kilobytes)
    return kilobytes


@pytest.mark.parametrize("what", TIMES)
def test_memory_does_not_grow(grown: dict[str, int], what: str) -> None:
    """Over many steps, over many optimizers, and over many replacements of a parameter of 2 MB."""
    assert grown[what] < BOUNDS[what]


@BACKENDS
def test_parameters_are_freed_with_the_model_and_the_optimizer(backend: str) -> None:
    """At once, as with torch's optimizers: on a GPU, until the garbage collector comes, this would be its memory."""
    for _ in range(2):  # the first time is for imports and compiled code
        p = Parameter(torch.randn(64, 64))
        optimizer = Adafactor([p], backend=backend)
        for _ in range(2):
            p.grad = torch.randn(64, 64)
            optimizer.step()
        gc.collect()
        gc.disable()
        try:
            parameter, gradient, row = map(weakref.ref, (p, p.grad, optimizer.state[p]["row"]))
            del p, optimizer
            left = [name for name, ref in zip("XGR", (parameter, gradient, row), strict=True) if ref() is not None]
        finally:
            gc.enable()
    assert not left


@BACKENDS
def test_a_parameter_that_has_been_replaced_is_freed_with_the_next_step(backend: str) -> None:
    """As in densifying and pruning, where the new one takes over the state."""
    p = Parameter(torch.randn(64, 64))
    optimizer = Adafactor([p], backend=backend)
    p.grad = torch.randn(64, 64)
    optimizer.step()
    new = Parameter(p.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(p)
    gone = weakref.ref(p)
    del p
    new.grad = torch.randn(64, 64)
    optimizer.step()
    gc.collect()
    assert gone() is None
    assert float(optimizer.state[new]["step"]) == 2
