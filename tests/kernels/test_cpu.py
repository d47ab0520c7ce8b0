"""The compiled backend: its own promises besides the paper's, which `conftest.backend` asks of both."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from adafactor import Adafactor
from adafactor.core import equations
from adafactor.kernels.cpu.native import factors, intrinsics, jobs
from benchmarks.measure import extra_bytes
from tests import inside

SHAPES = [(300, 200), (64, 3, 3, 3), (5, 40, 30), (7,), (), (1, 9), (2000,), (129, 1030)]


ALONE = {"a tensor to a thread": 2**22, "both": 2000, "threads share a tensor": 0}
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
        {"beta1": 0.9, "momentum_of": "gradient"},
        {"beta1": 0.9, "momentum_of": "direction", "weight_decay": 0.1, "weight_decay_by": "alpha"},
    ],
    ids=str,
)
@pytest.mark.parametrize("alone", ALONE.values(), ids=ALONE)
def test_the_result_does_not_depend_on_the_number_of_threads(
    keywords: dict[str, object],
    alone: int,
    threads: Threads,
    small_units: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More threads than cores, many tensors, for many steps."""
    small_units(256)
    inside.leave_to_one_thread(monkeypatch, alone)
    results = []
    for count in (1, 2, 8):
        threads(count)
        params = parameters() + [torch.ones(8 + i, 3 * i + 1, requires_grad=True) for i in range(60)]
        train(params, steps=25, **keywords)
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_one_call_for_many_tensors_takes_the_steps_of_walk_after_walk(dtype: torch.dtype, relative: bool) -> None:
    """To the bit, but for ΣX² of float32 tensors, which is summed in another order."""
    together, apart = parameters(dtype), parameters(dtype)
    at_once = train(together, weight_decay=0.1, relative=relative)
    in_turn = train(apart, weight_decay=0.1, relative=relative, on_nonfinite="raise")
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert at_once.report() == in_turn.report()


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
    gaps = torch.ones(30, 40)[:, ::2].requires_grad_()  # no loop has a path through it, so its bucket goes walk by walk
    optimizer = Adafactor([easy, gaps])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for i in range(6):
            easy.grad = torch.full((30, 20), 1.0 + i)
            gaps.grad = torch.ones(30, 20) if i in (2, 3) else None
            optimizer.step()
    assert [record.steps for record in optimizer.report()] == [6, 2]


