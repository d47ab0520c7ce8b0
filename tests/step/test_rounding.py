"""16-bit weights that still learn: unbiased, reproducible, and the same for every backend and order of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.core.rounding import elements, keys, mix, random_words, roots, stochastic

DRAWS = 100_000
SHORT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
pytestmark = pytest.mark.usefixtures("backend")

VALUES = [0.0, -0.0, 1.0, 1.003, -1.003, 3.1e-5, -6.0e-8, 2.3e-8, 5.9604645e-8, 6.1e-5, 0.3, 65503.0, -65490.0]
VALUES += [1.1e38, 3.3e38, 2e-38, -1.3e-39, 9e-41, 1e-45, 2.0**-126 * 1.001]


def words(seed: int = 0) -> Tensor:
    random: Tensor = random_words(torch.arange(DRAWS), keys(roots(seed, 0), 1))
    return random


@SHORT
@pytest.mark.parametrize("value", VALUES)
def test_the_mean_of_many_draws_is_the_value(value: float, dtype: torch.dtype) -> None:
    wide = torch.full((DRAWS,), value).clamp(max=torch.finfo(dtype).max)  # beyond it, nothing is drawn
    rounded = stochastic(wide, dtype, words()).double()
    exact = wide[0].double()
    neighbours = rounded.unique()
    assert len(neighbours) <= 2
    if len(neighbours) == 2:
        assert neighbours[0] < exact < neighbours[1]
        gap = neighbours[1] - neighbours[0]
        share = ((exact - neighbours[0]) / gap).item()
        error = 4 * gap * (share * (1 - share) / DRAWS) ** 0.5
        assert (rounded.mean() - exact).abs() <= error
    elif exact != neighbours[0]:  # too close to a neighbour for any draw to leave it
        gap = torch.nextafter(neighbours[0].to(dtype), torch.tensor(float("inf"), dtype=dtype)).double() - neighbours[0]
        assert (exact - neighbours[0]).abs() < gap * 10 / DRAWS


@SHORT
def test_what_the_type_has_stays_and_nan_and_infinity_too(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    rounded = stochastic(every.float(), dtype, words()[: len(every)])
    same = (rounded.view(torch.int16) == every.view(torch.int16)) | (rounded.isnan() & every.isnan())
    assert same.all()


@SHORT
def test_beyond_the_largest_number_it_rounds_to_nearest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    top = torch.tensor(min(largest * (1 + 2.0**-12), 3.4e38)).expand(DRAWS).contiguous()
    assert torch.equal(stochastic(top, dtype, words()), top.to(dtype))
    far = torch.full((DRAWS,), torch.finfo(torch.float32).max)
    assert torch.equal(stochastic(far, dtype, words()), far.to(dtype))


@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 3, 5 * 2**40])
def test_random_numbers_are_the_same_in_numbers_and_in_tensors(first: int) -> None:
    pair = keys(roots(2**63 + 5, 7), 12)
    numbers = [random_words(first + i, pair) for i in range(6)]
    tensors = random_words(
        torch.arange(first, first + 6), keys(roots(2**63 + 5, 7), torch.tensor(12.0, dtype=torch.float64))
    )
    assert numbers == tensors.tolist() and len(set(numbers)) == 6


def test_seed_parameter_step_and_element_each_give_other_random_numbers() -> None:
    found = {
        int(random_words(element, keys(roots(seed, parameter), step)))
        for seed in (0, 1, 2**40)
        for parameter in range(3)
        for step in (1, 2, 3)
        for element in range(20)
    }
    assert len(found) == 3 * 3 * 3 * 20
    assert len({mix(i) for i in range(10_000)}) == 10_000
    part = elements((2, 3), (4, 7), (1, 2), torch.device("cpu"))
    assert torch.equal(part, torch.tensor([[9, 10, 11], [16, 17, 18]]))


def test_bits_are_even_and_neighbours_and_steps_are_not_alike() -> None:
    one, next_step = (random_words(torch.arange(DRAWS), keys(roots(0, 0), t)) for t in (5, 6))
    error = 4 * 0.5 / DRAWS**0.5
    for words in (
        one,
        one ^ next_step,
        one[1:] ^ one[:-1],
        one ^ random_words(torch.arange(DRAWS), keys(roots(0, 1), 5)),
    ):
        for bit in range(32):
            assert ((words >> bit & 1).double().mean() - 0.5).abs() < error


def descend(dtype: torch.dtype, rounding: str, steps: int, size: float, shape: tuple[int, ...] = (60, 50)) -> Tensor:
    """Absolute steps of exactly `size`, since G = 1 makes U = 1; with what Kahan keeps."""
    p = torch.ones(shape, dtype=dtype, requires_grad=True)
    optimizer = Adafactor([p], lr=size, relative=False, lr_decay=None, rounding=rounding)
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    moved: Tensor = p.detach().double() + optimizer.state[p].get("compensation", torch.zeros(())).double()
    return moved


@SHORT
def test_updates_far_below_half_a_unit_move_the_weight_by_their_sum(dtype: torch.dtype) -> None:
    steps, size = 200, torch.finfo(dtype).eps / 64  # a unit below 1 is eps / 2
    assert (descend(dtype, "nearest", steps, size) == 1).all()
    moved = descend(dtype, "stochastic", steps, size) - 1
    unit = torch.finfo(dtype).eps / 2
    error = 4 * unit * (steps * (1 / 32) * (31 / 32) / moved.numel()) ** 0.5
    assert abs(moved.mean() + steps * size) < error and moved.std() > 0
    kept = descend(dtype, "kahan", steps, size) - 1
    torch.testing.assert_close(kept, torch.full_like(kept, -steps * size), rtol=1e-2, atol=0)


def test_another_seed_rounds_otherwise_and_the_same_seed_does_not() -> None:
    def run(seed: int) -> Tensor:
        p = torch.ones(50, 40, dtype=torch.bfloat16, requires_grad=True)
        p.grad = torch.linspace(-1, 1, 2000, dtype=p.dtype).view(50, 40)
        Adafactor([p], rounding="stochastic", seed=seed).step()
        return p.detach()

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


def test_kahan_survives_an_overflow_and_a_switch_in_mid_run() -> None:
    p = torch.full((4, 3), 65000.0, dtype=torch.float16, requires_grad=True)
    optimizer = Adafactor([p], lr=1e4, relative=False, lr_decay=None, maximize=True)
    p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["rounding"] = "kahan"
    optimizer.step()
    assert p.isinf().all() and (optimizer.state[p]["compensation"] == 0).all()
