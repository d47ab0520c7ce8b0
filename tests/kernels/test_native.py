"""The compiled part by itself: jobs are filled by hand, and taken through the phases."""

# ruff: noqa: D102, D107

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

native = pytest.importorskip("adafactor.kernels.cpu.native", exc_type=ImportError)
from adafactor.kernels import memory_order  # noqa: E402
from adafactor.kernels.cpu import threads  # noqa: E402
from adafactor.kernels.cpu.native import jobs, parts  # noqa: E402

WIDTHS = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


class Tensors:
    """Some tensors with their state and their jobs; P is the first axis and Q, where not said otherwise, the last."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, q: int = -1, **fields: float):
        self.q, random = q, torch.Generator().manual_seed(0)
        stat = WIDTHS[dtype]
        self.x = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
        self.g = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
        self.row = [torch.rand(_without(shape, q), generator=random).to(stat) for shape in shapes]
        self.col = [torch.rand(shape[1:], generator=random).to(stat) for shape in shapes]
        self.full = [torch.rand(shape, generator=random).to(stat) for shape in shapes]
        self.m = [torch.randn(shape, generator=random).to(stat) * 0.01 for shape in shapes]
        self.t = [torch.zeros(()) for _ in shapes]
        self.orders = [self._order(x) for x in self.x]
        self.jobs = jobs.new_jobs(len(shapes))
        for i in range(len(shapes)):
            self._fill(i, fields)
        parts.assign(self.jobs, dtype, dtype)

    def _order(self, x: Tensor) -> memory_order.MemoryOrder:
        shape, strides = tuple(x.shape), x.stride()
        found = (
            memory_order.flat_order(shape, strides, strides)
            if x.ndim == 1
            else memory_order.factored_order(shape, strides, strides, 0, self.q % x.ndim)
        )
        assert isinstance(found, memory_order.MemoryOrder)
        return found

    def _fill(self, i: int, fields: dict[str, float]) -> None:
        order, shape = self.orders[i], self.x[i].shape
        jobs.lay_out(self.jobs[i], order)
        values: dict[str, Any] = {name: getattr(self, name)[i].data_ptr() for name in ("x", "g", "m", "t", "full")}
        values |= {"row_state": self.row[i].data_ptr(), "col_state": self.col[i].data_ptr()}
        values |= {"n_rows": shape[0], "n_cols": shape[self.q], "count": self.x[i].numel()}
        values |= {"estimator": jobs.OUTER if order.factored else jobs.FULL, "relative": 1, "measures_x": 1}
        values |= {"eps1": 1e-30, "eps2": 1e-3, "clip": 1.0, "beta2": 0.9, "w2": 1 - 0.9, "w1": 0.1, "rho": 0.01}
        values |= {"carries_x2": order.can_carry_x2 and self.x[i].dtype != torch.bfloat16}
        for name, value in (values | fields).items():
            self.jobs[name][i] = value

    def step(self) -> None:
        self.run_phases(jobs.MOMENTS, jobs.END)

    def step_in_parts(self, *starts: int) -> None:
        scratch = self.own_scratch()
        bounds = [jobs.MOMENTS, *starts, jobs.END]
        for first, last in zip(bounds, bounds[1:], strict=False):
            self.run_phases(first, last, scratch)

    def own_scratch(self) -> Tensor:
        """Give every job scratch that lasts until the next part of a step."""
        starts = [0, *accumulate(order.scratch for order in self.orders)]
        scratch = torch.empty(starts[-1], dtype=torch.float64)
        self.jobs["scratch"] = [scratch.data_ptr() + 8 * start for start in starts[:-1]]
        return scratch

    def run_phases(self, first: int, last: int, scratch: Tensor | None = None) -> None:
        native.run_phases(self.jobs, self.jobs.ctypes.data, first, last, scratch)

    def everything(self) -> list[Tensor]:
        return [tensor.clone() for kind in (self.x, self.row, self.col, self.full, self.m, self.t) for tensor in kind]


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i != axis % len(shape))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def expected_x(case: Tensors, i: int = 0) -> Tensor:
    """X after a step, in double."""
    x, g = case.x[i].double(), case.g[i].double()
    row = 0.9 * case.row[i].double() + 0.1 * (g.square() + 1e-30).mean(case.q)
    col = 0.9 * case.col[i].double() + 0.1 * (g.square() + 1e-30).mean(0)
    u = g * (row / row.mean(0)).rsqrt().unsqueeze(case.q) * col.rsqrt()
    alpha = max(1e-3, x.square().mean().sqrt().item()) * 0.01
    return x - alpha / max(1.0, u.square().mean().sqrt().item()) * u


of_lines_and_tiles = pytest.mark.parametrize(
    "shape, q", [((300, 200), -1), ((301, 20, 3, 3), 1)], ids=["lines", "tiles"]
)
SHAPES = [(600, 257), (300, 200), (5000,), (16, 3, 5, 7), (40, 30), (1, 9), (7,)]  # the largest first, as jobs come


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut tensors of a test's size into several chunks, and have all threads share the larger ones."""
    monkeypatch.setattr(memory_order, "CHUNK", 1024)
    monkeypatch.setattr(native, "SMALL", 20_000)
    memory_order.factored_order.cache_clear()
    memory_order.flat_order.cache_clear()
    yield
    memory_order.factored_order.cache_clear()
    memory_order.flat_order.cache_clear()


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@of_lines_and_tiles
def test_a_step_is_the_papers(shape: tuple[int, ...], q: int) -> None:
    case = Tensors(shape, q=q)
    expected = expected_x(case)
    case.step()
    torch.testing.assert_close(case.x[0].double(), expected, rtol=0, atol=1e-6)
    (job,) = case.jobs
    assert (case.t[0].item(), job["steps"], job["taken"], job["skipped"]) == (1, 1, 1, 0)
    assert job["beta2_taken"] == 0.9