CARRIED = [
    {},
    {"beta1": 0.9},
    {"beta1": 0.9, "momentum_of": "gradient"},
    {"factored": "row", "weight_decay": 0.1},
    {"weight_decay": 0.1, "weight_decay_by": "alpha"},
    {"beta1": 0.9, "weight_decay": 0.1, "weight_decay_by": "alpha"},
    {"beta1": 0.9, "momentum_of": "direction", "weight_decay": 0.1, "weight_decay_by": "alpha"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("keywords", CARRIED, ids=str)
@pytest.mark.parametrize("shape", [(301, 200), (6, 7, 90, 80)], ids=str)
def test_the_sum_of_squares_that_is_carried_over_is_the_one_that_is_read(
    shape: tuple[int, ...],
    keywords: dict[str, object],
    dtype: torch.dtype,
    small_units: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside.leave_to_one_thread(monkeypatch, 0)
    small_units(1024)
    ends = []
    for forget in (False, True):
        torch.manual_seed(0)
        p = torch.randn(shape, dtype=dtype, requires_grad=True)
        optimizer = Adafactor([p], backend="cpu", **keywords)  # type: ignore[arg-type]
        looked = []
        for _ in range(5):
            p.grad = torch.randn(shape, dtype=dtype)
            if forget:
                inside.forget(optimizer)
            optimizer.step()
            looked.append(inside.read_squares(optimizer, p))
            assert math.isfinite(inside.carried_squares(optimizer, p))  # it was right: nothing had to be repaired
        ends.append(p.detach())
        assert looked == [True, forget, forget, forget, forget]
    assert torch.equal(*ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alone", [2**22, 0], ids=["a tensor to a thread", "threads share a tensor"])
@pytest.mark.parametrize("shape", [(301, 200), (50,)], ids=str)
@pytest.mark.parametrize("keywords", CARRIED, ids=str)
def test_what_somebody_writes_to_a_parameter_between_steps_is_honoured(
    keywords: dict[str, object],
    shape: tuple[int, ...],
    alone: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`p.data` raises no version counter; the sum that was carried over is wrong then, and the step is repaired."""
    inside.leave_to_one_thread(monkeypatch, alone)
    ends, reports = [], []
    for backend in ("cpu", "eager"):
        torch.manual_seed(0)
        p = torch.randn(shape, dtype=dtype, requires_grad=True)
        optimizer = Adafactor([p], backend=backend, lr=0.1, **keywords)  # type: ignore[arg-type]
        for i in range(9):
            p.grad = torch.randn(shape, dtype=dtype)
            if i in (3, 5):
                p.data.mul_({3: 3.0, 5: 1e-3}[i])
            if i == 8:
                p.data.view(-1)[-5] += 100.0
            optimizer.step()
        ends.append(p.detach())
        reports.append(optimizer.report()[0])
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-14)
    torch.testing.assert_close(*ends, rtol=rtol, atol=atol)
    assert reports[0].steps == 9 and reports[0].rms_parameter == pytest.approx(reports[1].rms_parameter, rel=1e-6)


@given(
    st.floats(1e-12, 1e12),
    st.floats(1e-12, 1e12),
    st.floats(1e-9, 1),
    st.floats(0, 1e-2),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_compiled_step_size_is_the_equations(u2: float, x2: float, rho: float, eps2: float, clip: float) -> None:
    job = np.zeros(1, jobs.JOB)
    job["u2"], job["x2"], job["rho"], job["eps2"], job["clip"] = u2, x2, rho, eps2, clip
    job["relative"], job["count"], job["sign"] = 1, 6, 1.0
    _conclude(job)
    alpha = equations.step_size(rho, equations.root_mean_square(x2, 6), eps2)
    divisor = equations.clip_divisor(equations.root_mean_square(u2, 6), clip or None)
    assert job["scale"][0] == alpha / divisor


@njit
def _conclude(table: Any) -> None:
    factors.conclude(table[0])


def test_every_16_bit_number_is_read_as_torch_reads_it() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, stored in ((torch.bfloat16, np.uint16), (torch.float16, np.int16)):
        values = bits.numpy().view(stored)
        ours = torch.tensor([_read(v) for v in values[::7]])
        torch.testing.assert_close(ours, bits[::7].view(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_numbers_are_rounded_to_16_bits_as_torch_rounds_them() -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31 - 1, (4000,), generator=random, dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, torch.randn(2000, generator=random), torch.randn(2000, generator=random) * 1e-6])
    edges = [0.0, -0.0, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 1e-45, float("inf"), -float("inf"), float("nan")]
    values = torch.cat([values, torch.tensor(edges)])
    for dtype, like in ((torch.bfloat16, np.uint16(0)), (torch.float16, np.int16(0))):
        ours = torch.tensor([_write(np.float32(v), like) for v in values.tolist()])
        expected = values.to(dtype)
        bits = expected.view(torch.int16).long() & 0xFFFF
        same = ((ours & 0xFFFF) == bits) | expected.isnan()
        assert same.all(), values[~same]


@njit
def _read(value: Any) -> Any:
    return intrinsics.widen(value, np.float32(0))


@njit
def _write(value: Any, like: Any) -> Any:
    return intrinsics.narrow(value, like)


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


def test_what_it_cannot_walk_is_named_and_left_to_auto() -> None:
    wide = torch.ones(6, 8)
    p = wide[:, ::2].detach().requires_grad_()
    p.grad = torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"cannot step weight \(shape \(6, 4\)\): its lines have gaps in memory"):
        Adafactor([("weight", p)], backend="cpu").step()
    optimizer = Adafactor([("weight", p)])
    with pytest.warns(RuntimeWarning, match="weight .* is stepped by eager PyTorch, more slowly: its lines have gaps"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # said once


def test_a_model_made_double_after_its_optimizer_still_takes_the_right_steps() -> None:
    results = []
    for backend in ("cpu", "eager"):
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


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What this code prints, in a Python of its own."""
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


STEP = """
import torch
from adafactor import Adafactor
p = torch.ones(4, 5, requires_grad=True); p.grad = torch.ones_like(p)
optimizer = Adafactor([p], backend={backend!r})
optimizer.step(); optimizer.step()
print("stepped", p.mean().item() < 1)
"""

NO_NUMBA = "import sys; sys.modules['numba'] = None\n"


def test_without_numba_auto_says_so_once_and_a_named_backend_raises() -> None:
    before, advice = NO_NUMBA, 'pip install "numba>=0.57"'
    done = run(before + STEP.format(backend="auto"))
    assert done.stdout == "stepped True\n"
    assert done.stderr.count("RuntimeWarning") == 1 and advice in done.stderr
    failed = run(before + STEP.format(backend="cpu"))
    assert failed.returncode and 'ImportError: backend="cpu" cannot be used' in failed.stderr
    assert advice in failed.stderr


@pytest.mark.parametrize(("backend", "package", "oldest"), [("cpu", "Numba", "0.57"), ("triton", "Triton", "3.6")])
def test_a_package_that_is_too_old_is_named_with_the_version_that_is_needed(
    backend: str, package: str, oldest: str
) -> None:
    old = f"import sys, types; sys.modules[{package.lower()!r}] = types.SimpleNamespace(__version__='0.9.1+cu12')\n"
    old = old.replace("0.9", "0.56") if backend == "cpu" else old
    failed = run(old + STEP.format(backend=backend))
    assert f"the compiled step needs {package} {oldest} or newer (this is 0." in failed.stderr


@pytest.mark.slow
def test_the_first_compile_says_what_it_does_and_the_second_process_finds_it_on_disk(tmp_path: Path) -> None:
    first = run(STEP.format(backend="cpu"), NUMBA_CACHE_DIR=str(tmp_path))
    assert "compiling the step for torch.float32" in first.stderr and str(tmp_path) in first.stderr
    second = run(STEP.format(backend="cpu"), NUMBA_CACHE_DIR=str(tmp_path))
    assert first.stdout == second.stdout == "stepped True\n"
    assert second.stderr == ""
