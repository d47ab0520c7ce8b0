"""Bad gradients, missing ones, weights that somebody has written to, schedules, reports."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests.interpreted.guarded import distance, random_steps, starts, train

SHAPES = [(37, 20), (64, 32), (33,), (4, 6, 5)]
INFINITE = {"NaN": float("nan"), "infinity": float("inf"), "a square beyond float32": 3e19}


def everything(optimizer: Adafactor) -> list[Tensor]:
    """Parameters and state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t.detach() for p in params for t in (p, *optimizer.state[p].values())]


@pytest.mark.parametrize(("bad", "number"), [*zip(INFINITE.values(), (0, 2, 0), strict=True)], ids=INFINITE)
def test_a_bad_gradient_stops_the_step_of_its_own_tensor_alone(bad: float, number: int) -> None:
    begin = starts(SHAPES[:3])
    steps = random_steps(begin, 2)
    hit = steps[1][number]
    assert hit is not None
    hit.view(-1)[-1] = bad
    _, optimizer = train(begin, steps, beta1=0.9, momentum_of="gradient")
    counts = [optimizer.state[p]["step"].item() for p in optimizer.param_groups[0]["params"]]
    assert counts == [1 if i == number else 2 for i in range(3)]
    with pytest.warns(RuntimeWarning, match=f"skipped parameter {number}"):
        record = optimizer.report()[number]
    assert record.skipped == 1 and record.steps == 1


def test_skipping_leaves_parameter_and_state_to_the_bit() -> None:
    begin = starts(SHAPES)
    steps = random_steps(begin, 2)
    for g in steps[1]:
        assert g is not None
        g.view(-1)[0] = float("inf")
    _, optimizer = train(begin, steps[:1])
    before = [t.clone() for t in everything(optimizer)]
    for p, g in zip(optimizer.param_groups[0]["params"], steps[1], strict=True):
        p.grad = g
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))


def test_raise_raises_before_anything_is_changed() -> None:
    begin = starts(SHAPES)
    _, optimizer = train(begin, random_steps(begin, 2), on_nonfinite="raise")
    before = [t.clone() for t in everything(optimizer)]
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["params"][2].grad[3] = float("nan")
    with pytest.raises(FloatingPointError, match="parameter 2"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))


def test_large_gradients_whose_sums_leave_float32_are_stepped() -> None:
    begin = starts([(60, 40), (50, 16)])
    steps = [[3e18 * g for g in step if g is not None] for step in random_steps(begin, 2)]
    ours, optimizer = train(begin, steps)
    theirs, _ = train(begin, steps, backend="eager")
    assert distance(ours, theirs, begin) < 1e-5
    assert [record.skipped for record in optimizer.report()] == [0, 0]


def test_tensors_may_be_without_a_gradient_for_a_while() -> None:
    begin = starts(SHAPES)
    steps = random_steps(begin, 4)
    steps[1][0] = steps[1][2] = steps[2][1] = None
    ours, optimizer = train(begin, steps)
    theirs, other = train(begin, steps, backend="eager")
    assert distance(ours, theirs, begin) < 1e-5
    assert [r.steps for r in optimizer.report()] == [r.steps for r in other.report()] == [3, 3, 3, 4]


WRITES: dict[str, Callable[[Tensor], object]] = {
    "torch knows of it": lambda p: p.mul_(30),
    "behind its back": lambda p: p.data.mul_(30),
    "one row behind its back": lambda p: p.data[1].mul_(1e4),
    "made small behind its back": lambda p: p.data.mul_(0.01),
}


KINDS: list[dict[str, Any]] = [{}, {"beta1": 0.9}, {"beta1": 0.9, "momentum_of": "gradient"}, {"factored": "row"}]