@pytest.mark.parametrize("momentum", [jobs.NONE, jobs.OF_UPDATE, jobs.OF_GRADIENT, jobs.OF_DIRECTION])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_in_parts_is_the_whole_step_to_the_bit(small_chunks: None, momentum: int, dtype: torch.dtype) -> None:
    ends = []
    for starts in (
        (),
        (jobs.FACTORS,),
        (jobs.FACTORS, jobs.CONCLUDE),
        (jobs.FACTORS, jobs.ENERGY, jobs.APPLY),
    ):
        case = Tensors(*SHAPES, dtype=dtype, momentum=momentum)
        for _ in range(3):
            case.step_in_parts(*starts) if starts else case.step()
        ends.append(case.everything())
    assert all(same(ends[0], other) for other in ends[1:])


def test_a_part_of_a_step_needs_scratch() -> None:
    case = Tensors((30, 20))
    with pytest.raises(ValueError, match="needs scratch"):
        case.run_phases(jobs.MOMENTS, jobs.FACTORS)


def test_of_a_job_that_is_not_present_nothing_changes(small_chunks: None) -> None:
    case, alone = Tensors(*SHAPES), Tensors(*SHAPES)
    case.jobs["present"][1::2] = 0
    before, table = case.everything(), case.jobs.copy()
    case.step()
    alone.step()
    count = len(SHAPES)
    for i, (old, new, stepped) in enumerate(zip(before, case.everything(), alone.everything(), strict=True)):
        assert torch.equal(new, old if i % count % 2 else stepped)
    assert case.jobs[1::2].tobytes() == table[1::2].tobytes()


def test_a_gradient_that_is_not_finite_is_counted_when_the_factors_are_reached() -> None:
    case = Tensors((30, 20), (50,))
    case.g[0][3, 4], case.g[1][7] = float("nan"), float("inf")
    before = case.everything()
    scratch = case.own_scratch()
    case.run_phases(jobs.MOMENTS, jobs.FACTORS, scratch)
    assert not np.isfinite(case.jobs["finite"]).any() and not case.jobs["taken"].any()
    assert not case.jobs["skipped"].any()
    case.run_phases(jobs.FACTORS, jobs.END, scratch)
    assert case.jobs["skipped"].tolist() == [1, 1] and case.jobs["steps"].tolist() == [0, 0]
    assert same(before, case.everything())
    case.jobs["ignore"] = 1
    case.step()
    assert case.jobs["steps"].tolist() == [1, 1] and case.x[0].isnan().any()


def test_factors_may_lie_in_any_order_in_the_state() -> None:
    plain, turned = Tensors((60, 50)), Tensors((60, 50))
    orders = {
        name: torch.randperm(len(getattr(plain, name)[0]), generator=torch.Generator().manual_seed(1))
        for name in ("row", "col")
    }
    kept = {name: torch.empty_like(getattr(plain, name)[0]) for name in orders}
    for name, order in orders.items():
        kept[name][order] = getattr(plain, name)[0]
        turned.jobs[f"{name}_state"], turned.jobs[f"{name}_offsets"] = kept[name].data_ptr(), order.data_ptr()
    for case in (plain, turned, plain, turned):
        case.step()
    assert torch.equal(plain.x[0], turned.x[0])
    for name, order in orders.items():
        assert torch.equal(getattr(plain, name)[0], kept[name][order])


