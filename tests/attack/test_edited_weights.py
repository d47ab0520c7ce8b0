"""Weights that somebody else has written to: the next step starts from what is there, not from what was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from tests.attack.helpers import MOMENTUM, PLAIN, Walk, assert_step, random

SHAPES = [(64, 64), (300, 700), (1100, 257), (1000,), (48, 32, 3, 3)]
NAN = float("nan")


def in_place(p: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        p.copy_(value)


def through_data(p: nn.Parameter, value: Tensor) -> None:
    p.data.copy_(value)


def through_numpy(p: nn.Parameter, value: Tensor) -> None:
    p.detach().numpy()[...] = value.numpy()


def through_the_model(p: nn.Parameter, value: Tensor) -> None:
    holder = nn.ParameterList([p])
    holder.load_state_dict({"0": value})


def new_memory(p: nn.Parameter, value: Tensor) -> None:
    p.data = value.clone()


WAYS: list[Callable[[nn.Parameter, Tensor], None]] = [
    in_place,
    through_data,
    through_numpy,
    through_the_model,
    new_memory,
]


def one_element(value: float) -> Callable[[Tensor], Tensor]:
    def spoilt(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[x.numel() // 3] = value
        return x

    return spoilt


SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "a thousandfold": lambda x: x * 1e3,
    "a billionfold": lambda x: x * 1e9,
    "one huge element": one_element(1e15),
    "one NaN": one_element(NAN),
    "all NaN": lambda x: torch.full_like(x, NAN),
}


def spoil_and_repair(walk: Walk, spoil: str, way: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Steps as usual, steps with spoilt weights, and steps from the weights that were there before.

    Several of each: whatever a backend carries over from one undisturbed step to the next is then at work.
    """
    shape, dtype = tuple(walk.p.shape), walk.p.dtype
    for i in range(4):
        walk.check(random(shape, i, dtype))
    good = walk.p.detach() * 0.02
    way(walk.p, SPOILT[spoil](good))
    for i in range(4, 8):
        if "NaN" in spoil:
            walk.step(random(shape, i, dtype))
        else:
            walk.check(random(shape, i, dtype))
    way(walk.p, good)
    for i in range(8, 10):
        walk.check(random(shape, i, dtype))


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
def test_a_step_starts_from_the_weights_that_are_there(
    spoil: str, way: Callable[[nn.Parameter, Tensor], None], backend: str
) -> None:
    spoil_and_repair(Walk(random((64, 64), 9), PLAIN, backend), spoil, way)


# the average of updates holds αₜ, so by the equations NaN weights make it NaN for ever
SPOILT_WITH = [(m, s) for m in MOMENTUM for s in SPOILT if m != "momentum of the update" or "NaN" not in s]


@pytest.mark.parametrize(("momentum", "spoil"), SPOILT_WITH)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rolled_back_tensor_of_any_size_takes_the_oracles_steps(
    shape: tuple[int, ...], spoil: str, momentum: str, backend: str
) -> None:
    row = MOMENTUM[momentum]
    if len(shape) == 4:
        row = replace(row, axes=(0, 1))
    spoil_and_repair(Walk(random(shape, 9), row, backend), spoil, in_place)


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_rolled_back_float64_tensor_takes_the_oracles_steps(spoil: str, backend: str) -> None:
    spoil_and_repair(Walk(random((300, 70), 9, torch.float64), PLAIN, backend), spoil, in_place)


@pytest.mark.parametrize("factor", [1e-3, 0.0, 10.0])
def test_weights_that_shrink_or_grow_before_every_step_are_measured_anew(factor: float, backend: str) -> None:
    walk = Walk(random((120, 90), 9), PLAIN, backend)
    for i in range(8):
        walk.check(random((120, 90), i))
        in_place(walk.p, walk.p.detach() * factor)


@pytest.mark.parametrize("hot_steps", [5, 20])
def test_a_run_whose_learning_rate_was_too_high_goes_on_from_the_weights_before(hot_steps: int, backend: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)]
    model = nn.Sequential(*layers)
    data, target = torch.randn(256, 32), torch.randn(256, 8)
    optimizer = Adafactor(model.parameters(), backend=backend, lr_decay=None)

    def train(model: nn.Module, optimizer: Adafactor, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(data) - target).square().mean().backward()
            optimizer.step()

    train(model, optimizer, 10)
    good = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] = 5.0
    train(model, optimizer, hot_steps)
    model.load_state_dict(good)
    optimizer.param_groups[0]["lr"] = 1e-2

    twin = copy.deepcopy(model)
    fresh = Adafactor(twin.parameters(), backend=backend)
    fresh.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1)
    train(twin, fresh, 1)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_step((good[name].double(), q.detach().double()), p)


def clamp(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.clamp_(-100, 100)


def swap_and_swap_back(p: nn.Parameter) -> None:
    kept = p.detach().clone()
    in_place(p, torch.zeros_like(p))
    in_place(p, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16, 12), (40,), (8, 6, 3, 3)], ids=str)
@pytest.mark.parametrize("write", [clamp, swap_and_swap_back], ids=lambda write: str(write.__name__))
def test_what_kahan_kept_outlives_a_write_that_changes_nothing(
    write: Callable[[nn.Parameter], None], shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    written, left_alone = (nn.Parameter(random(shape, 9, dtype)) for _ in range(2))
    kahan, lr = "kahan", 1e-3  # steps of about half a unit in the last place
    optimizers = [Adafactor([p], rounding=kahan, lr=lr, relative=True, backend=backend) for p in (written, left_alone)]
    for i in range(20):
        for p, optimizer in zip((written, left_alone), optimizers, strict=True):
            p.grad = random(shape, i, dtype)
            optimizer.step()
        write(written)
    assert torch.equal(written, left_alone)
    assert bool(optimizers[0].state[written]["compensation"].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", [in_place, through_data], ids=lambda way: str(way.__name__))
def test_what_kahan_kept_moves_no_weight_that_was_written_since(
    way: Callable[[nn.Parameter, Tensor], None], dtype: torch.dtype, backend: str
) -> None:
    p = nn.Parameter(random((64, 48), 9, dtype))
    optimizer = Adafactor([p], rounding="kahan", backend=backend)
    for i in range(6):
        p.grad = random((64, 48), i, dtype)
        optimizer.step()
    way(p, random((64, 48), 100, dtype) * random((64, 48), 101, dtype).exp())
    before = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    half_way = optimizer.state[p]["compensation"].float() + p.detach().float() - before.float()
    unit = torch.finfo(dtype).eps * 2.0 ** before.float().abs().log2().floor()
    assert bool((half_way.abs() <= unit / 2).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("edit", ["the whole", "one row"])
def test_what_kahan_kept_of_a_weight_is_not_added_to_another_that_takes_its_place(
    dtype: torch.dtype, edit: str, backend: str
) -> None:
    p = nn.Parameter(torch.full((16, 12), 1.0, dtype=dtype))
    optimizer = Adafactor([p], rounding="kahan", lr=1e-4, lr_decay=None, relative=True, backend=backend)
    for i in range(3):  # each below half a unit in the last place, so that the remainder holds it
        p.grad = random((16, 12), i, dtype).abs()
        optimizer.step()
    written = slice(None) if edit == "the whole" else slice(0, 1)
    with torch.no_grad():
        p[written] = 2.0**-10
    optimizer.param_groups[0]["lr"] = 0.0
    p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
        assert bool((p[written] == 2.0**-10).all())
