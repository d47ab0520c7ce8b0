"""The backend in C++: its own promises besides the paper's, which `conftest.backend` asks of both."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from benchmarks.measure import extra_bytes
from tests import inside

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
Threads = Callable[[int], None]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in SHAPES]


def train(params: list[Tensor], steps: int = 3, **keywords: object) -> Adafactor:
    optimizer = Adafactor(params, backend="cpu", **keywords)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"beta1": 0.9},
        {"beta1": 0.9, "momentum_of": "gradient", "momentum_dtype": "int8"},
        {"beta1": 0.9, "momentum_of": "direction", "weight_decay": 0.1, "weight_decay_by": "alpha"},
        {"rounding": "stochastic"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_result_does_not_depend_on_the_number_of_threads(
    keywords: dict[str, object], dtype: torch.dtype, threads: Threads
) -> None:
    """More threads than cores, many tensors."""
    results = []
    for count in (1, 2, 8):
        threads(count)
        params = parameters(dtype) + [torch.ones(8 + i, 3 * i + 1, requires_grad=True) for i in range(60)]
        optimizer = train(params, steps=4, **keywords)
        results.append([t for p, state in optimizer.state.items() for t in (p.detach(), *state.values())])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_a_step_that_stops_to_look_is_the_whole_step_to_the_bit(dtype: torch.dtype, relative: bool) -> None:
    together, apart = parameters(dtype), parameters(dtype)
    at_once = train(together, weight_decay=0.1, relative=relative)
    in_turn = train(apart, weight_decay=0.1, relative=relative, on_nonfinite="raise")
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    records = [[replace(record, settings=None) for record in run.report()] for run in (at_once, in_turn)]  # type: ignore[arg-type]
    assert records[0] == records[1]


def test_tensors_that_step_together_may_have_taken_different_numbers_of_steps() -> None:
    ends = []
    for backend in ("cpu", "eager"):
        params = parameters()
        optimizer = Adafactor(params, backend=backend)
        random = torch.Generator().manual_seed(1)
        for i in range(5):
            for j, p in enumerate(params):
                g = torch.randn(p.shape, generator=random)
                p.grad = None if i < 2 and j % 3 == 0 else g
            optimizer.step()
        ends.append([p.detach() for p in params])
        assert {record.steps for record in optimizer.report()} == {3, 5}
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_report_is_of_the_last_step_whichever_way_the_steps_went() -> None:
    reports = []
    for backend in ("cpu", "eager"):
        p = torch.linspace(0.5, 1.5, 600).view(30, 20).requires_grad_()
        optimizer = Adafactor([p], backend=backend)
        for i in range(6):
            optimizer.param_groups[0]["on_nonfinite"] = "raise" if i in (2, 5) else "skip"  # goes walk by walk
            torch.manual_seed(i)
            p.grad = torch.randn(30, 20)
            optimizer.step()
        reports.append(optimizer.report()[0])
    assert reports[0].steps == reports[1].steps == 6 and reports[0].beta2 == reports[1].beta2
    assert reports[0].rms_update == pytest.approx(reports[1].rms_update, rel=1e-6)


def test_figures_are_kept_when_a_tensor_joins_another_bucket_and_comes_back() -> None:
    easy = torch.ones(30, 20, requires_grad=True)
    gaps = torch.ones(30, 40)[:, ::2].requires_grad_()  # which is left to eager PyTorch
    optimizer = Adafactor([easy, gaps])
    for i in range(6):
        easy.grad = torch.full((30, 20), 1.0 + i)
        gaps.grad = torch.ones(30, 20) if i in (2, 3) else None
        optimizer.step()
    assert [record.steps for record in optimizer.report()] == [6, 2]


CARRIED = [
    {},
    {"beta1": 0.9},
    {"beta1": 0.9, "momentum_of": "gradient", "momentum_dtype": "bfloat16"},
    {"factored": "row", "weight_decay": 0.1},
    {"rounding": "stochastic"},
    {"rounding": "kahan"},
]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keywords", CARRIED, ids=str)
@pytest.mark.parametrize("shape", [(301, 200), (90, 80, 3, 3), (40_000,)], ids=str)
def test_the_sum_of_squares_that_is_carried_over_is_the_one_that_is_read(
    shape: tuple[int, ...], keywords: dict[str, object], dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    """To the bit, so that a run that was loaded goes on as if it had not stopped."""
    ends = []
    for forget in (False, True):
        p = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
        p.grad_dtype = None
        optimizer = Adafactor([p], backend="cpu", **keywords)  # type: ignore[arg-type]
        for t in range(5):
            p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(t)).to(grad_dtype)
            if forget:
                inside.forget(optimizer)
            optimizer.step()
            assert math.isfinite(inside.carried_squares(optimizer, p)), "it was not found again"
        ends.append(p.detach())
    assert torch.equal(*ends)


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
    assert all(torch.equal(a, b) for params in both for a, b in zip(alone, params, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.filterwarnings("ignore:os.fork")  # JAX's, where another test has imported it
def test_a_forked_process_can_step_after_its_parent_did(threads: Threads) -> None:
    threads(2)
    params, twins = parameters(), parameters()
    optimizer, expected = train(params), train(twins)
    expected.step()
    child = os.fork()
    if child == 0:  # torch's own threads do not survive a fork, so the child only steps and compares small numbers
        optimizer.step()
        os._exit(0 if all(p.tolist() == q.tolist() for p, q in zip(params, twins, strict=True)) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_it_cannot_walk_is_named_and_left_to_eager_in_silence() -> None:
    wide = torch.ones(6, 8)
    p = wide[:, ::2].detach().requires_grad_()
    p.grad = wide[:, 1::2]
    with pytest.raises(ValueError, match=r"cannot step weight \(shape \(6, 4\)\): it has gaps in memory"):
        Adafactor([("weight", p)], backend="cpu").step()
    Adafactor([("weight", p)]).step()  # a warning would be an error


def test_a_model_made_double_after_its_optimizer_still_takes_the_right_steps() -> None:
    results = []
    for backend in ("auto", "eager"):
        model = torch.nn.Linear(4, 3).requires_grad_()
        torch.nn.init.ones_(model.weight)
        optimizer = Adafactor([model.weight], backend=backend, beta1=0.9)
        model.double()
        for _ in range(3):
            model.weight.grad = torch.arange(12.0, dtype=torch.float64).view(3, 4)
            optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=0)


def test_a_gradient_of_another_shape_is_refused() -> None:
    p = torch.ones(4, 5, requires_grad=True)
    p.grad = torch.ones(4, 5)
    optimizer = Adafactor([("weight", p)])
    p.data = torch.ones(2, 5)
    with pytest.raises(ValueError, match=r"weight of shape \(2, 5\) has a gradient of shape \(4, 5\)"):
        optimizer.step()