# ---- ΣX² carried over


@of_lines_and_tiles
def test_the_carried_sum_is_the_one_that_is_measured(small_chunks: None, shape: tuple[int, ...], q: int) -> None:
    carried, read = Tensors(shape, q=q), Tensors(shape, q=q)
    for i in range(5):
        read.jobs["x2_after"] = np.nan
        carried.step()
        read.step()
        assert (carried.jobs["reads_x2"][0], read.jobs["reads_x2"][0]) == (i == 0, 1)
        assert carried.jobs["x2"][0] == read.jobs["x2"][0] and not carried.jobs["needs_correction"][0]
    assert same(carried.everything(), read.everything())


@of_lines_and_tiles
def test_an_edit_of_the_heaviest_lines_is_noticed_before_the_step(
    small_chunks: None, shape: tuple[int, ...], q: int
) -> None:
    case = Tensors(shape, q=q)
    case.step()
    case.step()
    line = case.jobs["heaviest_line"][0]
    case.x[0][line] *= 1e-6
    expected = expected_x(case)
    case.step()
    assert case.jobs["reads_x2"][0] and not case.jobs["needs_correction"][0] and not case.jobs["x2_confirmed"][0]
    torch.testing.assert_close(case.x[0].double(), expected, rtol=0, atol=1e-6)
    case.step()  # measures once more, and finds what it carried
    assert case.jobs["reads_x2"][0] and case.jobs["x2_confirmed"][0]
    case.step()
    assert not case.jobs["reads_x2"][0]


@pytest.mark.parametrize("by_alpha", [0, 1], ids=["", "decay by alpha"])
@pytest.mark.parametrize("momentum", [jobs.NONE, jobs.OF_UPDATE, jobs.OF_DIRECTION])
@pytest.mark.parametrize("factor", [0.0, 1e-3, 100.0])
@of_lines_and_tiles
def test_an_edit_elsewhere_is_corrected(
    small_chunks: None, shape: tuple[int, ...], q: int, factor: float, momentum: int, by_alpha: int, thread_count: None
) -> None:
    ends = []
    fields: dict[str, Any] = {"momentum": momentum, "decays_by_alpha": by_alpha, "share": 0.01 * by_alpha}
    for count in (1, 2):
        torch.set_num_threads(count)
        case, right = Tensors(shape, q=q, **fields), Tensors(shape, q=q, **fields)
        for one in (case, right):
            one.step()
            one.step()
        unit = case.orders[0].rows
        b = int(case.jobs["heaviest_line"][0]) // unit * unit
        for one in (case, right):
            heaviest = one.x[0][b : b + unit].clone()
            one.x[0].mul_(factor)
            one.x[0][b : b + unit] = heaviest
        right.jobs["x2_after"] = np.nan
        case.step()
        right.step()
        assert case.jobs["needs_correction"][0] and not case.jobs["reads_x2"][0] and right.jobs["reads_x2"][0]
        assert case.jobs["steps"][0] == 3 and np.isnan(case.jobs["x2_after"][0])
        assert case.jobs["x2"][0] == right.jobs["x2"][0] and case.jobs["scale"][0] == right.jobs["scale"][0]
        torch.testing.assert_close(case.x[0], right.x[0], rtol=1e-6, atol=1e-6 * right.jobs["alpha"][0] + 1e-8)
        torch.testing.assert_close(case.m[0], right.m[0], rtol=1e-5, atol=1e-8)
        ends.append(case.everything())
    assert same(*ends)


# ---- numbers that float32 has no room for


@pytest.mark.parametrize("scale", [2e17, 1e19, 1e-25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rms_of_a_very_large_or_small_parameter_is_found_in_double(scale: float, dtype: torch.dtype) -> None:
    case = Tensors((180, 190), (5000,), dtype=dtype, eps2=1e-30)
    for x in case.x:
        x.mul_(scale)
    for _ in range(3):
        expected = [x.double().square().mean().sqrt().item() for x in case.x]
        case.step()
        assert case.jobs["rms_x"].tolist() == pytest.approx(expected, rel=1e-6)
        assert all(x.isfinite().all() for x in case.x)


def test_squares_whose_sum_leaves_float32_are_summed_in_double() -> None:
    case = Tensors((300, 200))
    case.g[0].fill_(1e19)
    case.row[0].zero_()
    case.col[0].zero_()
    expected = expected_x(case)
    case.step()
    assert case.jobs["taken"][0]
    torch.testing.assert_close(case.x[0].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 4), (4,)], ids=str)
