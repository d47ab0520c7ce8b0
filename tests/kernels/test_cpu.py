"""The backend in C++: many tensors at once, threads, forks, memory, and what it does not take."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from benchmarks.measure import extra_bytes
from tests import inside
from tests.exact import assert_same, snapshot
from tests.reference import Expected

# The first ones are shared by all threads, the others are one thread's alone.
SHAPES = [
    (700, 301),
    (99, 2100),
    (128, 96, 3, 3),
    (3, 300, 200),
    (150_000,),
    (64, 3, 3, 3),
    (5, 40, 30),
    (7,),
    (),
    (1, 9),
]


def parameters(seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).requires_grad_() for shape in SHAPES]


def train(params: list[Tensor], steps: int = 3, **keywords: object) -> Adafactor:
    optimizer = Adafactor(params, backend="cpu", **keywords)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.step()
    return optimizer


def test_with_many_tensors_the_result_does_not_depend_on_the_number_of_threads(threads: Callable[[int], None]) -> None:
    """More threads than cores, and more tensors than threads."""
    results = []
    for count in (1, 2, 8):
        threads(count)
        params = parameters() + [torch.ones(8 + i, 3 * i + 1, requires_grad=True) for i in range(60)]
        results.append(snapshot(train(params, beta1=0.9)))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_tensors_that_step_together_may_have_taken_different_numbers_of_steps() -> None:
    params = parameters()
    optimizer = Adafactor(params, backend="cpu")
    random = torch.Generator().manual_seed(1)
    for i in range(5):
        for j, p in enumerate(params):
            g = torch.randn(p.shape, generator=random)
            p.grad = None if i < 2 and j % 3 == 0 else g
        expected = Expected(optimizer)
        optimizer.step()
        assert not expected.problem()
    assert {record.steps for record in optimizer.report()} == {3, 5}


def test_figures_are_kept_when_a_tensor_joins_another_bucket_and_comes_back() -> None:
    easy = torch.ones(30, 20, requires_grad=True)
    gaps = torch.ones(30, 40)[:, ::2].requires_grad_()  # which is left to eager PyTorch
    optimizer = Adafactor([easy, gaps])
    for i in range(6):
        easy.grad = torch.full((30, 20), 1.0 + i)
        gaps.grad = torch.ones(30, 20) if i in (2, 3) else None
        optimizer.step()
    assert [record.steps for record in optimizer.report()] == [6, 2]


def test_a_step_finds_the_sum_of_squares_that_the_last_one_left() -> None:
    params = parameters()
    optimizer = train(params)
    assert all(math.isfinite(inside.carried_squares(optimizer, p)) for p in params)


def test_a_step_reserves_vectors_only() -> None:
    """Measured in a process of its own, by the system's count of resident pages."""
    extra = extra_bytes("adafactor", [(4096, 4096)], "float32")
    if extra is None:
        pytest.skip("the system does not count the peak of a process")
    assert extra < 0.05 * 4 * 4096**2


def test_two_optimizers_in_two_threads_do_not_disturb_each_other() -> None:
    alone = parameters(seed=5)
    train(alone, steps=20)
    both = [parameters(seed=5), parameters(seed=5)]
    workers = [threading.Thread(target=train, args=(params, 20)) for params in both]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_same(both, [alone, alone])


def test_what_it_cannot_walk_is_named_and_left_to_eager_in_silence() -> None:
    wide = torch.ones(6, 8)
    p = wide[:, ::2].detach().requires_grad_()
    p.grad = wide[:, 1::2]
    with pytest.raises(ValueError, match=r"cannot step weight \(shape \(6, 4\)\): it has gaps in memory"):
        Adafactor([("weight", p)], backend="cpu").step()
    Adafactor([("weight", p)]).step()  # a warning would be an error


def test_a_model_made_double_after_its_optimizer_still_takes_the_right_steps() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = Adafactor(model.parameters(), beta1=0.9)
    model.double()
    for step in range(3):
        model.weight.grad = torch.arange(12.0, dtype=torch.float64).view(3, 4)
        expected = Expected(optimizer)
        optimizer.step()
        assert not step or not expected.problem()  # the first one turns the state into float64


def test_a_gradient_of_another_shape_is_refused() -> None:
    p = torch.ones(4, 5, requires_grad=True)
    p.grad = torch.ones(4, 5)
    optimizer = Adafactor([("weight", p)])
    p.data = torch.ones(2, 5)
    with pytest.raises(ValueError, match=r"weight of shape \(2, 5\) has a gradient of shape \(4, 5\)"):
        optimizer.step()
