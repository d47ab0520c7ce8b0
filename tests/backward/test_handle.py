"""The limit of the norm, and copies."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from adafactor import step_in_backward
from adafactor.backward import handle
from tests.backward.loops import STEPS, Fails, Run, grads, loss_of, plain
from tests.exact import assert_same, copy_of


def limited(limit: float, steps: int = STEPS) -> tuple[Run, list[float]]:
    """The ordinary loop with what `max_norm` is to do, and the norms."""
    run, norms = Run(), [0.0]
    for step in range(steps):
        loss_of(run.model, step).backward()
        found = [g for g in grads(run.model) if g is not None]
        factor = min(1.0, limit / (norms[-1] + 1e-6))
        norms.append(get_total_norm(found).item())
        for g in found:
            g.mul_(factor)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run, norms[1:]


@pytest.mark.parametrize(("limit", "accumulate"), [(1.0, 1), (math.inf, 1), (1.0, 2)])
def test_max_norm_scales_by_the_norm_of_the_step_before(limit: float, accumulate: int) -> None:
    """Also with one backward only of two, so that all gradients wait for the optimizer."""
    expected, norms = limited(limit)
    assert min(norms) > 1.0, "else nothing is limited"
    inside = Run().attached(max_norm=limit, accumulate=accumulate)
    assert inside.handle.norm is None
    for step in range(STEPS):
        inside.train(range(step, step + 1))
        assert inside.handle.norm is not None
        assert inside.handle.norm.item() == pytest.approx(norms[step], rel=1e-5)
    for name, value in copy_of(inside.model).items():
        torch.testing.assert_close(value, expected.model.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(inside.model.embedding.weight, Run().train().model.embedding.weight) == (limit == math.inf)


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_a_bad_gradient_does_not_make_the_norm_bad() -> None:
    model, optimizer = plain()
    handle = step_in_backward(model, optimizer, max_norm=1.0)
    x = torch.ones(6)
    x[2] = math.inf
    model(x).sum().backward()
    optimizer.step()
    assert handle.norm is not None and 0 < handle.norm.item() < math.inf


def test_a_backward_that_failed_is_not_in_the_norm() -> None:
    model, optimizer = plain()
    handle = step_in_backward(model, optimizer, max_norm=math.inf)
    with pytest.raises(MemoryError):
        model[2](Fails.apply(model[:2](1000 * torch.ones(6)))).square().sum().backward()
    optimizer.zero_grad()
    loss = model(torch.ones(6)).sum()
    expected = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
    loss.backward()
    optimizer.step()
    assert handle.norm is not None and handle.norm.item() == pytest.approx(expected.norm().item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(3000, 700), (2_100_000,), (1, 1_100_000), ()], ids=str)
def test_the_norm_of_bfloat16_gradients_is_exact_enough(shape: tuple[int, ...]) -> None:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert handle._norm(g).dtype == torch.float32
    assert handle._norm(g).item() == pytest.approx(g.double().norm().item(), rel=1e-4)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_is_not_attached_and_takes_the_same_steps(copied: Callable[[Any], Any]) -> None:
    inside = Run().attached().train(range(2))
    loss_of(inside.model, 2).backward()  # in mid-step, when gradients are gone
    other = Run()
    other.model, other.optimizer = copied((inside.model, inside.optimizer))
    inside.optimizer.step()
    inside.train(range(3, 5))
    other.train(range(3, 5))
    assert_same(copy_of(other.model), copy_of(inside.model))
    loss_of(other.model, 5).backward()
    assert clip_grad_norm_(other.model.parameters(), 1.0) > 0
    step_in_backward(other.model, other.optimizer)
