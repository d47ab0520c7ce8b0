"""Settings that change between steps: seen from the next step on, and nothing kept is taken for something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from adafactor import Adafactor
from tests import oracle
from tests.attack.helpers import MOMENTUM, PLAIN, Walk, assert_step, assert_unchanged, random, refused, snapshot

Axes = tuple[int, int]


def uneven(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Rows of very different sizes, so that rows and columns cannot be taken for one another unseen."""
    return random(shape, seed) * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((8, 8), (0, 1), (1, 0)),
        ((8, 8), None, (1, 0)),
        ((8, 8), (1, 0), (-2, -1)),
        ((8, 8), None, (0, 1)),
        ((8, 8), (0, 1), (-2, -1)),
        ((3, 8, 8), (1, 2), (2, 1)),
        ((8, 5), (0, 1), (1, 0)),
    ],
    ids=str,
)
def test_the_same_two_axes_in_another_order_make_the_same_steps_or_are_refused(
    shape: tuple[int, ...], before: Axes | None, after: Axes, backend: str
) -> None:
    row = replace(PLAIN, axes=before or (0, 1))
    walk = Walk(random(shape, 9), row, backend)
    walk.optimizer.param_groups[0]["axes"] = before
    for i in range(4):
        walk.check(uneven(shape, i))
    walk.optimizer.param_groups[0]["axes"] = after
    for i in range(4, 7):
        kept = snapshot(walk.optimizer)
        message = refused(partial(walk.check, uneven(shape, i)), ValueError)
        if message is not None:
            assert "axes" in message
            assert_unchanged(walk.optimizer, kept)
            return


@pytest.mark.parametrize(
    ("shape", "factored", "before", "after"),
    [
        ((8, 8), "row", (0, 1), (1, 0)),
        ((8, 8), "column", (0, 1), (1, 0)),
        ((6, 6, 6), "outer", (0, 1), (1, 2)),
        ((6, 6, 6), "outer", (0, 1), (0, 2)),
    ],
    ids=str,
)
def test_statistics_of_other_axes_are_not_taken_for_those_of_the_new_ones(
    shape: tuple[int, ...], factored: str, before: Axes, after: Axes, backend: str
) -> None:
    p = nn.Parameter(random(shape, 9))
    optimizer = Adafactor([p], factored=factored, axes=before, backend=backend)
    for i in range(4):
        p.grad = uneven(shape, i)
        optimizer.step()
    optimizer.param_groups[0]["axes"] = after
    kept = snapshot(optimizer)
    with pytest.raises(ValueError, match="axes"):
        optimizer.step()
    assert_unchanged(optimizer, kept)


@pytest.mark.parametrize("order", [("update", "gradient"), ("gradient", "update")], ids=str)
@pytest.mark.parametrize("shape", [(12, 9), (7,)], ids=str)
def test_an_average_of_updates_is_not_taken_for_one_of_gradients(
    order: tuple[str, str], shape: tuple[int, ...], backend: str
) -> None:
    rows = [MOMENTUM[f"momentum of the {of}"] for of in order]
    walk = Walk(random(shape, 9), rows[0], backend)
    for i in range(4):
        walk.check(100 * uneven(shape, i))
    group = walk.optimizer.param_groups[0]
    group["momentum_of"] = order[1]
    kept = snapshot(walk.optimizer)
    g = uneven(shape, 5)
    restarted = [oracle.Memory(walk.memory.r, walk.memory.c, walk.memory.v) for _ in range(2)]
    old = walk.p.detach().double().numpy().copy()
    # from zero, with or without a new beginning of the bias correction
    ends = [
        oracle.step(row, old, g.double().numpy(), 5, 1.0, memory)
        for row, memory in zip((rows[1], replace(rows[1], beta1=0.0)), restarted, strict=True)
    ]
    walk.p.grad = g
    message = refused(walk.optimizer.step, ValueError)
    if message is not None:
        assert "momentum_of" in message
        assert_unchanged(walk.optimizer, kept)
        return
    ways = [(torch.as_tensor(old), torch.as_tensor(end)) for end in ends]
    failures = [refused(partial(assert_step, way, walk.p), AssertionError) for way in ways]
    assert None in failures, failures


def tensor(value: float) -> Any:
    return torch.tensor(value)


def lr_run(backend: str, lr: Any, change: Callable[[Adafactor, float], None], **keywords: Any) -> torch.Tensor:
    p = nn.Parameter(random((30, 20), 9))
    optimizer = Adafactor([p], lr=lr, lr_decay=None, backend=backend, **keywords)
    for i, value in enumerate((None, 0.02, 0.02, 0.5, 0.0, 0.125)):
        if value is not None:
            change(optimizer, value)
        p.grad = random((30, 20), i)
        optimizer.step()
    return p.detach()


def written(optimizer: Adafactor, value: float) -> None:
    optimizer.param_groups[0]["lr"].fill_(value)


