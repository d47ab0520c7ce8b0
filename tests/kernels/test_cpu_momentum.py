"""The compiled backend with a momentum in bfloat16 or int8: what eager PyTorch does, by the same random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor
from torch.nn import Parameter

pytest.importorskip("adafactor.kernels.cpu.native", exc_type=ImportError)
from adafactor import Adafactor  # noqa: E402
from adafactor.core import momentum as core  # noqa: E402
from adafactor.core.rounding import keys, random_words, roots  # noqa: E402
from adafactor.kernels import cpu  # noqa: E402
from adafactor.kernels.cpu.native import jobs, lines, momentum  # noqa: E402
from tests import (
    inside,  # noqa: E402
    reference,  # noqa: E402
)

# as the loops are: arrays are nobody's to free
unmanaged: Callable[[Callable[..., None]], Callable[..., None]] = njit(_nrt=False)  # type: ignore[call-overload]
FORMATS = pytest.mark.parametrize("format", ["bfloat16", "int8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
# uneven last blocks, more than a stretch, convolutions, stacks; and what int8 leaves in float32
SHAPES = [(40, 200), (9, 1030), (30, 17, 3, 3), (16, 2, 40, 7), (3, 20, 130), (1, 5000), (63, 65), (64, 63), (5000,)]


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in shapes]


def set_gradients(params: list[Parameter], seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=draws))  # in the order of its parameter


def train(params: list[Parameter], steps: int = 3, **keywords: Any) -> Adafactor:
    optimizer = Adafactor(params, backend="cpu", beta1=0.9, **keywords)
    for seed in range(steps):
        set_gradients(params, seed)
        optimizer.step()
    return optimizer


def everything(optimizer: Adafactor) -> list[Tensor]:
    return [t.clone() for p, state in optimizer.state.items() for t in (p.detach(), *state.values())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def cases(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    stored = ("nearest", "stochastic", "kahan") if dtype.itemsize == 2 else ("nearest",)
    for of, factored, rounding in product(("update", "direction", "gradient"), ("outer", False), stored):
        yield {"momentum_of": of, "factored": factored, "rounding": rounding}


def units_apart(state: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """How far two momenta are from each other, in units of their format, and what share of them differs."""
    one, two = reference.values(state)["momentum"], reference.values(other)["momentum"]
    unit = np.asarray(reference._unit(two, other))
    unit = unit + 1e-6 * np.abs(two).max()  # terms that cancel leave a rounding error of their own size
    apart = np.abs(one - two)
    return float((apart / unit).max()), float((apart > 0.5 * unit).mean())


@DTYPES
@FORMATS
def test_a_step_is_eagers_to_a_unit_of_the_momentum(format: str, dtype: torch.dtype) -> None:
    for keywords in cases(dtype):
        compare(format, dtype, {**keywords, "weight_decay": 0.1})


def compare(
    format: str,
    dtype: torch.dtype,
    keywords: dict[str, Any],
    shapes: Any = SHAPES,
    lay: Callable[[Tensor], Tensor] = lambda t: t,
) -> None:
    """From the same X and state, again and again; by the same random numbers, so that few are rounded otherwise."""
    given = {"beta1": 0.9, "momentum_dtype": format, "seed": 3, **keywords}
    params = [Parameter(lay(p.detach())) for p in parameters(dtype, shapes)]
    optimizer = Adafactor(params, backend="eager", **given)
    for t in range(3):
        others = [Parameter(p.detach().clone()) for p in params]
        compiled = Adafactor(others, backend="cpu", **given)
        compiled.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for some, stepped in ((params, optimizer), (others, compiled)):
            set_gradients(some, t)
            stepped.step()
        for p, q in zip(params, others, strict=True):
            told = f"{tuple(p.shape)} {keywords}, step {t}"
            unit = torch.finfo(p.dtype).eps * p.detach().abs().double() * (dtype.itemsize == 2)
            limit = 4 * torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps + unit
            assert p.stride() == q.stride() and bool(((p.double() - q.double()).abs() <= limit).all()), told
            if "momentum_scale" in optimizer.state[p] or format == "bfloat16":
                furthest, share = units_apart(compiled.state[q], optimizer.state[p])
                assert furthest <= 1.01 and share <= 0.002, told


@pytest.mark.parametrize("at_random", [True, False], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("size", [128, 72])
@FORMATS
def test_equal_numbers_are_rounded_to_equal_bits(format: str, size: int, at_random: bool) -> None:
    count, draws = 5 * size + 31, torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=draws) * torch.exp(4 * torch.randn(count, generator=draws))
    values[:size] = 0.0
    values[size : 2 * size] *= 2.0**-120
    pair, first = keys(roots(7, 1), 5), 2**32 - size
    random = random_words(torch.arange(first, first + count), pair)
    integers, scale = core.encode(values, core.Blocks(0, size), random if at_random else None)
    rounded = core.to_bfloat16(values, random if at_random else None)
    expected = rounded.view(torch.uint16) if format == "bfloat16" else integers

    stored, scales = np.zeros(count, np.uint16 if format == "bfloat16" else np.int8), np.zeros(len(scale), np.float32)
    table = jobs.new_jobs(1)
    table["block"], table["m_scales"], table["rounds_momentum_at_random"] = size, scales.ctypes.data, at_random
    table["key1"], table["key2"] = pair
    if format == "bfloat16":
        _average(table, stored, values.numpy(), np.ones(count, np.float32), first)
    else:
        loaded = np.zeros(count, np.float32)
        _encode_and_decode(table, stored, values.numpy(), loaded, first)
        assert scales.tolist() == scale.tolist()
        assert loaded.tolist() == core.decode(integers, scale, core.Blocks(0, size)).tolist()
    assert stored.tolist() == expected.tolist()


@njit
def _average(table: Any, m: Any, values: Any, ones: Any, first: int) -> None:
    """Average G into a momentum of zeros, with a weight of 1."""
    part, one = jobs.Stretch(ones, ones, m, 0, values, ones, first, 1), ones[0]
    rates, draws = lines.Rates(one, one, one, one, one), lines.draws_of(table[0], first, 1)
    lines.descend(table[0], part, ones.copy(), m, values, one, True, rates, draws)


@unmanaged
def _encode_and_decode(table: Any, m: Any, values: Any, loaded: Any, first: int) -> None:
    size = table[0].block
    for i in range(0, len(m), size):
        integers, block, out = m[i : i + size], values[i : i + size], loaded[i : i + size]
        part = jobs.Stretch(block, block, integers, i // size, block, block, first + i, 1)
        momentum.store(table[0], part, integers, block, lines.draws_of(table[0], first + i, 1))
        momentum.load(table[0], part, integers, out)


@pytest.mark.parametrize("alone", [2**22, 0], ids=["a tensor to a thread", "threads share a tensor"])
@pytest.mark.parametrize("factored", ["outer", False], ids=str)
@pytest.mark.parametrize("of", ["update", "gradient"])
@FORMATS
def test_threads_do_not_change_the_bits(
    format: str,
    of: str,
    factored: str | bool,
    alone: int,
    threads: Callable[[int], None],
    small_units: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_units(256)
    inside.leave_to_one_thread(monkeypatch, alone)
    ends = []
    for count in (1, 2, 5):
        threads(count)
        ends.append(everything(train(parameters(), 5, momentum_dtype=format, momentum_of=of, factored=factored)))
    assert equal(ends[0], ends[1]) and equal(ends[0], ends[2])


@pytest.mark.parametrize("of", ["update", "gradient"])
@pytest.mark.parametrize("size", [256, 1000, 2**15])
def test_blocks_of_an_unfactored_tensor_stay_whole_wherever_it_is_cut(
    size: int, of: str, small_units: Callable[[int], None]
) -> None:
    """Chunks end anywhere: also in the middle of a block, of a line, or of a block that is longer than a chunk."""
    shapes = [(40, 200), (64, 63), (30, 17, 3, 3), (3, 3, 700)]
    keywords: dict[str, Any] = {"factored": False, "momentum_dtype": "int8", "momentum_of": of}
    whole = train(parameters(shapes=shapes), **keywords)
    small_units(size)
    for one, other in zip(everything(whole), everything(train(parameters(shapes=shapes), **keywords)), strict=True):
        torch.testing.assert_close(
            one.double(), other.double(), rtol=1e-5, atol=1.01 if one.dtype == torch.int8 else 1e-5
        )
    train(parameters(shapes=shapes), axes=(0, 1), **keywords)


@pytest.mark.parametrize("of", ["update", "gradient"])
@FORMATS
def test_a_gradient_that_is_not_finite_changes_nothing(format: str, of: str) -> None:
    for how in ("skip", "raise"):
        params = parameters()
        optimizer = train(params, momentum_dtype=format, momentum_of=of, on_nonfinite=how)
        before = everything(optimizer)
        for p in params:
            assert p.grad is not None
            p.grad.view(-1)[-1] = float("inf")
        with pytest.raises(FloatingPointError) if how == "raise" else pytest.warns(RuntimeWarning, match="not finite"):
            optimizer.step()
            optimizer.report()
        assert equal(before, everything(optimizer))
    params = parameters(shapes=[(40, 200)])
    optimizer = train(params, momentum_dtype=format, on_nonfinite="ignore")
    params[0].grad[3, 5] = float("nan")  # type: ignore[index]
    optimizer.step()
    assert params[0].isnan().any()


@pytest.mark.parametrize(
    "keywords", [{}, {"on_nonfinite": "raise"}, {"momentum_of": "direction"}, {"momentum_of": "gradient"}], ids=str
)
@FORMATS
def test_the_sum_of_squares_that_is_carried_over_is_the_one_that_is_read(format: str, keywords: dict[str, Any]) -> None:
    ends = []
    for forget in (False, True):
        params = parameters()
        optimizer = Adafactor(params, backend="cpu", beta1=0.9, momentum_dtype=format, **keywords)
        for t in range(5):
            set_gradients(params, t)
            if forget:
                inside.forget(optimizer)
            optimizer.step()
            assert inside.read_squares(optimizer, params[0]) == (forget or t == 0)
        ends.append(everything(optimizer))
    assert equal(*ends)


@pytest.mark.parametrize("of", ["update", "direction", "gradient"])
@pytest.mark.parametrize("by", ["rho", "alpha"])
@FORMATS
def test_what_somebody_writes_to_a_parameter_between_steps_is_honoured(format: str, by: str, of: str) -> None:
    """Where no version counter tells: ΣX² is wrong then, and the step is repaired, the momentum to a unit."""
    keywords = {"momentum_dtype": format, "momentum_of": of, "weight_decay": 0.1, "weight_decay_by": by, "lr": 0.1}
    ends = []
    for edits in (lambda p: p.data.mul_(1), lambda p: p.detach().mul_(1)):  # hidden from torch, and not
        params = parameters(shapes=[(301, 200)])
        optimizer = train(params, 3, **keywords)
        params[0].data.view(-1)[-5] += 100.0
        edits(params[0])
        set_gradients(params, 9)
        optimizer.step()
        ends.append((params[0].detach().double(), optimizer.state[params[0]]))
        assert inside.read_squares(optimizer, params[0]) == (len(ends) == 2)
    (x, state), (right, right_state) = ends
    moved = 0.1 * float(right.square().mean().sqrt())  # the largest step that there is
    assert bool(((x - right).abs() <= moved * (1e-5 if of == "update" else 1e-2) + 1e-6 * right.abs()).all())
    m, right_m = reference.values(state)["momentum"], reference.values(right_state)["momentum"]
    assert np.abs(m - right_m).max() <= 0.02 * np.abs(right_m).max()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "reversed": lambda t: t.permute(*range(t.dim())[::-1]).contiguous().permute(*range(t.dim())[::-1]),
    "inner first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "inner second": lambda t: t.movedim(-1, 1).contiguous().movedim(1, -1),
}


# A dtype, what is averaged, the estimator and the rounding of X: each of them with each of LAYOUTS.
KINDS: list[tuple[torch.dtype, str, str | bool, str]] = [
    (torch.float32, "update", "outer", "nearest"),
    (torch.float32, "gradient", "outer", "nearest"),
    (torch.bfloat16, "gradient", "column", "kahan"),
    (torch.bfloat16, "gradient", False, "stochastic"),
    (torch.bfloat16, "direction", False, "nearest"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@FORMATS
def test_no_order_in_memory_changes_the_step(format: str, layout: str) -> None:
    """Where blocks are not side by side, and elements not numbered in even steps: as eager PyTorch does it."""
    for dtype, of, factored, rounding in KINDS:
        keywords = {"momentum_of": of, "factored": factored, "rounding": rounding, "weight_decay": 0.1}
        compare(format, dtype, keywords, shapes=SHAPES[:-1], lay=LAYOUTS[layout])
    compare(format, torch.float32, {"axes": (0, 1)}, shapes=[(9, 8, 70)], lay=LAYOUTS[layout])


@FORMATS
def test_neighbours_that_are_far_apart_in_the_tensor_have_their_own_random_numbers(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 32 bits of a line's numbers: that takes a tensor of gigabytes, or a smaller limit."""
    monkeypatch.setattr(cpu.blocks, "LONGEST_STEP", 100)
    for of in ("update", "gradient"):
        compare(format, torch.float32, {"momentum_of": of}, shapes=[(40, 200)], lay=LAYOUTS["transposed"])


