"""What is kept from step to step is given up when anything changes, and only then."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests import inside

SHAPES = [(30, 20), (12,), (4, 5, 6), (64, 3)]
Change = Callable[[Adafactor, list[Tensor]], None]


def edit(name: str, value: object) -> Change:
    def change(optimizer: Adafactor, params: list[Tensor]) -> None:
        optimizer.param_groups[0][name] = value

    return change


def move(optimizer: Adafactor, params: list[Tensor]) -> None:
    params[0].data = params[0].data.clone()


def lay_differently(optimizer: Adafactor, params: list[Tensor]) -> None:
    params[0].data = params[0].data.t().contiguous().t()


def replace_state(optimizer: Adafactor, params: list[Tensor]) -> None:
    optimizer.state[params[0]]["row"] = optimizer.state[params[0]]["row"] * 3


def move_state(optimizer: Adafactor, params: list[Tensor]) -> None:
    optimizer.state[params[3]]["col"].data = optimizer.state[params[3]]["col"].data.clone() * 5


def replace_all_state(optimizer: Adafactor, params: list[Tensor]) -> None:
    optimizer.state[params[1]] = {k: v.clone() * 2 for k, v in optimizer.state[params[1]].items()}


def note_in_state(optimizer: Adafactor, params: list[Tensor]) -> None:
    optimizer.state[params[1]]["note"] = "mine"


def load(optimizer: Adafactor, params: list[Tensor]) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def lose_gradient(optimizer: Adafactor, params: list[Tensor]) -> None:
    params[2].grad = None


def turn_gradient(optimizer: Adafactor, params: list[Tensor]) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad.t().contiguous().t()


def leave(optimizer: Adafactor, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["params"].pop()


def join(optimizer: Adafactor, params: list[Tensor]) -> None:
    new = torch.ones(7, 9, dtype=torch.float64, requires_grad=True)
    new.grad = torch.linspace(-1, 1, 63, dtype=torch.float64).view(7, 9)
    optimizer.add_param_group({"params": [new], "lr": 0.5})
    params.append(new)


def swap_backend(optimizer: Adafactor, params: list[Tensor]) -> None:
    optimizer.backend = "eager"


def nothing(optimizer: Adafactor, params: list[Tensor]) -> None:
    pass


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        nothing, move, lay_differently, replace_state, move_state, replace_all_state, note_in_state, load,
        lose_gradient, turn_gradient, leave, join, swap_backend,
    )
}  # fmt: skip
for keyword, value in [("lr", 0.3), ("weight_decay", 0.2), ("beta2", 0.5), ("clip", 0.1), ("relative", False),
                       ("maximize", True), ("eps", (1e-30, 0.5)), ("on_nonfinite", "raise")]:  # fmt: skip
    CHANGES[keyword] = edit(keyword, value)
STAYS = {"nothing", "lr", "weight_decay", "beta2", "lose_gradient"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_counts_from_the_next_step_on(change: str) -> None:
    ends = []
    for backend in ("auto", "eager"):
        random = torch.Generator().manual_seed(0)
        params: list[Tensor] = [
            torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_() for shape in SHAPES
        ]
        optimizer = Adafactor(list(params), lr=0.1, backend=backend)
        standing = []
        for i in range(8):
            for p in params:
                p.grad = torch.randn(p.shape, dtype=torch.float64, generator=random)
            if i == 4:
                CHANGES[change](optimizer, params)
            optimizer.step()
            standing.append(inside.prepared(optimizer))
        ends.append([p.detach().clone() for p in params])
        if backend == "auto":
            assert standing[3] is standing[0] is not None
            assert (standing[4] is standing[3]) == (change in STAYS)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_what_changes_nothing_makes_nothing_anew() -> None:
    """The same gradient for two parameters, or none for one, or steps inside autocast: nothing is prepared anew."""
    params = [torch.ones(4, 3, requires_grad=True) for _ in range(2)]
    optimizer, prepared = Adafactor(params), set()
    for i in range(9):
        shared = torch.full((4, 3), 1.0 + i)
        params[0].grad, params[1].grad = shared, shared if i % 3 else shared.clone()
        if i % 4 == 3:
            params[1].grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 2 == 0):
            optimizer.step()
        prepared.add(inside.prepared(optimizer))
    assert len(prepared) == 1 and None not in prepared


@pytest.mark.parametrize("turn", [torch._neg_view, Tensor.double])
def test_a_gradient_of_another_kind_is_noticed(turn: Callable[[Tensor], Tensor]) -> None:
    ends = []
    for backend in ("auto", "eager"):
        p = torch.ones(6, 4, requires_grad=True)
        optimizer = Adafactor([p], lr=0.1, backend=backend)
        for i in range(6):
            g = torch.linspace(-1, 2, 24).view(6, 4) + i
            p.grad = torch.zeros_like(p)
            p.grad.data = turn(g) if i == 4 else g
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # that it is left to eager PyTorch
                optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_schedule_does_not_make_every_step_the_first() -> None:
    p = torch.randn(400, 300, requires_grad=True)
    optimizer = Adafactor([p], lr=0.1, lr_decay=None, backend="cpu")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    kept = set()
    for _ in range(5):
        p.grad = torch.randn(400, 300)
        optimizer.step()
        schedule.step()
        kept.add(inside.prepared(optimizer))
    assert len(kept) == 1 and None not in kept


def test_a_step_that_fails_is_not_taken_for_the_last_one() -> None:
    ends = []
    for backend in ("auto", "eager"):
        p = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
        optimizer = Adafactor([p], lr=0.1, backend=backend)
        for i in range(6):
            p.grad = torch.full_like(p, 1.0 + i)
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            if i == 3:
                p.grad = p.grad.to_sparse()
                with pytest.raises(TypeError, match="sparse"):
                    optimizer.step()
            else:
                optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-14, atol=0)
