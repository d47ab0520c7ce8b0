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
from adafactor.kernels.cpu.native import jobs, lines, momentum  # noqa: E402
from tests import inside  # noqa: E402
from tests.attack import reference  # noqa: E402

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
        p.grad = torch.randn(p.shape, generator=draws).to(p.dtype)


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
    for of, at_random, factored, rounding in product(
        ("update", "direction"), ("stochastic", "nearest"), ("outer", False), stored
    ):
        yield {"momentum_of": of, "momentum_rounding": at_random, "factored": factored, "rounding": rounding}


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
    """From the same X and state, again and again; by the same random numbers, so that few are rounded otherwise."""
    for keywords in cases(dtype):
        params = parameters(dtype)
        optimizer = Adafactor(
            params, backend="eager", beta1=0.9, momentum_dtype=format, weight_decay=0.1, seed=3, **keywords
        )
        for t in range(3):
            others = [Parameter(p.detach().clone()) for p in params]
            compiled = Adafactor(
                others, backend="cpu", beta1=0.9, momentum_dtype=format, weight_decay=0.1, seed=3, **keywords
            )
            compiled.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for some, stepped in ((params, optimizer), (others, compiled)):
                set_gradients(some, t)
                stepped.step()
            for p, q in zip(params, others, strict=True):
                told = f"{tuple(p.shape)} {keywords}, step {t}"
                unit = torch.finfo(p.dtype).eps * p.detach().abs().double() * (dtype.itemsize == 2)
                limit = 4 * torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps + unit
                assert bool(((p.double() - q.double()).abs() <= limit).all()), told
                if "momentum_int8" in optimizer.state[p] or format == "bfloat16":
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
    lines.descend(ones.copy(), m, part, one, True, rates, draws)


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
@FORMATS
def test_threads_do_not_change_the_bits(
    format: str,
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
        ends.append(everything(train(parameters(), 5, momentum_dtype=format, factored=factored)))
    assert equal(ends[0], ends[1]) and equal(ends[0], ends[2])


@pytest.mark.parametrize("size", [256, 1000, 2**15])
def test_blocks_of_an_unfactored_tensor_stay_whole_wherever_it_is_cut(
    size: int, small_units: Callable[[int], None]
) -> None:
    """Chunks end anywhere: also in the middle of a block, of a line, or of a block that is longer than a chunk."""
    shapes = [(40, 200), (64, 63), (30, 17, 3, 3), (3, 3, 700)]
    keywords: dict[str, Any] = {"factored": False, "momentum_dtype": "int8"}
    whole = train(parameters(shapes=shapes), **keywords)
    small_units(size)
    for one, other in zip(everything(whole), everything(train(parameters(shapes=shapes), **keywords)), strict=True):
        torch.testing.assert_close(
            one.double(), other.double(), rtol=1e-5, atol=1.01 if one.dtype == torch.int8 else 1e-5
        )
    train(parameters(shapes=shapes), axes=(0, 1), **keywords)


@FORMATS
def test_a_gradient_that_is_not_finite_changes_nothing(format: str) -> None:
    for how in ("skip", "raise"):
        params = parameters()
        optimizer = train(params, momentum_dtype=format, on_nonfinite=how)
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


@pytest.mark.parametrize("keywords", [{}, {"on_nonfinite": "raise"}, {"momentum_of": "direction"}], ids=str)
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


@pytest.mark.parametrize("of", ["update", "direction"])
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


def test_what_it_leaves_to_eager_is_named() -> None:
    turned = Parameter(torch.ones(200, 40).T)
    for p, format, of, why in (
        (Parameter(torch.ones(40, 200)), "bfloat16", "gradient", "its momentum of the gradient is kept in bfloat16"),
        (Parameter(torch.ones(40, 200)), "int8", "gradient", "its momentum of the gradient is kept in int8"),
        (turned, "int8", "update", "the blocks of its int8 momentum are not side by side in memory"),
    ):
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=why):
            Adafactor([p], backend="cpu", beta1=0.9, momentum_of=of, momentum_dtype=format).step()
    turned.grad = torch.ones_like(turned)
    Adafactor([turned], backend="cpu", beta1=0.9, momentum_dtype="bfloat16").step()
    small = Parameter(torch.ones(8, 9))
    small.grad = torch.ones_like(small)
    Adafactor([small], backend="cpu", beta1=0.9, momentum_of="gradient", momentum_dtype="int8").step()


def test_words_that_round_x_round_the_momentum_by_their_other_half() -> None:
    """X by the lower 16 bits, the momentum by the upper: drawn once for both."""
    words = np.zeros(1000, np.uint32)
    _draw(words)
    low, high = (words & 0xFFFF).astype(float), (words >> 16).astype(float)
    assert abs(np.corrcoef(low, high)[0, 1]) < 0.15


@njit
def _draw(words: Any) -> None:
    lines.draw(words, 0, 1, np.uint32(5), np.uint32(6))