@pytest.mark.parametrize("of", ["update", "gradient"])
def test_threads_do_not_change_the_bits_of_blocks(
    of: str, threads: Callable[[int], None], small_units: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_units(256)
    inside.leave_to_one_thread(monkeypatch, 0)
    ends = []
    for count in (1, 3):
        threads(count)
        params = [Parameter(LAYOUTS["transposed"](p.detach())) for p in parameters(shapes=SHAPES[:5])]
        ends.append(everything(train(params, 3, momentum_dtype="int8", momentum_of=of)))
    assert equal(*ends)


def test_a_gradient_that_is_not_finite_changes_nothing_in_blocks() -> None:
    params = [Parameter(LAYOUTS["transposed"](p.detach())) for p in parameters(shapes=SHAPES[:5])]
    optimizer = train(params, momentum_dtype="int8", momentum_of="gradient")
    before = everything(optimizer)
    for p in params:
        assert p.grad is not None
        p.grad[(-1,) * p.dim()] = float("nan")
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.step()
        optimizer.report()
    assert equal(before, everything(optimizer))


@pytest.mark.parametrize("shape", [(300,), (40, 200)], ids=str)
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8"])
def test_squares_of_a_momentum_may_leave_float32_where_it_does_not(format: str, shape: tuple[int, ...]) -> None:
    rms = {}
    for backend in ("eager", "cpu"):
        p = Parameter(torch.ones(shape))
        optimizer = Adafactor([p], backend=backend, beta1=0.9, momentum_of="gradient", momentum_dtype=format)
        for _ in range(2):
            p.grad = torch.linspace(0.1, 1, p.numel()).view(shape)
            optimizer.step()
            for key in ("momentum_of_gradient", "momentum_scale"):
                optimizer.state[p].get(key, torch.ones(())).mul_(1e25)
        (record,) = optimizer.report()
        rms[backend] = record.rms_update
    assert rms["cpu"] == pytest.approx(rms["eager"], rel=1e-4 if format == "float32" else 1e-2)
    assert rms["cpu"] > 1e20


def test_words_that_round_x_round_the_momentum_by_their_other_half() -> None:
    """X by the lower 16 bits, the momentum by the upper: drawn once for both."""
    words = random_words(torch.arange(1000), (5, 6)).numpy()
    low, high = (words & 0xFFFF).astype(float), (words >> 16).astype(float)
    assert abs(np.corrcoef(low, high)[0, 1]) < 0.15