@pytest.mark.parametrize(("write", "keywords"), [*zip(WRITES.values(), KINDS, strict=True)], ids=WRITES)
def test_the_step_after_somebody_wrote_to_a_parameter_is_right(
    write: Callable[[Tensor], object], keywords: dict[str, Any]
) -> None:
    ends = []
    for backend in ("triton", "eager"):
        begin = starts([(37, 20), (64, 32), (33,)])
        steps = random_steps(begin, 5)
        params, optimizer = train(begin, steps[:2], backend=backend, weight_decay=0.1, **keywords)
        live = optimizer.param_groups[0]["params"]
        for i, step in enumerate(steps[2:]):
            if i != 2:
                with torch.no_grad():
                    for p in live:
                        write(p)
            for p, g in zip(live, step, strict=True):
                p.grad = g
            optimizer.step()
        ends.append([p.detach().clone() for p in live])
        del params
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-6 * float(b.abs().max()))


def test_rates_may_change_from_step_to_step() -> None:
    begin = starts(SHAPES)
    ends = []
    for backend in ("triton", "eager"):
        params = [p.clone().requires_grad_() for p in begin]
        optimizer = Adafactor(
            params, backend=backend, lr=torch.tensor(0.1), beta2=0.9, lr_decay=None, weight_decay=0.01
        )
        for i, step in enumerate(random_steps(begin, 4)):
            optimizer.param_groups[0].update(beta2=0.9 + 0.02 * i, weight_decay=0.1 * i)
            optimizer.param_groups[0]["lr"].mul_(0.5)
            for p, g in zip(params, step, strict=True):
                p.grad = g
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert distance(ends[0], ends[1], begin) < 1e-5


def test_scaled_gradients_are_unscaled_and_found_inf_stops_the_step() -> None:
    """What torch's GradScaler leaves on the optimizer."""
    begin = starts(SHAPES)
    steps = random_steps(begin, 2)
    for keywords in KINDS[:3:2]:
        plain, _ = train(begin, steps, **keywords)
        params = [p.clone().requires_grad_() for p in begin]
        optimizer = Adafactor(params, backend="triton", **keywords)
        for found in (0.0, 1.0, 0.0):
            step = steps[0 if not optimizer.state[params[0]]["step"] else 1]
            for p, g in zip(params, step, strict=True):
                assert g is not None
                p.grad = 1024 * g
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor([found])  # type: ignore[attr-defined]
            before = [t.clone() for t in everything(optimizer)]
            optimizer.step()
            same = [torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True)]
            assert all(same) if found else not all(same)
        assert all(torch.equal(a, b) for a, b in zip(plain, params, strict=True))


def test_the_report_is_that_of_plain_torch() -> None:
    begin = starts(SHAPES)
    steps = random_steps(begin, 3)
    choices: list[dict[str, Any]] = [{}, {"relative": False, "lr": 1e-3}]
    for keywords in choices:
        _, ours = train(begin, steps, clip=0.5, **keywords)
        _, theirs = train(begin, steps, clip=0.5, backend="eager", **keywords)
        for a, b in zip(ours.report(), theirs.report(), strict=True):
            for name in ("rms_update", "clip_rate", "step_size", "rms_parameter", "relative_change", "beta2", "steps"):
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5), name


def test_groups_have_their_own_settings() -> None:
    begin = starts([(20, 16), (16, 20), (24,)])
    ends = []
    for backend in ("triton", "eager"):
        params = [p.clone().requires_grad_() for p in begin]
        groups = [
            {"params": params[:1], "weight_decay": 0.3, "lr": 0.05},
            {"params": params[1:2], "beta1": 0.9, "relative": False},
            {"params": params[2:], "maximize": True, "clip": None},
        ]
        optimizer = Adafactor(groups, backend=backend)
        for step in random_steps(begin, 3):
            for p, g in zip(params, step, strict=True):
                p.grad = g
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert distance(ends[0], ends[1], begin) < 1e-5


def test_a_copy_of_the_optimizer_goes_its_own_way() -> None:
    begin = starts(SHAPES)
    _, optimizer = train(begin, random_steps(begin, 2))
    twin = copy.deepcopy(optimizer)
    for one in (optimizer, twin):
        for p, g in zip(one.param_groups[0]["params"], random_steps(begin, 1, seed=9)[0], strict=True):
            p.grad = g
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(everything(optimizer), everything(twin), strict=True))