def replaced(optimizer: Adafactor, value: float) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(value)


def numbered(optimizer: Adafactor, value: float) -> None:
    optimizer.param_groups[0]["lr"] = float(torch.tensor(value))


@pytest.mark.parametrize("change", [written, replaced, numbered])
@pytest.mark.parametrize("keywords", [{}, {"beta1": 0.9}, {"relative": False, "weight_decay": 0.1}], ids=str)
def test_a_learning_rate_in_a_tensor_makes_the_steps_of_its_number(
    change: Callable[[Adafactor, float], None], keywords: dict[str, Any], any_backend: str
) -> None:
    expected = lr_run(any_backend, float(torch.tensor(0.01)), numbered, **keywords)
    assert torch.equal(lr_run(any_backend, torch.tensor(0.01), change, **keywords), expected)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_tensor_is_no_way_around_the_limits_of_the_learning_rate(value: float, any_backend: str) -> None:
    p = nn.Parameter(random((4, 3), 0))
    with pytest.raises(ValueError, match="lr"):
        Adafactor([p], lr=tensor(value), backend=any_backend)
    optimizer = Adafactor([p], lr=tensor(0.01), backend=any_backend)
    p.grad = torch.ones(4, 3)
    optimizer.step()
    written(optimizer, value)
    kept = p.detach().clone(), int(optimizer.state[p]["step"])
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert torch.equal(p, kept[0]) and int(optimizer.state[p]["step"]) == kept[1]


def test_a_checkpoint_keeps_a_learning_rate_in_a_tensor(any_backend: str) -> None:
    p, q = (nn.Parameter(random((30, 20), 9)) for _ in range(2))
    saved, loaded = (Adafactor([x], lr=tensor(lr), backend=any_backend) for x, lr in ((p, 0.25), (q, 0.5)))
    loaded.load_state_dict(saved.state_dict())
    written(saved, 0.125)  # the two do not share it
    assert float(loaded.param_groups[0]["lr"]) == 0.25
    p.grad = q.grad = random((30, 20), 0)
    saved.step()
    loaded.step()
    expected = nn.Parameter(random((30, 20), 9))
    expected.grad = q.grad
    Adafactor([expected], lr=0.25, backend=any_backend).step()
    assert torch.equal(q, expected) and not torch.equal(p, expected)


def test_a_scheduler_drives_a_learning_rate_in_a_tensor(any_backend: str) -> None:
    ends = []
    for lr in (0.25, tensor(0.25)):
        p = nn.Parameter(random((30, 20), 9))
        optimizer = Adafactor([p], lr=lr, lr_decay=None, backend=any_backend)
        scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for i in range(5):
            p.grad = random((30, 20), i)
            optimizer.step()
            scheduler.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


CYCLES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=9),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.001, 0.05, step_size_up=3),
}


def cycled(cycle: str) -> list[tuple[float, float]]:
    """The learning rate and β₁ that torch's own Adam is given, step by step."""
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    adam = torch.optim.Adam([p], lr=0.05, betas=(0.9, 0.999))
    scheduler, given = CYCLES[cycle](adam), []
    for _ in range(8):
        given.append((adam.param_groups[0]["lr"], adam.param_groups[0]["betas"][0]))
        adam.step()
        scheduler.step()
    return given


@pytest.mark.parametrize("cycle", CYCLES)
def test_a_cycle_of_momentum_is_one_of_beta1_or_is_refused_by_torch_at_once(cycle: str, any_backend: str) -> None:
    p, q = (nn.Parameter(random((30, 20), 9)) for _ in range(2))
    optimizer, by_hand = (Adafactor([x], lr=0.05, beta1=0.9, lr_decay=None, backend=any_backend) for x in (p, q))
    made: list[LRScheduler] = []
    message = refused(lambda: made.append(CYCLES[cycle](optimizer)), ValueError)
    if message is not None:
        assert "must support momentum" in message
        return
    for i, (lr, beta1) in enumerate(cycled(cycle)):
        by_hand.param_groups[0].update(lr=lr, beta1=beta1)
        p.grad, q.grad = random((30, 20), i), random((30, 20), i)
        optimizer.step()
        by_hand.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
        made[0].step()


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("kind", [OneCycleLR, CyclicLR], ids=lambda kind: str(kind.__name__))
def test_cycles_of_the_learning_rate_alone_leave_beta1_as_it_is(kind: Any, beta1: float, any_backend: str) -> None:
    p = nn.Parameter(random((30, 20), 9))
    optimizer = Adafactor([p], lr=0.05, beta1=beta1, backend=any_backend)
    limits = {"total_steps": 9} if kind is OneCycleLR else {"base_lr": 0.001}
    scheduler = kind(optimizer, max_lr=0.05, cycle_momentum=False, **limits)
    for i in range(5):
        p.grad = random((30, 20), i)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["beta1"] == beta1 and int(optimizer.state[p]["step"]) == 5
