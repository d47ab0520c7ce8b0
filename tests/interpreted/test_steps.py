"""Bad gradients, missing ones, weights that somebody has written to, schedules, reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.kernels.triton import sizes
from tests.interpreted.guarded import distance, random_steps, starts, train

SHAPES = [(37, 20), (64, 32), (33,), (4, 6, 5)]


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


def edited(backend: str, edits: dict[int, Callable[[Tensor], object]], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A matrix of four tiles, of which only that of the last rows is checked, after each step."""
    monkeypatch.setattr(sizes, "CHECKED", (1, 4))
    (start,) = starts([(128, 512)])
    p = start.clone().requires_grad_()
    optimizer, ends = Adafactor([p], backend=backend), []
    for number, (g,) in enumerate(random_steps([start], 4)):
        edits.get(number, lambda x: None)(p.data)  # torch does not count it
        p.grad = g
        optimizer.step()
        ends.append(p.detach().clone())
    return ends


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_an_outlier_that_is_put_back_is_found_before_a_step_is_too_long(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tile is the heaviest, so it is checked."""
    (start,) = starts([(128, 512)])
    edits = {0: lambda x: x[1, 7].fill_(value), 2: lambda x: x.copy_(start)}
    ours, theirs = (edited(backend, edits, monkeypatch) for backend in ("triton", "eager"))
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_what_no_check_sees_is_measured_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a light tile become a thousand times larger: one step is too short, the next is right."""
    edits = {1: lambda x: x[:4].mul_(1e3)}
    ours, theirs = (edited(backend, edits, monkeypatch) for backend in ("triton", "eager"))
    lengths = [[float((ends[i] - ends[i - 1])[4:].abs().max()) for i in (2, 3)] for ends in (ours, theirs)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-2)