def test_without_memory_of_the_past_a_gradient_of_zero_leaves_epsilon(shape: tuple[int, ...]) -> None:
    case = Tensors(shape, beta2=0.0, w2=1.0)
    case.step()
    case.g[0][0] = 0
    case.step()
    assert case.x[0].isfinite().all()
    kept = case.row[0] if len(shape) == 2 else case.full[0]
    assert kept[0].item() == pytest.approx(1e-30, rel=1e-6)


def test_an_average_keeps_its_digits_at_either_end() -> None:
    for beta2 in (1e-6, 1 - 1e-7):
        case = Tensors((64,), beta2=beta2, w2=1 - beta2)
        case.g[0].fill_(1e-6 if beta2 < 0.5 else 2.0)
        v, g2 = case.full[0].double(), case.g[0].double().square() + 1e-30
        case.step()
        torch.testing.assert_close(case.full[0].double(), beta2 * v + (1 - beta2) * g2, rtol=2e-7, atol=0)


# ---- threads


@pytest.fixture(params=[True, False], ids=["torch's threads", "plain threads"])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("this torch has no OpenMP threads to lend")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_bits_do_not_depend_on_the_threads(
    small_chunks: None, team: None, thread_count: None, dtype: torch.dtype
) -> None:
    ends = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        case = Tensors(*(shape for shape in SHAPES for _ in range(3)), dtype=dtype, momentum=jobs.OF_UPDATE)
        for _ in range(5):
            case.step()
        ends.append(case.everything())
    assert all(same(ends[0], other) for other in ends[1:])


def test_jobs_that_do_not_come_with_the_largest_first_take_the_same_steps(small_chunks: None) -> None:
    sorted_, reversed_ = Tensors(*SHAPES), Tensors(*SHAPES)
    reversed_.jobs = reversed_.jobs[::-1].copy()
    for case in (sorted_, reversed_, sorted_, reversed_):
        case.step()
    assert same(sorted_.everything(), reversed_.everything())


def test_fewer_threads_may_come_than_were_asked_for(
    small_chunks: None, thread_count: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(4)
    case, alone = Tensors(*SHAPES), Tensors(*SHAPES)
    case.step()
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    monkeypatch.setattr(threads._pool, "put", lambda task, times: None)  # nobody comes
    alone.step()
    assert same(case.everything(), alone.everything())


def test_what_a_signal_handler_raises_while_threads_work_comes_after_the_step(
    small_chunks: None, thread_count: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def interrupted(task: threads.Task, times: int) -> None:
        raise Stop

    torch.set_num_threads(2)
    case = Tensors(*SHAPES)
    before = case.everything()
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    monkeypatch.setattr(threads._pool, "put", interrupted)
    with pytest.raises(Stop):
        case.step()
    assert same(before, case.everything())  # nobody had begun: nothing has changed


# ---- compiled code on disk

STEP = """
import torch
from adafactor import Adafactor
p = torch.ones(8, requires_grad=True); p.grad = torch.ones_like(p)
optimizer = Adafactor([p], backend="cpu")
optimizer.step()
print("stepped", p.mean().item() < 1)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


@pytest.mark.slow
def test_damaged_files_are_replaced_and_a_full_disk_is_no_obstacle(tmp_path: Path) -> None:
    assert run(STEP, NUMBA_CACHE_DIR=str(tmp_path)).stdout == "stepped True\n"
    for keep in (100, 0):
        files = sorted(tmp_path.rglob("*.o"))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[:keep])
        done = run(STEP, NUMBA_CACHE_DIR=str(tmp_path))
        assert done.stdout == "stepped True\n", done.stderr
        assert str(tmp_path) in done.stderr and "compiled anew" in done.stderr
    assert "compiled anew" not in run(STEP, NUMBA_CACHE_DIR=str(tmp_path)).stderr
    full = "import tempfile\ndef full(*_, **__): raise OSError(28, 'No space left')\ntempfile.mkstemp = full\n"
    done = run(full + STEP, NUMBA_CACHE_DIR=str(tmp_path / "other"))
    assert done.stdout == "stepped True\n" and "No space left" in done.stderr


def test_without_its_compiler_numba_is_no_use() -> None:
    done = run("import adafactor.kernels.cpu.native", NUMBA_DISABLE_JIT="1")
    assert "RuntimeError" in done.stderr and "NUMBA_DISABLE_JIT" in done.stderr
